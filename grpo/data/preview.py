"""What the model will see, before any model is loaded: ``python -m grpo.data --config X [section.key=value ...]``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from grpo.batch import Problem
from grpo.config import Config, load_config
from grpo.data import ProblemSet, load_rows, make_problems
from grpo.model import load_tokenizer, resolve_model
from grpo.telemetry.user_errors import print_user_error

SHOWN = 3
WIDEST_VALUE = 200
"""Characters of a column's value that are shown."""


def main(argv: list[str]) -> int:
    """Print three prompts exactly as the model sees them, their token counts, and what was left out and why."""
    try:
        config = load_config(argv)
        path = resolve_model(
            config.model.name_or_path, config.data.dataset, trust_remote_code=config.model.trust_remote_code
        )
        tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        for line in preview(config, tokenizer):
            print(line)
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2
    return 0


def preview(config: Config, tokenizer: Any) -> Iterator[str]:
    """The lines of the preview: the first prompts of the training split, then both splits in numbers."""
    rows = load_rows(config.data, train=True, seed=config.seed)
    train = make_problems(rows, config.data, tokenizer)
    for number, problem in enumerate(train.problems[:SHOWN], 1):
        yield f"--- prompt {number} of {len(train.problems)} (row {problem.index + 1}), {len(problem.prompt_ids)} tokens"
        yield textwrap.indent(tokenizer.decode(problem.prompt_ids), "| ", lambda line: True)
        yield from _columns(problem)
    yield "--- training"
    yield from _counts(train, len(rows.prompts), config)
    evaluation_rows = load_rows(config.data, train=False, seed=config.seed)
    if evaluation_rows is not None:
        yield "--- evaluation"
        yield from _counts(make_problems(evaluation_rows, config.data, tokenizer), len(evaluation_rows.prompts), config)


def _columns(problem: Problem) -> Iterator[str]:
    for name, value in problem.columns.items():
        text = repr(value)
        yield f"  {name} = {text if len(text) <= WIDEST_VALUE else text[: WIDEST_VALUE - 3] + '...'}"


def _counts(problems: ProblemSet, num_rows: int, config: Config) -> Iterator[str]:
    lengths = sorted(len(problem.prompt_ids) for problem in problems.problems)
    yield (
        f"{num_rows} rows, {len(lengths)} used; prompt tokens: shortest {lengths[0]}, median {lengths[len(lengths) // 2]}, "
        f"longest {lengths[-1]}"
    )
    yield f"left out: {problems.num_too_long} longer than data.max_prompt_length={config.data.max_prompt_length} tokens"
    yield f"left out: {problems.num_empty} without a token"
    yield f"kept: {problems.num_without_answer} in which data.answer_pattern matches nothing (their answer is None)"
