r"""Print the first prompts as the model will read them, without loading the model.

    python -m grpo.data --config configs/tiny_arithmetic.yaml
    python -m grpo.data --config configs/X.yaml \
        data.system_prompt="Think, then answer." data.max_prompt_length=256

The command then prints how many rows are used and how many are left out.
"""

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any

from grpo.commands.command import command, command_parser
from grpo.commands.models import find_tokenizer
from grpo.config import config_of_models
from grpo.data import ProblemSet, Rows, count_shared_prompts, load_rows, make_problems
from grpo.system import printable
from grpo.turns.tools import Tools

NUM_PROMPTS = 3
"""Number of prompts that are printed for each split."""


@command
def main(argv: list[str]) -> None:
    options, overrides = command_parser("data", __doc__).parse_known_args(argv)
    config, _ = config_of_models([], options.config, overrides)
    _, tokenizer = find_tokenizer(config, config.model.name_or_path)
    has_environment = bool(config.environment)
    training_problems = None
    with contextlib.closing(Tools(config).load()) as tools:
        for is_training in (True, False):
            rows = load_rows(
                config.data,
                train=is_training,
                seed=config.seed,
                has_environment=has_environment,
            )
            if rows is None:  # a configuration may have no evaluation
                return
            # The chat template writes the tools into the prompt, so the counts of tokens include
            # the tools.
            problem_set = make_problems(rows, config.data, tokenizer, schemas=tools.schemas)
            split = "training" if is_training else "evaluation"
            # No environment is reset here, so text that its reset would add to a prompt is not
            # shown.
            print(f"=== {split}: {rows.source}{', before reset()' if has_environment else ''}")
            for line in preview(rows, problem_set, tokenizer):
                print(printable(line))
            # Evaluation prompts that are also training prompts make the accuracy too high.
            if training_problems is not None:
                num_shared = count_shared_prompts(
                    training_problems,
                    problem_set.problems,
                    with_columns=has_environment,
                )
                print(f"also training prompts: {num_shared}")
            training_problems = problem_set.problems


def preview(rows: Rows, problem_set: ProblemSet, tokenizer: Any) -> Iterator[str]:
    """Yield the lines about a split: its first prompts with their columns, then the numbers of rows
    used and left out."""
    problems = problem_set.problems
    for problem in problems[:NUM_PROMPTS]:
        yield f"--- prompt of {rows.place_of(problem.index)}, {len(problem.prompt_ids)} tokens"
        # Decoded from the tokens, to show the special tokens that tokenizer and template add.
        text = tokenizer.decode(problem.prompt_ids)
        yield textwrap.indent(text, "| ", lambda line: True)
        for name, value in problem.columns.items():
            yield f"  {name} = {value!r:.200}"

    yield "---"
    yield from problem_set.notes
    yield f"{len(rows.prompts)} rows, {len(problems)} used"
    yield (
        f"left out: {problem_set.num_too_long} longer than data.max_prompt_length, "
        f"{problem_set.num_empty} without text"
    )
    yield (
        "without an answer (empty, or data.answer_pattern finds none): "
        f"{problem_set.num_without_answer or '0, or not counted without data.answer_column'}"
    )
    distinct_prompts = {problem.prompt_ids for problem in problems}
    yield f"the same prompt as another: {len(problems) - len(distinct_prompts)}"
