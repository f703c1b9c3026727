"""Load the tools, rewards, tokenizer and engine for the commands that sample from models."""

import tempfile

from transformers import PreTrainedTokenizerBase

from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import Config
from grpo.distributed import World
from grpo.model import load_policy, load_tokenizer, resolve_model
from grpo.rollout import BuiltinEngine, Engine, check_model
from grpo.turns.engine import TurnsEngine
from grpo.turns.tools import Tools
from grpo.vllm import build_engine

BUILTIN_ENGINE = ("rollout.engine=builtin", "rollout.server=start")
"""Arguments that stand before the user's arguments, so that the built-in engine is the default. The
vLLM servers of a run may no longer exist when its model is sampled from later."""


def find_tokenizer(config: Config, model: str) -> tuple[str, PreTrainedTokenizerBase]:
    """Return the folder or Hub id of a model, and its tokenizer.

    A built-in model that is not in the cache is built first.
    """
    trust_remote_code = config.model.trust_remote_code
    path = resolve_model(
        model,
        config.data.dataset,
        trust_remote_code=trust_remote_code,
        adapters=True,
    )
    tokenizer = load_tokenizer(
        path,
        trust_remote_code=trust_remote_code,
        chat_template=config.model.chat_template,
    )
    return path, tokenizer


def load_engine(
    config: Config,
    world: World,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools,
    max_row_length: int = 0,
) -> Engine:
    """Return an engine for the model at ``path``, with the settings of a run.

    All ranks call this function together.

    Args:
        max_row_length: largest number of tokens of a prompt with its completion. Default: not
            known.
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
        # As at the start of training, the check chooses the kernels. Other kernels would round
        # differently, and other tokens would be sampled.
        check_model(
            policy,
            CompletionScorer(policy.model),
            disable_dropout=config.model.disable_dropout,
            max_row_tokens=max_row_length,
        )
    if config.rollout.engine == "vllm":
        engine = build_engine(
            config,
            world,
            policy,
            path=path,
            root=policy.model,
            longest=max_row_length,
            # The weights do not change here, so no probe is needed to show that the servers have
            # new weights.
            probe_ids=(),
            folder=tempfile.mkdtemp(),
        )
    else:
        engine = BuiltinEngine(policy, fast_decode=config.runtime.fast_decode)
    if not config.uses_turns:
        return engine
    engine = TurnsEngine(engine, tools, config, num_ranks=world.size)
    # The run checked the chat template of the model that it trained. This may be another model.
    engine.check()
    return engine
