"""The check that a server can sample for a run: version, precision, log-probs, context, LoRA."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from grpo.model import Policy
from grpo.vllm.client import Server, ServerError

OLDEST = (0, 32)
"""The oldest version of vLLM that was tested."""
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
"""vLLM's names of the values of ``runtime.precision``."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for ``--max-lora-rank``."""
RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""The environment variable with which vLLM loads adapters while it runs."""
WHOLE, ADAPTER = "grpo-whole-", "grpo-adapter-"
"""Beginnings of the versions of weights that replace a server's, and of adapters beside these."""


def max_lora_rank(policy: Policy) -> int | None:
    """The smallest ``--max-lora-rank`` of vLLM that holds the policy's adapter; None without one."""
    if policy.adapter is None:
        return None
    config = policy.adapter.peft_config["default"]
    rank = max([config.r, *config.rank_pattern.values()])
    return next((most for most in LORA_RANKS if most >= rank), rank)


async def check_server(server: Server, http: httpx.AsyncClient, policy: Policy, longest: int) -> str:
    """Ask a server for its settings, and for the name of its model; returns vLLM's version.

    ServerError, with the option to start it with, unless it can sample for the policy. ``longest``: the most tokens of
    a prompt and its completion.
    """
    try:
        version = json.loads(await server.call(http, "GET", "/version"))["version"]
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            raise ServerError(
                f"{server} has version {version}: install vLLM {'.'.join(map(str, OLDEST))} or later there"
            )
        server.model = json.loads(await server.call(http, "GET", "/v1/models"))["data"][0]["id"]
        info = json.loads(await server.call(http, "GET", "/server_info?config_format=json"))
        problem = _problem(info["vllm_config"], info["vllm_env"], policy, longest)
        weights = json.loads(await server.call(http, "GET", "/weight_info"))["weight_version"]
        if policy.adapter is not None and weights.startswith(WHOLE):
            problem = "has the weights of another run, to which an adapter must not be added: start it again"
    except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
        raise ServerError(f"{server} does not answer as a vLLM server does ({type(error).__name__}: {error})") from None
    if problem is not None:
        raise ServerError(f"{server} {problem}")
    return version


def _problem(settings: dict[str, Any], env: dict[str, Any], policy: Policy, longest: int) -> str | None:
    """The first thing that the server cannot do for the policy, with the option that mends it; None: nothing."""
    model, lora, rank = settings["model_config"], settings["lora_config"], max_lora_rank(policy)
    on_cpu = settings["device_config"]["device"] == "cpu"
    dtype, wanted = str(model["dtype"]).removeprefix("torch."), DTYPE_NAMES[policy.precision]
    takes_adapters = lora is not None and lora["max_lora_rank"] >= (rank or 0) and env[RUNTIME_LORA]
    is_mixture = any(p.dim() == 3 for p in policy.model.parameters())
    problems = {
        f"computes in {dtype}: start it with --dtype {wanted}, as runtime.precision": dtype != wanted,
        "quantizes its weights: start it without --quantization": model["quantization"] is not None,
        f"returns {model['logprobs_mode']}: start it with --logprobs-mode processed_logprobs": (
            model["logprobs_mode"] != "processed_logprobs"
        ),
        # vLLM 0.32 fails there with "CPU Generator does not use offset" if it computes a prompt with a seed in parts.
        "computes prompts in parts on the CPU: start it with --no-enable-chunked-prefill": (
            on_cpu and settings["scheduler_config"]["enable_chunked_prefill"]
        ),
        f"takes {model['max_model_len']} tokens: start it with --max-model-len {longest}": (
            longest > model["max_model_len"]
        ),
        "does not reload a mixture's experts on the CPU (vLLM 0.32): use rollout.engine=builtin": on_cpu and is_mixture,
        f"takes no adapters of this rank: start it with --enable-lora --max-lora-rank {rank}, and with "
        f"{RUNTIME_LORA}=True in its environment": rank is not None and not takes_adapters,
    }
    return next((problem for problem, is_found in problems.items() if is_found), None)
