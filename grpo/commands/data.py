"""Print the first prompts as the model will read them, without loading the model.

    python -m grpo.data --config configs/tiny_arithmetic.yaml
    python -m grpo.data --config configs/X.yaml data.system_prompt="Think, then answer." data.max_prompt_length=256

Then come the numbers of rows that are used and left out, and the lengths of the prompts.
"""

import contextlib
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from grpo.commands.command import command, command_parser
from grpo.config import Config, load_config
from grpo.data import count_shared, load_rows, make_problems
from grpo.model import load_tokenizer, resolve_model
from grpo.system import printable
from grpo.telemetry.terminal import end_without_reader
from grpo.turns.tools import Tools

NUM_PROMPTS = 3
MAX_VALUE_LENGTH = 200
"""Characters of a column's value that are printed."""


@command
def main(argv: list[str]) -> None:
    end_without_reader()
    parser = command_parser("data", __doc__)
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run; default: the defaults of all keys")
    options, overrides = parser.parse_known_args(argv)
    config = load_config(["--config", options.config, *overrides] if options.config else overrides)
    trust = config.model.trust_remote_code
    path = resolve_model(config.model.name_or_path, config.data.dataset, trust_remote_code=trust)
    tokenizer = load_tokenizer(path, trust_remote_code=trust, chat_template=config.model.chat_template)
    with contextlib.closing(Tools(config)) as tools:
        schemas_of = tools.load().schemas_of if config.uses_turns else None
        for line in preview(config, tokenizer, schemas_of):
            print(printable(line))


def preview(config: Config, tokenizer: Any, schemas_of: Callable[[dict[str, Any]], list] | None) -> Iterator[str]:
    """The lines of the preview: the first prompts of the training split, and the counts of both splits."""
    train = []
    for split in ("training", "evaluation"):
        rows = load_rows(config.data, train=split == "training", seed=config.seed)
        if rows is None:
            return
        found = make_problems(rows, config.data, tokenizer, schemas_of=schemas_of)
        for number, problem in enumerate(found.problems[:NUM_PROMPTS] if split == "training" else (), 1):
            position = f"prompt {number} of {len(found.problems)} ({rows.places[problem.index]})"
            yield f"--- {position}, {len(problem.prompt_ids)} tokens"
            yield textwrap.indent(tokenizer.decode(problem.prompt_ids), "| ", lambda line: True)
            for name, value in problem.columns.items():
                text = repr(value)
                yield f"  {name} = {text[:MAX_VALUE_LENGTH]}{'...' * (len(text) > MAX_VALUE_LENGTH)}"
        lengths = sorted(len(problem.prompt_ids) for problem in found.problems)
        yield f"--- {split}"
        yield from found.notes
        middle = f"shortest {lengths[0]}, median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
        yield f"{len(rows.prompts)} rows, {len(lengths)} used; prompt tokens: {middle}"
        limit = config.data.max_prompt_length
        yield f"left out: {found.num_too_long} longer than data.max_prompt_length={limit} tokens"
        yield f"left out: {found.num_empty} without text"
        if found.num_repaired:
            yield f"kept: {found.num_repaired} with half of a character, which is read as \ufffd"
        if config.data.answer_column is not None:
            yield f"kept: {found.num_without_answer} without an answer: empty, or data.answer_pattern finds none"
        yield f"duplicates: {len(lengths) - len({p.prompt_ids for p in found.problems})} prompts that came before"
        yield f"empty cells: {', '.join(f'{count} in {name}' for name, count in rows.empty_cells.items()) or 'none'}"
        if split == "evaluation":
            yield f"in both splits: {count_shared(train, found.problems)} prompts"
        train = found.problems
