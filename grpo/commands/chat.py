r"""Talk to a model, or print samples of one prompt with their rewards.

    python -m grpo.chat --model runs/tiny_arithmetic/checkpoint-150
    python -m grpo.chat --model runs/tiny_arithmetic/checkpoint-150 \
        --prompt "17+25=" --samples 8 --column answer=42
    python -m grpo.chat --model Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 17+25?"

Prompts are rendered, sampled and scored as in the run that wrote the checkpoint, or as the FILE of
--config says. A model that no run wrote gets the prompt alone. Rewards that need a column get it
from --column. If the dataset's prompts are lists of messages and a reward reads messages, add
data.conversational=true.
"""

import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

from grpo.algorithm.batch import Group
from grpo.checkpoint.saver import Progress
from grpo.commands.command import command, command_parser
from grpo.commands.models import BUILTIN_ENGINE, find_tokenizer, load_engine
from grpo.config import config_of_models
from grpo.data import Rows, make_problems
from grpo.data.tasks import task_of
from grpo.distributed import start_world
from grpo.rewards import RewardRunner
from grpo.rewards.scores import answer_to, score_groups
from grpo.run.prepare import open_rewards
from grpo.run.records import Sampler
from grpo.system import printable
from grpo.turns.tools import Tools


@command
def main(argv: list[str]) -> None:
    parser = command_parser("chat", __doc__)
    add = parser.add_argument
    add("--model", required=True, help="checkpoint, any Hugging Face folder or id, or builtin:tiny")
    add("--prompt", metavar="TEXT", help="sample this prompt instead of starting a conversation")
    add("--samples", type=int, metavar="N", default=8, help="completions of --prompt (default 8)")
    add(
        "--column",
        type=name_and_value,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a column for rewards, and for the environment's reset; answer=null: no answer",
    )
    options, overrides = parser.parse_known_args(argv)
    config, _ = config_of_models(
        [options.model],
        options.config,
        [*BUILTIN_ENGINE, *overrides],
        # Otherwise a model without a run would get the instructions of the default task.
        default_values={"data": {"system_prompt": ""}},
    )

    world = start_world(config.runtime)
    with contextlib.ExitStack() as at_end:
        tools, rewards = open_rewards(config, at_end)
        columns = dict(options.column)
        # A line of a conversation has no columns, such as the right answer, so it is not scored.
        if options.prompt is not None:
            try:
                # Missing columns are reported before the model is loaded, which may take minutes.
                rewards.check(columns, "the options --column (answer=null: none)")
            except ValueError as error:
                if columns or config.environment:
                    raise
                print(f"note: not scored: {error}")
                rewards = None
        path, tokenizer = find_tokenizer(config, options.model)
        engine = load_engine(config, world, path, tokenizer, tools)
        at_end.callback(engine.close)
        sampler = Sampler(config, world, Progress(), engine)
        # The weights do not change here, so they are prepared for sampling only once.
        at_end.enter_context(sampler.current_weights())
        sample = functools.partial(_sample, sampler, tools)
        if options.prompt is None:
            talk(sample, columns)
        else:
            group = sample(options.prompt, columns, options.samples)
            show_samples(group, rewards)


def name_and_value(item: str) -> tuple[str, Any]:
    """Split NAME=VALUE into the name and the value of a column.

    A value that is valid JSON is parsed, any other value is text. The value of ``answer`` is text,
    or None for ``null``: a row without an answer. An empty value is None.
    """
    name, value = item.split("=", 1)
    # Rewards compare answers as text, so 007 and 7.0 must not become numbers.
    if name != "answer" or value == "null":
        with contextlib.suppress(ValueError):  # plain text
            return name, json.loads(value)
    return name, value or None


def _sample(
    sampler: Sampler,
    tools: Tools,
    prompt: str | list[dict[str, str]],
    columns: dict[str, Any],
    num_samples: int,
    turn: int = 0,
) -> Group:
    """Sample completions of one prompt.

    Raises:
        ValueError: if prompt and completion together exceed the model's context.
    """
    config = sampler.config
    policy = sampler.engine.policy
    # A conversation may grow beyond the run's max_prompt_length, up to the model's context. Some
    # models name no context length.
    context_length = policy.context_length or sys.maxsize
    max_prompt_length = context_length - config.rollout.max_completion_length
    data = config.data.model_copy(update={"max_prompt_length": max_prompt_length})
    task = task_of(config.data, config.data.dataset)
    # The instructions of a built-in task are part of its prompts, as in a run.
    instructions = None if task is None else task.instructions
    rows = Rows("the chat", [prompt], [columns], instructions)
    problem_set = make_problems(rows, data, policy.tokenizer, schemas=tools.schemas)
    sampling = dataclasses.replace(sampler.sampling, num_generations=num_samples)
    # The number of the turn is part of the seed, so that the same question gets another answer
    # later.
    seed_key = (config.seed, "chat", turn)
    (group,) = sampler.engine.generate(problem_set.problems, sampling, seed_key=seed_key)
    return group


def talk(sample: Callable[..., Group], columns: dict[str, Any]) -> None:
    """Hold a conversation: each line of standard input is a message of the user.

    An empty line starts a new conversation. An environment's ``reset`` gets the columns.
    """
    messages = []
    for turn, line in enumerate(sys.stdin):
        if not line.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        (completion,) = sample(messages, columns, 1, turn).completions
        messages += answer_to(messages, completion)
        print(printable(completion.transcript))


def show_samples(group: Group, rewards: RewardRunner | None) -> None:
    """Print the completions of one prompt, each with its values of all rewards."""
    # All completions are scored at once, because a reward may compare the completions of a group.
    values = score_groups(rewards, [group]).values if rewards else []
    for number, completion in enumerate(group.completions):
        facts = [completion.facts]
        if rewards:
            for name, value in zip(rewards.names, values[number], strict=True):
                score = "unscorable" if value is None else f"{value:g}"
                facts.append(f"{name} {score}")
        print(f"--- {number + 1}/{len(group.completions)}  {', '.join(facts)}")
        print(printable(completion.transcript))
