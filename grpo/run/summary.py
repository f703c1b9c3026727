"""A run in words: the summary at the start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo.batch import Problem
from grpo.config import Config
from grpo.data import ProblemSet, count_shared
from grpo.model import Policy, num_parameters
from grpo.run import memory


def summary(
    config: Config,
    *,
    num_parameters: int,
    device: str,
    world_size: int,
    train: ProblemSet,
    evaluation: Sequence[Problem],
    eval_left_out: int = 0,
    steps_per_epoch: int,
    max_steps: int,
) -> list[str]:
    """What is about to happen, and what could surprise, in a few lines."""
    a, r = config.algorithm, config.rollout
    left_out = ""
    if train.num_too_long:
        left_out += f", {train.num_too_long} left out as longer than {config.data.max_prompt_length} tokens"
    if train.num_empty:
        left_out += f", {train.num_empty} left out as empty"
    if train.num_without_answer:
        left_out += f", {train.num_without_answer} without an answer"
    rows = r.prompts_per_step * r.num_generations
    lines = [
        f"model     {config.model.name_or_path}, {num_parameters / 1e6:.2f}M parameters, "
        f"{config.runtime.precision} on {device}",
        f"data      {config.data.dataset}: {len(train.problems)} problems to train on{left_out}; "
        f"{len(evaluation)} to evaluate on"
        + f", {eval_left_out} left out as longer than {config.data.max_prompt_length} tokens or empty"
        * bool(eval_left_out),
        f"step      {r.prompts_per_step} problems x {r.num_generations} completions = {rows}, over {world_size} rank(s); "
        f"{a.updates_per_step} update(s) from them; {max_steps} steps, {steps_per_epoch} to an epoch",
        f"algorithm {a.name}: {a.objective}, baseline {a.baseline}, scale {a.scale}, {a.aggregation}, beta {a.beta:g}",
        f"output    {config.output_dir}; the same command "
        + ("starts anew" if config.checkpoint.resume == "never" else "continues it from its newest checkpoint"),
    ]
    shared = count_shared(train.problems, evaluation)
    if shared:
        lines.append(f"warning: {shared} evaluation problems are also in the training data")
    if not evaluation:
        lines.append("note: no evaluation, since data.eval_split and data.eval_dataset are not set")
    if a.updates_per_step == 1:
        lines.append(
            "note: with one update per rollout the loss stays near 0 while its gradient does not: watch reward, not loss"
        )
    idle = {
        "delta": a.delta is not None and a.objective != "clip",
        "importance_level=sequence": a.importance_level == "sequence" and a.objective == "reinforce",
        "ref_sync_steps": a.ref_sync_steps > 0 and a.beta == 0,
    }
    for name in (name for name, is_idle in idle.items() if is_idle):
        lines.append(f"note: algorithm.{name} has no effect with objective {a.objective} and beta {a.beta:g}")
    for key, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(r, key) != neutral:
            lines.append(
                f"warning: rollout.{key}={getattr(r, key)} samples from a cut distribution, but the whole one is scored: "
                "the gradient estimate is biased"
            )
    return lines


def memory_line(
    config: Config, policy: Policy, reference: torch.nn.Module | None, world_size: int, longest_prompt: int
) -> str:
    """What a rank will need, for the summary."""
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
