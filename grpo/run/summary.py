"""The summary of a run that is printed before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo.batch import Problem
from grpo.config import Config, DataConfig
from grpo.data import ProblemSet, count_shared
from grpo.model import num_parameters
from grpo.run.state import Run


def print_summary(
    run: Run, train: ProblemSet, evaluation: ProblemSet, why_padded: str | None, checkpoint: Path | None
) -> None:
    """Model, data, sizes of a step, algorithm, memory, and warnings, in a few lines on the console.

    Args:
        why_padded: the reason why scoring computes prompts once per completion; None if it does not.
        checkpoint: the one that the run continues from.
    """
    config = run.config
    lines = [*_facts(run, train, evaluation), *warnings_of(config, train.problems, run.eval_problems)]
    if why_padded:
        lines.append(f"note      {why_padded}: each prompt is computed once per completion when scoring")
    if checkpoint:
        lines.append(f"resuming  {checkpoint} at step {run.progress.step}")
    for line in lines:
        run.reporter.print(line)


def _facts(run: Run, train: ProblemSet, evaluation: ProblemSet) -> Iterator[str]:
    config, a, r = run.config, run.config.algorithm, run.config.rollout
    yield (
        f"model     {config.model.name_or_path}, {num_parameters(run.policy.model) / 1e6:.2f}M parameters, "
        f"{config.runtime.precision} on {run.world.device.type}"
    )
    yield data_line(config.data, train, evaluation, len(run.eval_problems))
    yield (
        f"step      {r.prompts_per_step} problems x {r.num_generations} completions = {r.prompts_per_step * r.num_generations}, "
        f"over {run.world.size} rank(s); {a.updates_per_step} update(s) from them; {run.max_steps} steps, "
        f"{run.problems.steps_per_epoch} to an epoch"
    )
    yield f"algorithm {a.name}: {a.objective}, baseline {a.baseline}, scale {a.scale}, {a.aggregation}, beta {a.beta:g}"
    restart = "starts anew" if config.checkpoint.resume == "never" else "continues it from its newest checkpoint"
    yield f"output    {config.output_dir}; the same command {restart}"


def data_line(data: DataConfig, train: ProblemSet, evaluation: ProblemSet, num_evaluated: int) -> str:
    """The numbers of problems to train on, to evaluate on, and left out."""
    longest = data.max_prompt_length
    line = f"data      {data.dataset}: {len(train.problems)} problems to train on"
    if train.num_too_long:
        line += f", {train.num_too_long} left out as longer than {longest} tokens"
    if train.num_empty:
        line += f", {train.num_empty} left out as empty"
    if train.num_without_answer:
        line += f", {train.num_without_answer} without an answer"
    line += f"; {num_evaluated} to evaluate on"
    if left_out := evaluation.num_too_long + evaluation.num_empty:
        line += f", {left_out} left out as longer than {longest} tokens or empty"
    return line


def warnings_of(config: Config, train: Sequence[Problem], evaluation: Sequence[Problem]) -> Iterator[str]:
    """Notes on settings and data that could surprise the user."""
    a, r = config.algorithm, config.rollout
    if shared := count_shared(train, evaluation):
        yield f"warning: {shared} evaluation problems are also in the training data"
    if not evaluation:
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
