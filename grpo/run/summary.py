"""The summary of a run that is printed before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from grpo.config import Config
from grpo.data import ProblemSet, count_shared
from grpo.model import Policy, num_parameters
from grpo.run import memory
from grpo.run.state import Run


def print_summary(
    run: Run, train: ProblemSet, evaluation: ProblemSet, why_padded: str | None, checkpoint: Path | None
) -> None:
    """Model, data, sizes of a step, algorithm, memory, and warnings, in a few lines on the console.

    Args:
        why_padded: the reason why scoring computes prompts once per completion; None if it does not.
        checkpoint: the one that the run continues from.
    """
    config, world = run.config, run.world
    longest = max(len(problem.prompt_ids) for problem in [*train.problems, *evaluation.problems])
    lines = [*_facts(run, train, evaluation), *_warnings(run, train)]
    lines.append(memory_line(config, run.policy, run.ref_scorer and run.ref_scorer.model, world.size, longest))
    if why_padded:
        lines.append(f"note      {why_padded}: each prompt is computed once per completion when scoring")
    if checkpoint:
        lines.append(f"resuming  {checkpoint} at step {run.progress.step}")
    for line in lines:
        run.reporter.say(line)


def _facts(run: Run, train: ProblemSet, evaluation: ProblemSet) -> Iterator[str]:
    config, a, r = run.config, run.config.algorithm, run.config.rollout
    longest = config.data.max_prompt_length
    yield (
        f"model     {config.model.name_or_path}, {num_parameters(run.policy.model) / 1e6:.2f}M parameters, "
        f"{config.runtime.precision} on {run.world.device.type}"
    )
    data = f"data      {config.data.dataset}: {len(train.problems)} problems to train on"
    if train.num_too_long:
        data += f", {train.num_too_long} left out as longer than {longest} tokens"
    if train.num_empty:
        data += f", {train.num_empty} left out as empty"
    if train.num_without_answer:
        data += f", {train.num_without_answer} without an answer"
    data += f"; {len(run.eval_problems)} to evaluate on"
    if left_out := evaluation.num_too_long + evaluation.num_empty:
        data += f", {left_out} left out as longer than {longest} tokens or empty"
    yield data
    yield (
        f"step      {r.prompts_per_step} problems x {r.num_generations} completions = {r.prompts_per_step * r.num_generations}, "
        f"over {run.world.size} rank(s); {a.updates_per_step} update(s) from them; {run.max_steps} steps, "
        f"{run.problems.steps_per_epoch} to an epoch"
    )
    yield f"algorithm {a.name}: {a.objective}, baseline {a.baseline}, scale {a.scale}, {a.aggregation}, beta {a.beta:g}"
    restart = "starts anew" if config.checkpoint.resume == "never" else "continues it from its newest checkpoint"
    yield f"output    {config.output_dir}; the same command {restart}"


def _warnings(run: Run, train: ProblemSet) -> Iterator[str]:
    a, r = run.config.algorithm, run.config.rollout
    if shared := count_shared(train.problems, run.eval_problems):
        yield f"warning: {shared} evaluation problems are also in the training data"
    if not run.eval_problems:
        yield "note: no evaluation, since data.eval_split and data.eval_dataset are not set"
    if a.updates_per_step == 1:
        yield "note: with one update per rollout the loss stays near 0 while its gradient does not: watch reward, not loss"
    without_effect = {
        "delta": a.delta is not None and a.objective != "clip",
        "importance_level=sequence": a.importance_level == "sequence" and a.objective == "reinforce",
        "ref_sync_steps": a.ref_sync_steps > 0 and a.beta == 0,
    }
    for name, has_no_effect in without_effect.items():
        if has_no_effect:
            yield f"note: algorithm.{name} has no effect with objective {a.objective} and beta {a.beta:g}"
    for key, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if (value := getattr(r, key)) != neutral:
            yield (
                f"warning: rollout.{key}={value} samples from a truncated distribution, but the log-probs are those of the whole "
                "distribution: the gradient estimate is biased"
            )


def memory_line(
    config: Config, policy: Policy, reference: torch.nn.Module | None, world_size: int, longest_prompt: int
) -> str:
    """An estimate of the memory that a rank needs."""
    r, budget = config.rollout, config.optim.tokens_per_microbatch
    rows = r.prompts_per_step * r.num_generations // world_size
    most = rows * (longest_prompt + r.max_completion_length)
    return memory.line(
        memory.estimate(
            policy.model.config.get_text_config(),
            num_parameters(policy.model),
            precision=config.runtime.precision,
            reference_bytes=sum(p.numel() * p.element_size() for p in reference.parameters()) if reference else 0.0,
            gradient_checkpointing=config.model.gradient_checkpointing,
            is_on_cpu=policy.device.type == "cpu",
            tokens_in_flight=min(r.tokens_in_flight or most, most),
            tokens_per_microbatch=min(budget, most),
        )
    )
