"""Print the first prompts as the model will read them, without loading the model.

    python -m grpo.data --config configs/tiny_arithmetic.yaml
    python -m grpo.data --config configs/X.yaml data.system_prompt="Think, then answer." data.max_prompt_length=256

Then come the numbers of rows that are used and left out, and the lengths of the prompts.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from grpo.config import KEYS_EPILOG, Config, load_config
from grpo.data import ProblemSet, load_rows, make_problems
from grpo.model import load_tokenizer, resolve_model
from grpo.system import printable
from grpo.telemetry.terminal import end_without_reader, print_user_error

NUM_PROMPTS = 3
MAX_VALUE_LENGTH = 200
"""Characters of a column's value that are printed."""


def main(argv: list[str]) -> int:
    end_without_reader()
    usage = "python -m grpo.data [--config FILE] [section.key=value ...]"
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, epilog=KEYS_EPILOG, formatter_class=formatter)
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run; default: the defaults of all keys")
    options, overrides = parser.parse_known_args(argv)
    try:
        config = load_config(["--config", options.config, *overrides] if options.config else overrides)
        trust = config.model.trust_remote_code
        path = resolve_model(config.model.name_or_path, config.data.dataset, trust_remote_code=trust)
        for line in preview(config, load_tokenizer(path, trust_remote_code=trust)):
            print(printable(line))
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2
    return 0


def preview(config: Config, tokenizer: Any) -> Iterator[str]:
    """The lines of the preview: the first prompts of the training split, then the counts of both splits."""
    rows = load_rows(config.data, train=True, seed=config.seed)
    train = make_problems(rows, config.data, tokenizer)
    for number, problem in enumerate(train.problems[:NUM_PROMPTS], 1):
        yield f"--- prompt {number} of {len(train.problems)} (row {problem.index + 1}), {len(problem.prompt_ids)} tokens"
        yield textwrap.indent(tokenizer.decode(problem.prompt_ids), "| ", lambda line: True)
        for name, value in problem.columns.items():
            text = repr(value)
            yield f"  {name} = {text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + '...'}"
    yield "--- training"
    yield from _count_lines(train, len(rows.prompts), config)
    evaluation_rows = load_rows(config.data, train=False, seed=config.seed)
    if evaluation_rows is not None:
        yield "--- evaluation"
        evaluation = make_problems(evaluation_rows, config.data, tokenizer)
        yield from _count_lines(evaluation, len(evaluation_rows.prompts), config)


def _count_lines(problems: ProblemSet, num_rows: int, config: Config) -> Iterator[str]:
    lengths = sorted(len(problem.prompt_ids) for problem in problems.problems)
    yield (
        f"{num_rows} rows, {len(lengths)} used; prompt tokens: shortest {lengths[0]}, median {lengths[len(lengths) // 2]}, "
        f"longest {lengths[-1]}"
    )
    yield f"left out: {problems.num_too_long} longer than data.max_prompt_length={config.data.max_prompt_length} tokens"
    yield f"left out: {problems.num_empty} without a token"
    yield f"kept: {problems.num_without_answer} in which data.answer_pattern matches nothing (their answer is None)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
