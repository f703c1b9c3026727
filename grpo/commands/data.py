"""Print the first prompts as the model will read them, without loading the model.

    python -m grpo.data --config configs/tiny_arithmetic.yaml python -m grpo.data --config
    configs/X.yaml data.system_prompt="Think, then answer." data.max_prompt_length=256

Then come the numbers of rows that are used and left out.
"""

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any

from grpo.commands.command import command, command_parser
from grpo.commands.models import find_tokenizer
from grpo.config import config_of_models
from grpo.data import ProblemSet, Rows, count_shared, load_rows, make_problems
from grpo.system import ignore_broken_pipes, printable
from grpo.turns.tools import Tools

NUM_PROMPTS = 3


@command
def main(argv: list[str]) -> None:
    ignore_broken_pipes()
    options, overrides = command_parser("data", __doc__).parse_known_args(argv)
    config, _ = config_of_models([], options.config, overrides)
    _, tokenizer = find_tokenizer(config, config.model.name_or_path)
    training = None
    with contextlib.closing(Tools(config).load()) as tools:
        for is_training in (True, False):
            rows = load_rows(
                config.data,
                train=is_training,
                seed=config.seed,
                has_environment=bool(config.environment),
            )
            if rows is None:  # without an evaluation
                return
            schemas_of = tools.schemas_of if config.uses_turns else None
            found = make_problems(rows, config.data, tokenizer, schemas_of=schemas_of)
            split = "training" if is_training else "evaluation"
            print(f"=== {split}: {rows.source}{', before reset()' if config.environment else ''}")
            for line in preview(rows, found, tokenizer):
                print(printable(line))
            if training is not None:
                print(f"also training prompts: {count_shared(training, found.problems)}")
            training = found.problems


def preview(rows: Rows, found: ProblemSet, tokenizer: Any) -> Iterator[str]:
    """The first prompts of a split as in the first step (before an environment's ``reset``), and
    its counts."""
    problems = found.problems
    for problem in problems[:NUM_PROMPTS]:
        yield f"--- prompt of {rows.place_of(problem.index)}, {len(problem.prompt_ids)} tokens"
        yield textwrap.indent(tokenizer.decode(problem.prompt_ids), "| ", lambda line: True)
        for name, value in problem.columns.items():
            yield f"  {name} = {value!r:.200}"
    yield "---"
    yield from found.notes
    yield f"{len(rows.prompts)} rows, {len(problems)} used"
    yield f"left out: {found.num_too_long} longer than data.max_prompt_length, {found.num_empty} without text"
    yield f"without an answer (empty, or data.answer_pattern finds none): {found.num_without_answer}"
    yield f"the same prompt as another: {len(problems) - len({problem.prompt_ids for problem in problems})}"
