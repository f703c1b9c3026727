"""Talk to a model, or print samples of one prompt with their rewards.

    python -m grpo.chat --model runs/tiny_arithmetic/checkpoint-150 python -m grpo.chat --model
    runs/tiny_arithmetic/checkpoint-150 --prompt "17+25=" --samples 8 --column answer=42 python -m
    grpo.chat --model Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 17+25?"

Prompts are rendered, sampled and scored as in the run that wrote the checkpoint, or with --config.
A model without a run gets the prompt alone, and no rewards are computed without --column. Where the
dataset's prompts are lists of messages and a reward reads messages, add data.conversational=true.
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
from grpo.commands.models import (
    BUILTIN_ENGINE,
    find_tokenizer,
    load_engine,
    open_rewards,
)
from grpo.config import config_of_models
from grpo.data import Rows, make_problems
from grpo.data.tasks import task_of
from grpo.distributed import start_world
from grpo.rewards import RewardRunner
from grpo.rewards.scores import score_groups
from grpo.run.records import Sampler
from grpo.system import ignore_broken_pipes, printable
from grpo.turns.tools import Tools


@command
def main(argv: list[str]) -> None:
    ignore_broken_pipes()
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
        help="a column for the rewards",
    )
    options, overrides = parser.parse_known_args(argv)
    config, saved = config_of_models(
        [options.model],
        options.config,
        [*BUILTIN_ENGINE, *overrides],
        # Else the model would get the instructions of the default task.
        without_run={"data": {"system_prompt": ""}},
    )
    is_scored = options.prompt is not None and (saved or options.config or options.column)
    world = start_world(config.runtime)
    with contextlib.ExitStack() as at_end:
        tools, rewards = open_rewards(config, at_end)
        columns = dict(options.column)
        if is_scored:
            rewards.check(columns)
        else:
            rewards = None
        path, tokenizer = find_tokenizer(config, options.model)
        engine = load_engine(config, world, path, tokenizer, tools)
        at_end.callback(engine.close)
        sampler = Sampler(config, world, Progress(), engine)
        at_end.enter_context(sampler.current_weights())
        sample = functools.partial(_sample, sampler, tools)
        if options.prompt is None:
            talk(sample)
        else:
            show_samples(sample(options.prompt, columns, options.samples), rewards)


def name_and_value(item: str) -> tuple[str, Any]:
    """The name and the value of a column, as JSON or else as text; an answer is text."""
    name, value = item.split("=", 1)
    if name != "answer":
        with contextlib.suppress(ValueError):  # plain text
            return name, json.loads(value)
    return name, value


def _sample(
    sampler: Sampler,
    tools: Tools | None,
    prompt: str | list[dict[str, str]],
    columns: dict[str, Any],
    num_samples: int,
    turn: int = 0,
) -> Group:
    """Sample completions of one prompt. ``ValueError`` if prompt and completion together exceed the
    model's context."""
    config = sampler.config
    policy = sampler.engine.policy
    longest = (policy.context_length or 10**9) - config.rollout.max_completion_length
    data = config.data.model_copy(update={"max_prompt_length": longest})
    task = task_of(config.data, config.data.dataset)
    rows = Rows("the chat", [prompt], [columns], task and task.instructions)
    found = make_problems(
        rows,
        data,
        policy.tokenizer,
        schemas_of=tools and tools.schemas_of,
    )
    sampling = dataclasses.replace(sampler.sampling, num_generations=num_samples)
    seed_key = (config.seed, "chat", turn)
    (group,) = sampler.engine.generate(found.problems, sampling, seed_key=seed_key)
    return group


def talk(sample: Callable[..., Group]) -> None:
    """Hold a conversation, one line of standard input a turn; an empty line starts a new one."""
    messages: list[dict[str, str]] = []
    for turn, line in enumerate(sys.stdin):
        if not line.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        (completion,) = sample(messages, {}, 1, turn).completions
        messages += getattr(completion, "messages", None) or [
            {"role": "assistant", "content": completion.text}
        ]
        print(printable(completion.transcript), flush=True)


def show_samples(group: Group, rewards: RewardRunner | None) -> None:
    """Print completions of one prompt, each with all its rewards, as in a training step."""
    values = score_groups(rewards, [group]).values if rewards else []
    for number, completion in enumerate(group.completions):
        facts = [completion.size, "finished" if completion.finished else "truncated"]
        if rewards:
            for name, value in zip(rewards.names, values[number], strict=True):
                facts.append(f"{name} unscorable" if value is None else f"{name} {value:g}")
        print(f"--- {number + 1}/{len(group.completions)}  {', '.join(facts)}")
        print(printable(completion.transcript))
