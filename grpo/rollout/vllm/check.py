"""The check that a server can sample for a run: version, routes, precision, model, vocabulary, context, LoRA."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.model import Policy
from grpo.rollout.vllm.client import OLDEST, OLDEST_NAME, Server, ServerError

DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
"""vLLM's names of the values of ``runtime.precision``."""
SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Values of ``config.json`` on which the shapes of the weights depend."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for ``--max-lora-rank``."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one."""


@dataclass(frozen=True)
class Facts:
    """The parts of a server's settings that sampling depends on."""

    version: str
    max_model_len: int
    """Most tokens of a prompt and its completion together."""
    processed_logprobs: bool
    """Log-probs are those after temperature and filters; False: before them."""
    tensor_parallel: int
    weight_transfer: str | None
    """The backend of vLLM's weight-transfer routes; None: they are off."""
    tokens_per_step: int | None
    """Most prompt tokens that may be in flight at once; None: no limit. On the CPU vLLM ends with "CPU Generator does not use offset" when it
    computes the prompt of a request with a seed in parts, which it does with prompts that exceed its ``max_num_batched_tokens`` together."""


def check_server(server: Server, policy: Policy, lora_rank: int | None) -> Facts:
    """Ask a server for its settings, and for the name of its model.

    Args:
        lora_rank: of the adapter that is trained; None: all weights are trained.

    Raises:
        ServerError: if the server is too old, lacks routes, or has another precision, model or vocabulary than the policy.
    """
    try:
        version = server.version()
    except ServerError as error:
        if error.status != 404:
            raise
        raise ServerError(f"{server} has no route /version: is it a vLLM server?") from None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < OLDEST:
        raise ServerError(f"{server} runs vLLM {version}: install vLLM {OLDEST_NAME} or later there")
    model = server.models()[0]
    try:
        info = server.info()
    except ServerError as error:
        if error.status != 404:
            raise
        raise ServerError(
            f"{server} has no route /server_info: start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        ) from None
    try:
        settings = info["vllm_config"]
        config, parallel, lora = settings["model_config"], settings["parallel_config"], settings["lora_config"]
        facts = Facts(
            version,
            int(model.get("max_model_len") or config["max_model_len"]),
            config["logprobs_mode"] == "processed_logprobs",
            int(parallel["tensor_parallel_size"]),
            (settings.get("weight_transfer_config") or {}).get("backend"),
            _tokens_per_step(settings),
        )
        if not config["logprobs_mode"].endswith("logprobs"):
            raise ServerError(
                f"{server} returns {config['logprobs_mode']} in place of log-probs: start it with --logprobs-mode processed_logprobs"
            )
        _check_precision(server, policy, config)
        _check_lora(server, lora, info["vllm_env"], lora_rank)
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"{server} answers /server_info without {error}: vLLM {OLDEST_NAME} was tested") from None
    server.model = model["id"]
    _check_shape(server, policy, Path(model.get("root") or ""))
    _check_vocabulary(server, policy, checks_ids=not config.get("skip_tokenizer_init"))
    return facts


def max_lora_rank(rank: int) -> int:
    """The smallest ``--max-lora-rank`` of vLLM that holds adapters of this rank."""
    return next((most for most in LORA_RANKS if most >= rank), rank)


def check_transfer(server: Server, facts: Facts, backend: str) -> None:
    """ServerError unless the server takes weights by the backend, ``nccl`` or ``ipc``."""
    if facts.weight_transfer != backend:
        insecure = " and VLLM_ALLOW_INSECURE_SERIALIZATION=1 in its environment" if backend == "ipc" else ""
        option = json.dumps({"backend": backend})
        raise ServerError(
            f"{server} does not take weights by rollout.weight_transfer={backend}: start it with --weight-transfer-config '{option}'{insecure}"
        )


def _tokens_per_step(settings: dict[str, Any]) -> int | None:
    scheduler = settings["scheduler_config"]
    in_parts = settings["device_config"]["device"] == "cpu" and scheduler["enable_chunked_prefill"]
    return int(scheduler["max_num_batched_tokens"]) if in_parts else None


