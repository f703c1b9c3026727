"""The check that a server can sample for a run: version, precision, log-probs, context, LoRA."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import httpx

from grpo.model import Policy
from grpo.rollout import SamplingParams
from grpo.vllm.client import Server, ServerError

OLDEST = (0, 32)
"""The oldest version of vLLM that was tested."""
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
"""vLLM's names of the values of ``runtime.precision``."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for ``--max-lora-rank``."""
WHOLE, ADAPTER = "grpo-whole-", "grpo-adapter-"
"""What the versions of weights begin with that replace those of a server, and of adapters beside these."""
LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this one."""


def max_lora_rank(policy: Policy) -> int | None:
    """The smallest ``--max-lora-rank`` of vLLM that holds the policy's adapter; None without one."""
    if policy.adapter is None:
        return None
    config = policy.adapter.peft_config["default"]
    rank = max([config.r, *config.rank_pattern.values()])
    return next((most for most in LORA_RANKS if most >= rank), rank)


async def check_server(
    server: Server, http: httpx.AsyncClient, policy: Policy, uses: Sequence[tuple[int, SamplingParams]]
) -> str:
    """Ask a server for its settings, and for the name of its model; returns vLLM's version.

    ServerError, with the option to start it with, unless it can sample so for the policy. ``uses``: for each kind of
    sampling to come, the tokens of its longest prompt and its settings.
    """
    try:
        version = json.loads(await server.call(http, "GET", "/version"))["version"]
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            raise ServerError(
                f"{server} has version {version}: install vLLM {'.'.join(map(str, OLDEST))} or later there"
            )
        server.model = json.loads(await server.call(http, "GET", "/v1/models"))["data"][0]["id"]
        info = json.loads(await server.call(http, "GET", "/server_info?config_format=json"))
        problem = _problem(info["vllm_config"], info["vllm_env"], policy, uses)
        weights = json.loads(await server.call(http, "GET", "/weight_info"))["weight_version"]
        if policy.adapter is not None and weights.startswith(WHOLE):
            problem = "has the weights of another run, to which an adapter must not be added: start it again"
    except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
        raise ServerError(f"{server} is no server that is known ({type(error).__name__}: {error})") from None
    if problem is not None:
        raise ServerError(f"{server} {problem}")
    return version


def _problem(
    settings: dict[str, Any], env: dict[str, Any], policy: Policy, uses: Sequence[tuple[int, SamplingParams]]
) -> str | None:
    """What the server cannot do for the policy, and the option that mends it; None: nothing."""
    model, scheduler, rank = settings["model_config"], settings["scheduler_config"], max_lora_rank(policy)
    dtype, wanted = str(model["dtype"]).removeprefix("torch."), DTYPE_NAMES[policy.precision]
    longest = max((prompt + sampling.max_completion_length for prompt, sampling in uses), default=0)
    lora = settings["lora_config"]
    runtime_lora = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
    if dtype != wanted:
        return f"computes in {dtype}, and runtime.precision={policy.precision}: start it with --dtype {wanted}"
    if model["quantization"] is not None:
        return f"quantizes its weights ({model['quantization']}): start it without --quantization"
    if model["logprobs_mode"] != "processed_logprobs":
        return f"returns {model['logprobs_mode']}: start it with --logprobs-mode processed_logprobs"
    # vLLM 0.32 fails there with "CPU Generator does not use offset" if it computes a prompt with a seed in parts.
    if settings["device_config"]["device"] == "cpu" and scheduler["enable_chunked_prefill"]:
        return "computes prompts in parts on the CPU: start it with --no-enable-chunked-prefill"
    if longest > model["max_model_len"]:
        return f"takes {model['max_model_len']} tokens, {longest} are needed: start it with --max-model-len {longest}"
    if settings["device_config"]["device"] == "cpu" and any(p.dim() == 3 for p in policy.model.parameters()):
        return (
            "computes on the CPU, where vLLM 0.32 does not reload the experts of a mixture: sample with engine=builtin"
        )
    if rank is not None and (lora is None or lora["max_lora_rank"] < rank or not env[runtime_lora]):
        options = f"--enable-lora --max-lora-rank {rank} and {runtime_lora}=True in its environment"
        return f"takes no adapters of this rank while it runs: start it with {options}"
    return None


def check_temperature(sampling: SamplingParams) -> None:
    """ServerError for a temperature at which vLLM samples otherwise."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        limit = f"vLLM samples at {LOWEST_TEMPERATURE} or above, or greedily at 0"
        raise ServerError(f"temperature={sampling.temperature:g}: {limit}")
