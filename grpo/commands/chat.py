"""Talk to a model, or print samples of one prompt with their rewards.

    python -m grpo.chat --model runs/tiny_arithmetic/checkpoint-150
    python -m grpo.chat --model runs/tiny_arithmetic/checkpoint-150 --prompt "17+25=" --samples 8 --column answer=42
    python -m grpo.chat --model Qwen/Qwen2.5-0.5B-Instruct --prompt "What is 17+25?"

Prompts are rendered, sampled and scored as in the run that wrote the checkpoint, or with --config. A model without a run gets the
prompt alone, and no rewards are computed unless --column or reward.functions=[...] asks for them.
Where the dataset's prompts are lists of messages and a reward reads messages, add data.conversational=true.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from grpo.algorithm.batch import Group
from grpo.config import KEYS_EPILOG, Config, config_of_models, engine_overrides
from grpo.data.problems import Rows, instructions_of, make_problems
from grpo.distributed import World, set_cpu_threads
from grpo.model import load_policy, load_tokenizer, resolve_model
from grpo.rewards import RewardRunner
from grpo.rewards.scores import score_groups
from grpo.rollout import Engine, SamplingParams, check_sampling
from grpo.system import printable
from grpo.telemetry.terminal import end_without_reader, print_user_error
from grpo.vllm import build_engine


def main(argv: list[str]) -> int:
    end_without_reader()
    options, overrides = _parser().parse_known_args(argv)
    try:
        config = _config_from(options, overrides)
        set_cpu_threads(config.runtime)
        run = talk if options.prompt is None else show_samples
        with contextlib.closing(_engine_from(options, config)) as engine, engine.weights():
            return run(engine, config, options)
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2
    except KeyboardInterrupt:
        print()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.chat", description=__doc__, epilog=KEYS_EPILOG,
        usage="python -m grpo.chat --model MODEL [--prompt TEXT] [options] [section.key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model_help = "checkpoint folder, any Hugging Face folder or id, or builtin:tiny"
    parser.add_argument("--model", required=True, help=model_help)
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run; default: that of the model's run")
    engine_help = "builtin (default, whatever the run sampled with) or vllm; short for rollout.engine=..."
    parser.add_argument("--engine", choices=("builtin", "vllm"), default="builtin", help=engine_help)
    parser.add_argument("--prompt", metavar="TEXT", help="sample this prompt instead of starting a conversation")
    parser.add_argument("--samples", type=int, metavar="N", default=8, help="completions of --prompt (default 8)")
    column_help = "a column for the rewards, such as answer=42"
    parser.add_argument("--column", action="append", default=[], metavar="NAME=VALUE", help=column_help)
    parser.add_argument("--temperature", type=float, help="default: the run's rollout.temperature; 0 is greedy")
    length_help = "default: the run's rollout.max_completion_length; without a run 256, or half the model's context"
    parser.add_argument("--max-tokens", type=int, metavar="N", help=length_help)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _config_from(options: argparse.Namespace, overrides: list[str]) -> Config:
    # Without a run: an empty system prompt, or the model would get the instructions of the default task.
    plain = {"data": {"system_prompt": ""}}
    overrides = [*engine_overrides(options.engine), *overrides]
    config, saved = config_of_models([options.model], options.config, overrides, without_run=plain)
    options.is_plain = saved is None and options.config is None
    options.has_rewards = not options.is_plain or options.column or any(o.startswith("reward") for o in overrides)
    return config


def _engine_from(options: argparse.Namespace, config: Config) -> Engine:
    trust = config.model.trust_remote_code
    path = resolve_model(options.model, config.data.dataset, trust_remote_code=trust, adapters=True)
    device = torch.device("cuda" if torch.cuda.is_available() and config.runtime.device != "cpu" else "cpu")
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    precision = config.runtime.precision if device.type == "cuda" else "fp32"
    settings = dict(device=device, precision=precision, trust_remote_code=trust)
    if config.model.attn_implementation == "eager":  # for models without SDPA; flash attention needs a GPU
        settings["attn_implementation"] = "eager"
    settings["base_precision"] = config.lora.base_precision
    policy = load_policy(path, tokenizer, disable_dropout=False, **settings)
    check_sampling(policy)
    starts_vllm = config.rollout.engine == "vllm" and config.rollout.addresses is None
    return build_engine(
        config,
        World(rank=0, size=1, local_rank=0, device=device),
        policy,
        path=path,
        root=policy.model,
        longest=0,
        probe_ids=(),
        folder=tempfile.mkdtemp(prefix="grpo-chat-") if starts_vllm else ".",
        builtin={},
    )


def _sample(
    engine: Engine, config: Config, options: argparse.Namespace, prompt: str | list[dict[str, str]],
    columns: dict[str, Any], *, num_samples: int, turn: int,
) -> Group:  # fmt: skip
    """Sample completions of one prompt. ``ValueError`` if prompt and completion together exceed the model's context."""
    rows = Rows("the prompt", [prompt], [columns], instructions_of(config.data, config.data.dataset))
    context_length = engine.policy.context_length or 10**9
    max_tokens = options.max_tokens or config.rollout.max_completion_length
    if options.is_plain and options.max_tokens is None:
        max_tokens = min(max_tokens, context_length // 2)
    if max_tokens >= context_length:
        raise ValueError(
            f"{max_tokens} completion tokens leave no space for a prompt in the model's context of {context_length} tokens: "
            "set --max-tokens"
        )
    data = config.data.model_copy(update={"max_prompt_length": context_length - max_tokens})
    (problem,) = make_problems(rows, data, engine.policy.tokenizer).problems
    r = config.rollout
    temperature = r.temperature if options.temperature is None else options.temperature
    filters = dict(top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, stop=tuple(r.stop))
    sampling = SamplingParams(num_samples, max_tokens, temperature=temperature, **filters)
    (group,) = engine.generate([problem], sampling, seed_key=(options.seed, "chat", turn))
    return group


def talk(engine: Engine, config: Config, options: argparse.Namespace) -> int:
    """Hold a conversation, one line of standard input a turn. A conversation that exceeds the context is started again."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("/reset starts a new conversation, /quit or Ctrl-D ends the program")
    messages: list[dict[str, str]] = []
    turn = 0
    while True:
        if is_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return 0
        if line.strip() == "/reset":
            messages = []
        elif line.strip():
            messages.append({"role": "user", "content": line.rstrip("\n")})
            try:
                group = _sample(engine, config, options, messages, {}, num_samples=1, turn=turn)
            except ValueError:
                if len(messages) == 1:
                    raise
                print("(the conversation exceeds the model's context: a new one starts with this turn)")
                messages = messages[-1:]
                group = _sample(engine, config, options, messages, {}, num_samples=1, turn=turn)
            text = group.completions[0].text
            messages.append({"role": "assistant", "content": text})
            turn += 1
            print(printable(text) + ("" if group.completions[0].finished else " [truncated]"), flush=True)


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def show_samples(engine: Engine, config: Config, options: argparse.Namespace) -> int:
    """Print completions of one prompt, each with all its rewards, as in a training step."""
    columns = {}
    for item in options.column:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ValueError(f"--column {item}: use NAME=VALUE")
        columns[name] = value if name == "answer" else _json_or_text(value)
    if options.samples < 1:
        raise ValueError(f"--samples {options.samples} must be at least 1")
    group = _sample(engine, config, options, options.prompt, columns, num_samples=options.samples, turn=0)
    shown = _rewards_of(group, engine, config) if options.has_rewards else [""] * options.samples
    for number, (completion, rewards) in enumerate(zip(group.completions, shown, strict=True), 1):
        ending = "finished" if completion.finished else "truncated"
        print(f"--- {number}/{options.samples}  {rewards}{len(completion.ids)} tokens, {ending}")
        print(printable(completion.text))
    return 0


def _rewards_of(group: Group, engine: Engine, config: Config) -> Iterator[str]:
    """The weighted sum and all rewards of each completion, as text."""
    reward = config.reward
    with RewardRunner(reward.functions, timeout_s=reward.timeout_s, device=engine.policy.device) as rewards:
        try:
            values = score_groups(rewards, [group]).values
        except ValueError as mistake:
            raise ValueError(f"{mistake}; add --column NAME=VALUE") from None
    for row in values:
        weighted = [w * v for w, v in zip(rewards.weights, row, strict=True) if w and v is not None]
        total = f"{sum(weighted):g}" if weighted else "unscorable"
        values_shown = ["unscorable" if value is None else f"{value:g}" for value in row]
        parts = ", ".join(f"{name} {shown}" for name, shown in zip(rewards.names, values_shown, strict=True))
        yield f"reward {total} ({parts}), "


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
