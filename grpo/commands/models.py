"""Tools, rewards, tokenizer and engine of the commands that sample from models."""

import tempfile
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import Config
from grpo.distributed import World
from grpo.model import load_policy, load_tokenizer, resolve_model
from grpo.rewards import RewardRunner
from grpo.rollout import BuiltinEngine, Engine, check_model
from grpo.turns.engine import TurnsEngine
from grpo.turns.tools import Tools
from grpo.vllm import build_engine

BUILTIN_ENGINE = ("rollout.engine=builtin", "rollout.server=start")
"""Comes before the arguments of the user, since a model may be sampled from without the servers of
its run."""


def open_rewards(
    config: Config,
    at_end: ExitStack,
) -> tuple[Tools | None, RewardRunner]:
    """The tools and environments of a run (None if it has no turns), and its rewards."""
    tools = None
    specs = config.reward.functions
    if config.uses_turns:
        tools = Tools(config)
        at_end.callback(tools.close)
        specs = tools.load().reward_specs(specs)
    rewards = RewardRunner(
        specs,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers,
        environments=tools,
    )
    at_end.callback(rewards.close)
    return tools, rewards


def find_tokenizer(config: Config, model: str) -> tuple[str, PreTrainedTokenizerBase]:
    """The folder or Hub id of a model, which is built or downloaded first, and its tokenizer."""
    trust = config.model.trust_remote_code
    path = resolve_model(model, config.data.dataset, trust_remote_code=trust, adapters=True)
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=trust,
        chat_template=config.model.chat_template,
    )
    return path, tokenizer


def load_engine(
    config: Config,
    world: World,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools | None,
    longest: int = 0,
) -> Engine:
    """The engine of the model at ``path``, with the settings of its run. All ranks call it
    together.

    Args:
        longest: the most tokens of a prompt and its completion; 0: not known.
    """
    with world.fail_together():
        policy = load_policy(
            path,
            tokenizer,
            device=world.device,
            precision=config.runtime.precision,
            attn_implementation=config.model.attn_implementation,
            trust_remote_code=config.model.trust_remote_code,
            base_precision=config.lora.base_precision,
        )
        # As in training: the same kernels, so the same tokens.
        check_model(
            policy,
            CompletionScorer(policy.model),
            disable_dropout=config.model.disable_dropout,
            reach=longest,
        )
    if config.rollout.engine == "vllm":
        engine = build_engine(
            config,
            world,
            policy,
            path=path,
            root=policy.model,
            longest=min(longest, policy.context_length or longest),
            probe_ids=(),
            folder=tempfile.mkdtemp(),
        )
    else:
        engine = BuiltinEngine(policy, fast_decode=config.runtime.fast_decode)
    if tools is None:
        return engine
    engine = TurnsEngine(engine, tools, config, num_ranks=world.size)
    engine.check()
    return engine
