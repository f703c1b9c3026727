"""The summary of a run that is printed before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from grpo.algorithm.batch import Problem
from grpo.checkpoint.saver import how_to_continue
from grpo.config import Config, DataConfig, keys_without_effect
from grpo.data import ProblemSet, count_shared_prompts
from grpo.evaluation.grading import correctness_note
from grpo.model import num_parameters
from grpo.run.records import Run

TEXT_COMPARING_REWARDS = ("accuracy", "pattern_answer", "exact_or_stripped")
"""Rewards that compare the whole text of a reference answer. math_verify is not among them, since
it reads worked solutions."""


def print_summary(
    run: Run,
    train: ProblemSet,
    evaluation: ProblemSet,
    why_padded: str | None,
    checkpoint: Path | None,
) -> None:
    """Print the facts of a run, and warnings of settings and data that make a run wrong or useless.

    Args:
        train: problems to train on.
        evaluation: problems to evaluate on.
        why_padded: reason why scoring pads rows, and so computes each prompt once per completion.
            None if rows are packed, and each prompt is computed once per group.
        checkpoint: checkpoint that the run continues from. None for a new run.
    """
    config = run.config
    rollout = config.rollout
    algorithm = config.algorithm
    model = run.learner.policy.model
    eval_problems = run.tasks.eval_problems
    built_in = f"baseline {algorithm.baseline}, scale {algorithm.scale}"
    lines = [
        f"model     {config.model.name_or_path}, {num_parameters(model) / 1e6:.2f}M parameters, "
        f"{num_parameters(model, trained=True) / 1e6:.2f}M of them trained; "
        f"{config.runtime.precision} on {run.world.device.type}",
        f"step      {rollout.prompts_per_step} problems x {rollout.num_generations} completions, "
        f"{run.world.size} rank(s), {algorithm.updates_per_step} update(s); "
        f"{run.max_steps} steps, {run.tasks.schedule.steps_per_epoch} in an epoch",
        f"algorithm {algorithm.name}: {algorithm.advantages or built_in}; {algorithm.objective}, "
        f"{algorithm.aggregation}, beta {algorithm.beta:g}, sampler correction "
        f"{algorithm.sampler_correction}{f'; loop {algorithm.loop}' if algorithm.loop else ''}; "
        f"rewards {', '.join(run.tasks.rewards.names)}",
        f"output    {config.output_dir}, checkpoint.save_steps="
        f"{config.checkpoint.save_steps or 'none'}, saved also at the end, at Ctrl-C and SIGTERM; "
        f"{how_to_continue(config)}",
        data_line(config.data, train, evaluation, len(eval_problems)),
        config.uses_turns
        and f"tools     {', '.join(run.tasks.tools.key_of_tool) or 'none to call'}",
        *train.notes,
        *warnings_of(config, train.problems, eval_problems),
        eval_problems and correctness_note(config.eval, run.tasks.rewards.names),
    ]
    is_bf16_on_cpu = config.runtime.precision == "bf16" and run.world.device.type == "cpu"
    if is_bf16_on_cpu and emulates_bf16():
        lines.append(
            "note: this CPU has no instructions for bf16, and its matrix products take several "
            "times as long as in fp32: set runtime.precision=fp32"
        )
    if why_padded:
        lines.append(f"note      {why_padded}: scoring computes each prompt once per completion")
    if checkpoint:
        # The schedule follows from max_steps, so that another max_steps changes the rate.
        lines.append(
            f"resuming  {checkpoint} at step {run.progress.step}, learning rate "
            f"{run.learner.lr_schedule.get_last_lr()[0]:.3g}; not compared: what functions import, "
            "and what those passed as objects call"
        )
    for line in filter(None, lines):
        run.log.reporter.print(line)


def emulates_bf16() -> bool:
    """True if this is a CPU of x86 that has no products of bf16. oneDNN then emulates them."""
    # Every CPU with AMX has this part of AVX-512, too. torch.ops.mkldnn._is_mkldnn_bf16_supported()
    # is also True for the emulation.
    return torch.cpu._is_avx2_supported() and not torch.cpu._is_avx512_bf16_supported()


def data_line(
    data: DataConfig,
    train: ProblemSet,
    evaluation: ProblemSet,
    num_evaluated: int,
) -> str:
    """Return a line with the numbers of training problems, evaluation problems and excluded
    problems."""
    num_empty = train.num_without_answer
    # A long prompt is excluded and never cut, since the cut would make another problem of it.
    return (
        f"data      {data.dataset}: {len(train.problems)} problems to train on"
        f"{f', {num_empty} of them with an empty answer' if num_empty else ''}; "
        f"{num_evaluated or 'none (see data.eval_split)'} to evaluate on; "
        f"left out, as empty or longer than {data.max_prompt_length} tokens: "
        f"{train.num_too_long + train.num_empty} and "
        f"{evaluation.num_too_long + evaluation.num_empty}"
    )


def warnings_of(
    config: Config,
    train: Sequence[Problem],
    evaluation: Sequence[Problem],
) -> Iterator[str]:
    """Yield notes and warnings on settings and data that make a run wrong or useless without an
    error."""
    algorithm = config.algorithm
    rollout = config.rollout
    for key, reason in keys_without_effect(config).items():
        yield f"note: {key} has no effect {reason}"
    if "objective" in algorithm.own_args and algorithm.updates_per_step == 1:
        yield (
            "note: with one update a rollout the importance ratio is 1: a bound of it, if one is "
            "in algorithm.own_args, has no effect (algorithm.num_iterations, num_minibatches)"
        )

    num_shared = count_shared_prompts(
        train,
        evaluation,
        with_columns=bool(config.environment),
    )
    if num_shared:
        yield f"warning: {num_shared} evaluation problems are also trained on (see data.eval_split)"

    # A right completion never equals a worked solution, so its reward would always be 0.
    comparing = [f.name for f in config.reward.functions if f.name in TEXT_COMPARING_REWARDS]
    answers = [str(problem.columns.get("answer")) for problem in train]
    num_worked = sum(
        "####" in answer or "\\boxed{" in answer or " is " in answer for answer in answers
    )
    if comparing and num_worked:
        yield (
            f"warning: {num_worked} of {len(train)} answers contain ####, \\boxed or the word "
            f'"is", and {comparing[0]} compares the whole text: data.answer_pattern takes the '
            "answer out (docs/data.md)"
        )

    # vLLM's kernels give other probabilities than the trainer's, and dppo_tv corrects by itself.
    corrects = algorithm.sampler_correction != "none" or algorithm.objective == "dppo_tv"
    if rollout.engine == "vllm" and not corrects:
        yield (
            "note: rollout.engine=vllm without algorithm.sampler_correction: the gradient is not "
            "that of the policy which sampled; token_truncate corrects it"
        )

    # The sampler draws from fewer tokens than the loss takes probabilities over.
    if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
        yield (
            f"warning: rollout.top_p={rollout.top_p:g}, top_k={rollout.top_k}, "
            f"min_p={rollout.min_p:g}: tokens come from a truncated distribution and log-probs "
            "from the whole one, so the gradient estimate is biased"
        )
