"""The summary of a run that is printed before its first step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from grpo.algorithm.batch import Problem
from grpo.config import Config, DataConfig, keys_without_effect
from grpo.data import ProblemSet, count_shared
from grpo.evaluation.grading import correctness_note
from grpo.model import Policy, num_parameters
from grpo.rewards.answers import parse_number, reference_texts
from grpo.rewards.builtin import COMPARING
from grpo.rewards.scores import messages_warning
from grpo.run.records import Run

LIKE_FULL_TRAINING = 3e-6
"""A learning rate at most this is usual for training all weights; adapters take about ten times that."""
INSIDE_OF_BOX = r"\\boxed\{((?:[^{}]|\{(?1)\})*)\}"
"""A pattern for ``data.answer_pattern``: the content of the first box, also with braces in it."""
FORMAT_AFTER_THINK = r".*?</think>\s*<answer>.*?</answer>\s*"
"""A pattern for the reward ``format`` where the prompt opens the thinking."""
MOST_NAMED = 4
"""Modules in the line about frozen parameters."""


def print_summary(
    run: Run, train: ProblemSet, evaluation: ProblemSet, why_padded: str | None, checkpoint: Path | None
) -> None:
    """Print model, data, sizes of a step, algorithm, and warnings in a few lines.

    Args:
        why_padded: the reason why scoring computes prompts once per completion; None if it does not.
        checkpoint: the one that the run continues from.
    """
    lines = [*_facts(run, train, evaluation), *train.notes]
    formats = [function for function in run.config.reward.functions if function.name == "format"]
    if train.opens_thinking and any("pattern" not in function.args for function in formats):
        lines.append(
            "warning: the prompts end with <think>, and the reward format wants it in the completion, so that none "
            f"matches: give it args: {{pattern: '{FORMAT_AFTER_THINK}'}}"
        )
    lines += warnings_of(run.config, train.problems, run.tasks.eval_problems)
    if warning := messages_warning(run.config, train.problems):
        lines.append(warning)
    if run.tasks.eval_problems and (note := correctness_note(run.config.eval, run.tasks.rewards.names)):
        lines.append(note)
    if why_padded:
        lines.append(
            f"note      {why_padded}: each prompt is computed once per completion when scoring, and sampling uses "
            "transformers' decode step"
        )
    if checkpoint:
        lines.append(f"resuming  {checkpoint} at step {run.progress.step}")
    for line in lines:
        run.log.reporter.print(line)


def _facts(run: Run, train: ProblemSet, evaluation: ProblemSet) -> Iterator[str]:
    config, a, r = run.config, run.config.algorithm, run.config.rollout
    size, precision = num_parameters(run.learner.policy.model) / 1e6, config.runtime.precision
    yield f"model     {config.model.name_or_path}, {size:.2f}M parameters, {precision} on {run.world.device.type}"
    if run.learner.policy.adapter is not None:
        yield lora_line(run)
    if run.learner.policy.unreached:
        yield frozen_line(run.learner.policy)
    yield data_line(config.data, train, evaluation, len(run.tasks.eval_problems))
    rows = f"{r.prompts_per_step} problems x {r.num_generations} completions = {r.prompts_per_step * r.num_generations}"
    steps = f"{run.max_steps} steps, {run.tasks.problems.steps_per_epoch} to an epoch"
    yield f"step      {rows}, {run.world.size} rank(s), {a.updates_per_step} update(s); {steps}"
    if r.engine == "vllm":
        yield f"sampling  {run.sampler.engine}"
    if run.tasks.tools is not None:
        yield f"turns     {run.tasks.tools.summary}"
    advantages = f"advantages {a.advantages}" if a.advantages else f"baseline {a.baseline}, scale {a.scale}"
    correction = f", {a.sampler_correction}" if a.sampler_correction != "none" else ""
    yield f"algorithm {a.name}: {a.objective}, {advantages}, {a.aggregation}, beta {a.beta:g}{correction}"
    restart = "starts anew" if config.checkpoint.resume == "never" else "continues it from its newest checkpoint"
    yield f"output    {config.output_dir}; the same command or call {restart}"
    if config.checkpoint.save_steps is None:
        yield "          checkpoints: at the end, Ctrl-C and SIGTERM; with checkpoint.save_steps=N on the way, too"


def lora_line(run: Run) -> str:
    """Rank, alpha and size of the adapters, and the precision of the frozen weights."""
    adapter, model = run.learner.policy.adapter.peft_config["default"], run.learner.policy.model
    dtypes = {"bf16" if p.dtype == torch.bfloat16 else "fp32" for p in model.parameters() if not p.requires_grad}
    start = f", from {run.config.model.adapter}" if run.config.model.adapter else ""
    size = num_parameters(model, trained=True) / 1e6
    return (
        f"lora      LoRA adapters of rank {adapter.r}, alpha {adapter.lora_alpha}, {size:.2f}M parameters in fp32"
        f"{start}; all other weights are frozen, in {'/'.join(sorted(dtypes))}"
    )


def frozen_line(policy: Policy) -> str:
    """The number of parameters that :func:`freeze_unreached` has frozen, and the modules that they are in."""
    size = sum(parameter.numel() for parameter in policy.unreached.values()) / 1e6
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    modules: list[str] = []
    for module in policy.unreached:
        # Outwards, as long as nothing beside it is trained.
        around, dot, _ = module.rpartition(".")
        while dot and not any(name.startswith(around + dot) for name in trained):
            module = around
            around, dot, _ = module.rpartition(".")
        if module not in modules:
            modules.append(module)
    named = modules[:MOST_NAMED]
    more = f" and {len(modules) - len(named)} more" if modules != named else ""
    return f"frozen    {size:.2f}M parameters that text does not reach: {', '.join(named)}{more}"


def data_line(data: DataConfig, train: ProblemSet, evaluation: ProblemSet, num_evaluated: int) -> str:
    """The numbers of problems to train on, to evaluate on, and left out."""
    too_long = f"left out as longer than {data.max_prompt_length} tokens"
    counts = [(train.num_too_long, too_long), (train.num_empty, "left out as empty")]
    counts.append((train.num_without_answer, "without an answer"))
    counts.append((train.num_repaired, "with half of a character, which is read as \ufffd"))
    left_out = "".join(f", {count} {what}" for count, what in counts if count)
    line = f"data      {data.dataset}: {len(train.problems)} problems to train on{left_out}"
    line += f"; {num_evaluated} to evaluate on"
    count = evaluation.num_too_long + evaluation.num_empty
    return f"{line}, {count} {too_long} or empty" if count else line


def _notes_on_answers(config: Config, train: Sequence[Problem]) -> Iterator[str]:
    """Notes on reference answers to which no good answer may be equal."""
    comparing = set()
    for function in config.reward.functions:
        if function.name in COMPARING and function.args.get("column", "answer") == "answer":
            comparing.add(function.name)
    if not comparing:
        return

    num_uncut = 0
    num_boxed = 0
    num_with_signs = 0
    for problem in train:
        for text in reference_texts(problem.columns.get("answer")):
            num_uncut += "####" in text
            num_boxed += "\\boxed{" in text
            is_number = parse_number(text) is not None
            num_with_signs += is_number and ("," in text or "$" in text)
    if num_uncut:
        yield (
            f"warning: {num_uncut} of {len(train)} answers contain ####, as worked solutions do, and a reward compares "
            "with the whole text: data.answer_pattern='####\\s*(.+)' takes the answer from behind it"
        )
    if num_boxed and comparing - {"math_verify", "r1_zero"}:  # which read the box
        yield (
            f"warning: {num_boxed} of {len(train)} answers contain \\boxed, as worked solutions do, and a reward "
            f"compares with the whole text: data.answer_pattern='{INSIDE_OF_BOX}' takes the answer out of the box"
        )
    if num_with_signs and "exact_or_stripped" in comparing:
        yield (
            f"note: {num_with_signs} of {len(train)} answers are numbers with , or $, and exact_or_stripped compares "
            "characters: there 1000 is not 1,000; accuracy compares numbers"
        )


def warnings_of(config: Config, train: Sequence[Problem], evaluation: Sequence[Problem]) -> Iterator[str]:
    """Notes on settings and data that could surprise the user."""
    a, r = config.algorithm, config.rollout
    if config.uses_lora and config.optim.learning_rate <= LIKE_FULL_TRAINING:
        yield (
            f"note: optim.learning_rate={config.optim.learning_rate:g} is usual for training all weights; LoRA "
            "adapters take about ten times that"
        )
    named = set(re.findall(r"\{([A-Za-z_]\w*)(?:\.\w+)*\}", config.data.question_template or ""))
    if unknown := sorted(named - {"prompt"}.union(*(problem.columns for problem in train[:1]))):
        yield f"warning: data.question_template: {', '.join(unknown)} in braces is no column, and stays as it is"
    if not config.environment and (shared := count_shared(train, evaluation)):  # which may hide what differs
        yield f"warning: {shared} of the evaluation problems are also in the training data"
    yield from _notes_on_answers(config, train)
    if not evaluation:
        cause = "and data.eval_dataset are not set" if config.data.eval_split else "is none"
        yield f"note: no evaluation, since data.eval_split {cause}"
    elif not any("answer" in problem.columns for problem in evaluation):
        yield (
            "note: the evaluation data has no column answer, so there is no eval/lenient_accuracy: "
            "data.answer_column=NAME says which column has it"
        )
    for key, reason in keys_without_effect(config).items():
        yield f"note: {key} has no effect {reason}"
    if r.engine == "vllm" and a.sampler_correction == "none" and a.objective != "dppo_tv":
        yield (
            "note: rollout.engine=vllm without algorithm.sampler_correction: the log-probs of vLLM and of the update "
            "differ, and the gradient is not that of the policy which sampled; token_truncate corrects it"
        )
    filters = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    active = [f"rollout.{key}={getattr(r, key):g}" for key, neutral in filters.items() if getattr(r, key) != neutral]
    # The log-probs that a rollout function returns come without the tokens that were left.
    is_biased = r.function or not r.keep_sampling_mask
    if active and is_biased:
        has_remedy = r.engine == "builtin" and not r.function
        remedy = ": rollout.keep_sampling_mask=true removes the bias" if has_remedy else ""
        yield (
            f"warning: {', '.join(active)}: tokens are sampled from a truncated distribution, but the log-probs are "
            f"those of the whole distribution, so the gradient estimate is biased{remedy}"
        )
