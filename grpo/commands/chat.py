"""Talk to a model, or print samples of one prompt with their rewards.

    python -m grpo.chat --model runs/tiny_arithmetic/checkpoint-150
    python -m grpo.chat --model runs/tiny_arithmetic/checkpoint-150 --prompt "17+25=" --samples 8 --column answer=42
    python -m grpo.chat --model Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 17+25?"

Prompts are rendered, sampled and scored as in the run that wrote the checkpoint, or with --config. A model without a
run gets the prompt alone, and no rewards are computed unless --column or reward.functions=[...] asks for them.
Where the dataset's prompts are lists of messages and a reward reads messages, add data.conversational=true.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from typing import Any

from grpo.algorithm.batch import Group
from grpo.commands.command import command, command_parser
from grpo.commands.models import add_model_options, load_engine
from grpo.config import Config, config_of_models, engine_overrides
from grpo.data import Rows, make_problems
from grpo.data.tasks import task_of
from grpo.distributed import start_world
from grpo.model import load_tokenizer, resolve_model
from grpo.rewards import RewardRunner
from grpo.rewards.scores import score_groups
from grpo.rollout import Engine, SamplingParams
from grpo.system import printable
from grpo.telemetry.terminal import survive_lost_readers
from grpo.turns.tools import Tools


@command
def main(argv: list[str]) -> None:
    survive_lost_readers()
    parser = command_parser("chat", __doc__)
    parser.add_argument("--model", required=True, help="checkpoint, any Hugging Face folder or id, or builtin:tiny")
    add_model_options(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="sample this prompt instead of starting a conversation")
    parser.add_argument("--samples", type=int, metavar="N", default=8, help="completions of --prompt (default 8)")
    parser.add_argument("--column", action="append", default=[], metavar="NAME=VALUE", help="a column for the rewards")
    parser.add_argument("--temperature", type=float, help="default: the run's rollout.temperature; 0 is greedy")
    options, overrides = parser.parse_known_args(argv)
    if options.temperature == 0:  # all samples would be the same
        options.samples = 1
    overrides = [*engine_overrides(options.engine), *overrides]
    # Without a run: an empty system prompt, or the model would get the instructions of the default task.
    plain = {"data": {"system_prompt": ""}}
    config, saved = config_of_models([options.model], options.config, overrides, without_run=plain)
    has_rewards = saved or options.config or options.column or any(o.startswith("reward") for o in overrides)
    world = start_world(config.runtime)
    with contextlib.ExitStack() as at_end:
        rewards, columns = None, dict(map(_column, options.column))
        tools = at_end.enter_context(contextlib.closing(Tools(config).load())) if config.uses_turns else None
        if options.prompt is not None and has_rewards:
            specs = tools.reward_specs(config.reward.functions) if tools else config.reward.functions
            runner = RewardRunner(
                specs,
                timeout_s=config.reward.timeout_s,
                device=world.device,
                environments=tools,
            )
            rewards = at_end.enter_context(runner)
            rewards.check(columns)
        trust = config.model.trust_remote_code
        path = resolve_model(options.model, config.data.dataset, trust_remote_code=trust, adapters=True)
        folder = tempfile.mkdtemp(prefix="grpo-chat-") if options.engine == "vllm" else "."
        tokenizer = load_tokenizer(path, trust_remote_code=trust, chat_template=config.model.chat_template)
        engine = load_engine(config, world, path, tokenizer, folder=folder, tools=tools)
        at_end.callback(engine.close)
        at_end.enter_context(engine.weights())
        if options.prompt is None:
            talk(engine, tools, config, options)
        else:
            show_samples(engine, tools, config, options, columns, rewards)


def _column(item: str) -> tuple[str, Any]:
    name, equals, value = item.partition("=")
    if not equals:
        raise ValueError(f"--column {item}: use NAME=VALUE")
    try:
        return name, value if name == "answer" else json.loads(value)
    except ValueError:  # plain text
        return name, value


def _sample(
    engine: Engine,
    tools: Tools | None,
    config: Config,
    options: argparse.Namespace,
    prompt: str | list[dict[str, str]],
    columns: dict[str, Any],
    *,
    num_samples: int,
    turn: int,
) -> Group:
    """Sample completions of one prompt. ``ValueError`` if prompt and completion together exceed the model's context."""
    r, context_length = config.rollout, engine.policy.context_length or 10**9
    max_tokens = r.max_completion_length
    source = f"the chat (context of {context_length} tokens, rollout.max_completion_length={max_tokens})"
    task = task_of(config.data, config.data.dataset)
    rows = Rows(source, [prompt], [columns], task and task.instructions)
    data = config.data.model_copy(update={"max_prompt_length": context_length - max_tokens})
    schemas_of = None if tools is None else tools.schemas_of
    problems = make_problems(rows, data, engine.policy.tokenizer, schemas_of=schemas_of).problems
    temperature = r.temperature if options.temperature is None else options.temperature
    filters = dict(top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, stop=tuple(r.stop))
    sampling = SamplingParams(num_samples, max_tokens, temperature=temperature, **filters)
    (group,) = engine.generate(problems, sampling, seed_key=(config.seed, "chat", turn))
    return group


def talk(engine: Engine, tools: Tools | None, config: Config, options: argparse.Namespace) -> None:
    """Hold a conversation, one line of standard input a turn."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("/reset starts a new conversation, /quit or Ctrl-D ends the program\n> ", end="", flush=True)
    messages: list[dict[str, str]] = []
    for turn, line in enumerate(sys.stdin):
        if line.strip() == "/quit":
            break
        if line.strip() == "/reset":
            messages = []
        elif line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            group = _sample(engine, tools, config, options, messages, {}, num_samples=1, turn=turn)
            (completion,) = group.completions
            messages += getattr(completion, "messages", None) or [{"role": "assistant", "content": completion.text}]
            print(printable(completion.transcript) + ("" if completion.finished else " [truncated]"), flush=True)
        if is_terminal:
            print("> ", end="", flush=True)


def show_samples(
    engine: Engine,
    tools: Tools | None,
    config: Config,
    options: argparse.Namespace,
    columns: dict[str, Any],
    rewards: RewardRunner | None,
) -> None:
    """Print completions of one prompt, each with all its rewards, as in a training step."""
    group = _sample(engine, tools, config, options, options.prompt, columns, num_samples=options.samples, turn=0)
    values = score_groups(rewards, [group]).values if rewards else [[]] * options.samples
    for number, (completion, row) in enumerate(zip(group.completions, values, strict=True), 1):
        shown = ""
        if rewards:
            weighted = [w * v for w, v in zip(rewards.weights, row, strict=True) if w and v is not None]
            parts = ", ".join(f"{name} {_shown(v)}" for name, v in zip(rewards.names, row, strict=True))
            shown = f"reward {_shown(sum(weighted) if weighted else None)} ({parts}), "
        ending = "finished" if completion.finished else "truncated"
        print(f"--- {number}/{options.samples}  {shown}{completion.size}, {ending}")
        print(printable(completion.transcript))


def _shown(value: float | None) -> str:
    return "unscorable" if value is None else f"{value:g}"
