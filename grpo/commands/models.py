"""The options of the commands that sample from models, and the engine that does it."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import Config
from grpo.distributed import World
from grpo.model import load_policy
from grpo.rollout import BuiltinEngine, Engine, check_model
from grpo.turns.engine import TurnsEngine
from grpo.turns.tools import Tools
from grpo.vllm import build_engine


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--engine``."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run; default: that of the model's run")
    parser.add_argument("--engine", choices=("builtin", "vllm"), default="builtin", help="default: builtin")


def load_engine(
    config: Config, world: World, path: str, tokenizer: PreTrainedTokenizerBase, *,
    problems: Sequence[Problem] = (), completion_length: int = 0, folder: str | Path = ".", tools: Tools | None = None,
) -> Engine:  # fmt: skip
    """The engine of the model at ``path``, with the settings of its run. All ranks call it together.

    Args:
        problems: the problems that it will sample for; empty: not known.
        folder: gets the logs of vLLM's servers.
        tools: of the run, if it has turns.
    """
    longest = max((len(problem.prompt_ids) + completion_length for problem in problems), default=0)
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
            longest=longest,
            probe_ids=problems[0].prompt_ids if problems else (),
            folder=folder,
        )
    else:
        engine = BuiltinEngine(policy, fast_decode=config.runtime.fast_decode)
    if tools is None:
        return engine
    engine = TurnsEngine(engine, tools, config, num_ranks=world.size)
    engine.check()
    return engine