def _check_precision(server: Server, policy: Policy, config: dict[str, Any]) -> None:
    wanted, found = DTYPE_NAMES[policy.precision], str(config["dtype"]).removeprefix("torch.")
    if found != wanted:
        raise ServerError(
            f"{server} computes in {found}, and runtime.precision={policy.precision}: start it with --dtype {wanted}, or set runtime.precision"
        )
    if config["quantization"] is not None:
        raise ServerError(f"{server} quantizes its weights ({config['quantization']}): start it without --quantization")


def _check_lora(server: Server, lora: dict[str, Any] | None, env: dict[str, Any], rank: int | None) -> None:
    if rank is None:
        return
    start = f"start it with --enable-lora --max-lora-rank {max_lora_rank(rank)} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
    if lora is None:
        raise ServerError(f"{server} takes no LoRA adapters: {start}")
    if int(lora["max_lora_rank"]) < rank:
        raise ServerError(
            f"{server} takes adapters of rank {lora['max_lora_rank']} at most, the policy's has rank {rank}: {start}"
        )
    if not env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]:
        raise ServerError(f"{server} takes no adapters while it runs: {start}")


def _check_shape(server: Server, policy: Policy, root: Path) -> None:
    """Compare ``config.json``, where this machine has the folder of the server's model. vLLM ends when it loads weights of other shapes."""
    try:
        found = json.loads((root / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    own = policy.model.config
    for name in SHAPE:
        here, there = getattr(own, name, None), found.get(name)
        if None not in (here, there) and here != there:
            raise ServerError(
                f"{server} has another model, {root}: its {name} is {there}, the policy's {here}: start it with the model that is trained"
            )


def _check_vocabulary(server: Server, policy: Policy, checks_ids: bool) -> None:
    """The server must know the last id of the policy's embedding, and none behind it and the tokenizer: vLLM takes every id that either has."""
    rows = policy.model.get_input_embeddings().weight.shape[0]
    behind = max(rows, max(policy.tokenizer.get_vocab().values(), default=0) + 1)
    for id, is_known in ((rows - 1, True), *([(behind, False)] if checks_ids else [])):
        body = {"model": server.model, "prompt": [id], "max_tokens": 1, "temperature": 0.0}
        try:
            server.request("POST", "/v1/completions", body)
            known = True
        except ServerError as error:
            if "vocabulary" not in str(error):  # "Token id 128 is out of vocabulary"
                raise
            known = False
        if known != is_known:
            size = "more" if known else "fewer"
            raise ServerError(
                f"{server} has a model of {size} tokens than the policy's {rows}: start it with the model that is trained"
            )


def check_context(server: Server, facts: Facts, longest_prompt: int, longest_completion: int) -> None:
    """ServerError unless the server takes so many tokens."""
    needed = longest_prompt + longest_completion
    if needed > facts.max_model_len:
        raise ServerError(
            f"{server} takes {facts.max_model_len} tokens, and a prompt of {longest_prompt} with a completion of {longest_completion} has {needed}: "
            f"start it with --max-model-len {needed}"
        )


def check_settings(server: Server, facts: Facts, sampling: Any) -> None:
    """ServerError unless the server's log-probs are those of the distribution that it samples from.

    ``sampling``: has ``temperature``, ``top_p``, ``top_k`` and ``min_p``.
    """
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise ServerError(
            f"temperature={sampling.temperature:g}: vLLM samples at {LOWEST_TEMPERATURE} or above, or greedily at 0"
        )
    changed = [
        name
        for name, plain in (("temperature", 1), ("top_p", 1), ("top_k", 0), ("min_p", 0))
        if getattr(sampling, name) != plain
    ]
    if sampling.temperature > 0 and changed and not facts.processed_logprobs:
        raise ServerError(
            f"{server} returns log-probs before temperature and filters, and {changed[0]}={getattr(sampling, changed[0]):g}: start it with "
            "--logprobs-mode processed_logprobs"
        )
