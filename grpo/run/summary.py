"""The summary of a run that is printed before its first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from grpo.algorithm.batch import Problem
from grpo.config import Config, DataConfig
from grpo.data import ProblemSet, count_shared
from grpo.evaluation.grading import correctness_note
from grpo.model import num_parameters
from grpo.rewards.scores import messages_warning
from grpo.run.state import Run

LIKE_FULL_TRAINING = 3e-6
"""A learning rate that is usual for all weights: the middle, by factors, of the default 1e-6 and the tenfold that adapters take."""
COMPARING = ("accuracy", "pattern_answer", "exact_or_stripped", "r1_zero", "math_verify")
"""Built-in rewards that compare the response with the reference answer as it stands."""


def print_summary(
    run: Run, train: ProblemSet, evaluation: ProblemSet, why_padded: str | None, checkpoint: Path | None
) -> None:
    """Print model, data, sizes of a step, algorithm, and warnings in a few lines.

    Args:
        why_padded: the reason why scoring computes prompts once per completion; None if it does not.
        checkpoint: the one that the run continues from.
    """
    lines = [*_facts(run, train, evaluation), *warnings_of(run.config, train.problems, run.eval_problems)]
    if warning := messages_warning(run.config, train.problems):
        lines.append(warning)
    if run.eval_problems and (note := correctness_note(run.config.eval, run.rewards.names)):
        lines.append(note)
    if why_padded:
        lines.append(padded_note(run.config, run.world.device.type, why_padded))
    if run.sampling.records_allowed and run.may_capture:
        lines.append("note      rollout.keep_sampling_mask: rollouts decode without CUDA graphs, evaluations with them")
    if checkpoint:
        lines.append(f"resuming  {checkpoint} at step {run.progress.step}")
    for line in lines:
        run.reporter.print(line)


def padded_note(config: Config, device: str, why_padded: str) -> str:
    """The line that says which faster methods a run that is not packed cannot use."""
    lost = "each prompt is computed once per completion when scoring"
    if config.runtime.fast_decode and config.rollout.engine == "builtin":
        graphs = " and without CUDA graphs" if device == "cuda" else ""
        lost += f", and sampling uses transformers' decode step, without this package's faster one{graphs}"
    return f"note      {why_padded}: {lost}"


def _facts(run: Run, train: ProblemSet, evaluation: ProblemSet) -> Iterator[str]:
    config, a, r = run.config, run.config.algorithm, run.config.rollout
    size, precision = num_parameters(run.policy.model) / 1e6, config.runtime.precision
    yield f"model     {config.model.name_or_path}, {size:.2f}M parameters, {precision} on {run.world.device.type}"
    if run.policy.adapter is not None:
        yield lora_line(run)
    yield data_line(config.data, train, evaluation, len(run.eval_problems))
    rows = f"{r.prompts_per_step} problems x {r.num_generations} completions = {r.prompts_per_step * r.num_generations}"
    updates = (
        f"{a.updates_per_step} update(s) from them; {run.max_steps} steps, {run.problems.steps_per_epoch} to an epoch"
    )
    yield f"step      {rows}, over {run.world.size} rank(s); {updates}"
    if r.engine == "vllm":
        yield f"sampling  {run.engine}"
    yield f"algorithm {a.name}: {a.objective}, baseline {a.baseline}, scale {a.scale}, {a.aggregation}, beta {a.beta:g}"
    restart = "starts anew" if config.checkpoint.resume == "never" else "continues it from its newest checkpoint"
    yield f"output    {config.output_dir}; the same command {restart}"


def lora_line(run: Run) -> str:
    """Rank, alpha and size of the adapters, and the precision of the frozen weights."""
    adapter = run.policy.adapter.peft_config["default"]
    trained, frozen = num_parameters(run.policy.model, trained=True) / 1e6, "/".join(sorted(_frozen_dtypes(run)))
    start = f", from {run.config.model.adapter}" if run.config.model.adapter else ""
    return (
        f"lora      LoRA adapters of rank {adapter.r}, alpha {adapter.lora_alpha}, {trained:.2f}M parameters in fp32{start}; "
        f"all other weights are frozen, in {frozen}"
    )


def _frozen_dtypes(run: Run) -> set[str]:
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    return {names.get(p.dtype, str(p.dtype)) for p in run.policy.model.parameters() if not p.requires_grad}


def data_line(data: DataConfig, train: ProblemSet, evaluation: ProblemSet, num_evaluated: int) -> str:
    """The numbers of problems to train on, to evaluate on, and left out."""
    too_long = f"left out as longer than {data.max_prompt_length} tokens"
    counts = [(train.num_too_long, too_long), (train.num_empty, "left out as empty")]
    counts.append((train.num_without_answer, "without an answer"))
    left_out = "".join(f", {count} {what}" for count, what in counts if count)
    line = f"data      {data.dataset}: {len(train.problems)} problems to train on{left_out}; {num_evaluated} to evaluate on"
    count = evaluation.num_too_long + evaluation.num_empty
    return f"{line}, {count} {too_long} or empty" if count else line


def warnings_of(config: Config, train: Sequence[Problem], evaluation: Sequence[Problem]) -> Iterator[str]:
    """Notes on settings and data that could surprise the user."""
    a, r = config.algorithm, config.rollout
    yield from _lora_notes(config)
    if shared := count_shared(train, evaluation):
        what = "problem is" if shared == 1 else "problems are"
        yield f"warning: {shared} evaluation {what} also in the training data"
    compares = any(f.name in COMPARING and f.args.get("column", "answer") == "answer" for f in config.reward.functions)
    uncut = sum("####" in str(problem.columns.get("answer")) for problem in train)
    if compares and uncut:
        yield (
            f"warning: {uncut} of {len(train)} answers contain ####, as worked solutions do, and a reward compares with the whole text: "
            "data.answer_pattern='####\\s*(.+)' takes the answer from behind it"
        )
    if evaluation and not any("answer" in problem.columns for problem in evaluation):
        yield (
            "note: the evaluation data has no column answer, so eval/lenient_accuracy stays 0 and samples are shown without a reference "
            "answer: data.answer_column=NAME says which column has it"
        )
    if config.model.reference is not None and a.beta == 0:
        yield "note: model.reference has no effect with algorithm.beta 0: no reference model is loaded"
    if not evaluation:
        yield "note: no evaluation, since data.eval_split and data.eval_dataset are not set"
    if a.updates_per_step == 1:
        yield "note: with one update per rollout the loss stays near 0 while its gradient does not: watch reward, not loss"
    for key, other in a.without_effect:
        yield f"note: algorithm.{key} has no effect with algorithm.{other}={getattr(a, other)}"
    for key, other in r.without_effect:
        yield f"note: rollout.{key} has no effect with rollout.{other}"
    if r.engine == "vllm" and a.sampler_correction == "none" and a.objective != "dppo_tv":
        yield (
            "note: rollout.engine=vllm without algorithm.sampler_correction: the log-probs of vLLM and of the update differ, and the gradient is "
            "not that of the policy which sampled; token_truncate corrects it"
        )
    filters = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    active = [f"rollout.{key}={getattr(r, key):g}" for key, neutral in filters.items() if getattr(r, key) != neutral]
    if active and not r.keep_sampling_mask:
        yield (
            f"warning: {', '.join(active)}: tokens are sampled from a truncated distribution, but the log-probs are those of the whole "
            "distribution, so the gradient estimate is biased"
            + (": rollout.keep_sampling_mask=true removes the bias" if r.engine == "builtin" else "")
        )
    if r.keep_sampling_mask and not active:
        yield "note: rollout.keep_sampling_mask has no effect without rollout.top_p, top_k or min_p"
    if r.keep_sampling_mask and active and not r.top_k:
        yield (
            "note: rollout.keep_sampling_mask keeps 4 bytes for each token that could have been sampled, which can be the whole vocabulary: "
            "rollout.top_k sets a limit"
        )


def _lora_notes(config: Config) -> Iterator[str]:
    rate = config.optim.learning_rate
    if config.uses_lora and rate <= LIKE_FULL_TRAINING:
        yield (
            f"note: optim.learning_rate={rate:g} is usual for training all weights; LoRA adapters take about ten times that of full training"
        )
    if not config.uses_lora and (given := sorted(config.lora.model_fields_set - {"rank"})):
        defaults = type(config.lora)()
        for key in given:
            if getattr(config.lora, key) != getattr(defaults, key):
                yield f"note: lora.{key} has no effect with lora.rank=0: all weights are trained"
