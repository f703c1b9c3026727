"""Print the first prompts as the model will read them, without loading the model.

    python -m grpo.data --config configs/tiny_arithmetic.yaml
    python -m grpo.data --config configs/X.yaml data.system_prompt="Think, then answer." data.max_prompt_length=256

Then come the numbers of rows that are used and left out, and the lengths of the prompts.
"""

import contextlib
import textwrap
from collections.abc import Iterator
from typing import Any

from grpo.algorithm.batch import Problem
from grpo.commands.command import command, command_parser
from grpo.config import Config, load_config
from grpo.data import count_shared, load_rows, make_problems
from grpo.model import load_tokenizer, resolve_model
from grpo.rollout import SamplingParams
from grpo.system import printable
from grpo.telemetry.terminal import survive_lost_readers
from grpo.turns.engine import Conversation, add_to_prompt
from grpo.turns.tools import Tools

NUM_PROMPTS = 3
MAX_VALUE_LENGTH = 200
"""Characters of a column's value that are printed."""


@command
def main(argv: list[str]) -> None:
    survive_lost_readers()
    parser = command_parser("data", __doc__)
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run; default: the defaults of all keys")
    options, overrides = parser.parse_known_args(argv)
    config = load_config(["--config", options.config, *overrides] if options.config else overrides)
    trust = config.model.trust_remote_code
    path = resolve_model(config.model.name_or_path, config.data.dataset, trust_remote_code=trust)
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=trust,
        chat_template=config.model.chat_template,
    )
    with contextlib.closing(Tools(config)) as tools:
        if config.uses_turns:
            tools.load()
        for line in preview(config, tokenizer, tools):
            print(printable(line))


def preview(config: Config, tokenizer: Any, tools: Tools) -> Iterator[str]:
    """The lines of the preview: the first prompts of the training split, and the counts of both splits."""
    schemas_of = tools.schemas_of if config.uses_turns else None
    train = []
    for split in ("training", "evaluation"):
        rows = load_rows(
            config.data,
            train=split == "training",
            seed=config.seed,
            has_environment=bool(config.environment),
        )
        if rows is None:  # without an evaluation
            return
        found = make_problems(rows, config.data, tokenizer, schemas_of=schemas_of)
        problems = found.problems
        if split == "training":
            for number, problem in enumerate(problems[:NUM_PROMPTS], 1):
                place = rows.places[problem.index]
                yield from show(problem, f"{number} of {len(problems)} ({place})", tokenizer, tools)
        yield f"--- {split}"
        if tools.owns_prompts:
            yield f"{len(problems)} seeds, from which reset() makes the prompts"
            continue

        yield from found.notes
        lengths = sorted(len(problem.prompt_ids) for problem in problems)
        middle = f"shortest {lengths[0]}, median {lengths[len(lengths) // 2]}, longest {lengths[-1]}"
        when = " before reset()" if tools.environments else ""
        yield f"{len(rows.prompts)} rows, {len(lengths)} used; prompt tokens{when}: {middle}"
        limit = config.data.max_prompt_length
        yield f"left out: {found.num_too_long} longer than data.max_prompt_length={limit} tokens"
        yield f"left out: {found.num_empty} without text"
        if config.data.answer_column is not None:
            without = f"{found.num_without_answer} without an answer"
            yield f"kept: {without}: empty, or data.answer_pattern finds none"
        num_different = len({problem.prompt_ids for problem in problems})
        yield f"duplicates: {len(problems) - num_different} prompts that came before"
        if split == "evaluation":
            yield f"in both splits: {count_shared(train, problems)} prompts"
        train = problems


def show(problem: Problem, position: str, tokenizer: Any, tools: Tools) -> Iterator[str]:
    """The prompt as in the first step, with what the environment adds to it, and the columns."""
    # The conversation only begins, so it needs nothing that reads or samples turns.
    conversation = Conversation(
        tools,
        form=None,
        stops=None,
        sampling=SamplingParams(num_generations=1, max_completion_length=1),
        problem=problem,
        row=0,
        seed_key=(tools.config.seed, "rollout", 0),
    )
    said = tools.submit(0, conversation.begin).result()
    add_to_prompt([conversation], [said], tokenizer)
    ids = conversation.problem.prompt_ids
    yield f"--- prompt {position}, {len(ids)} tokens"
    if conversation.failure:
        yield f"  failed: {conversation.failure}"
    yield textwrap.indent(tokenizer.decode(ids), "| ", lambda line: True)
    for name, value in problem.columns.items():
        text = repr(value)
        end = "..." if len(text) > MAX_VALUE_LENGTH else ""
        yield f"  {name} = {text[:MAX_VALUE_LENGTH]}{end}"
