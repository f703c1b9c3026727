"""Verification that a server computes with the weights it was given: log-probs of a few tokens, and checksums of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from grpo.distributed import compute_inside
from grpo.model import Policy
from grpo.rollout.vllm.client import Server, ServerError

LIMITS = {"fp32": 1e-3, "bf16": 0.5}
"""Largest mean difference of log-probs, in nats: rounding in fp32 gives 1e-6, in bf16 about 0.02 (more where logits are
large: above 32 they are 0.25 apart); wrong weights more than 1. Weights of
another step can differ by less, and are found by the version and by the checksums."""
FEWEST, MOST = 8, 64
"""Tokens of the probe; a prompt of fewer is replaced by one of ``2 * FEWEST``."""
CHECKED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose weights vLLM stores as their files have them, but for what is fused and padded."""
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Modules of a model folder, and the one that vLLM joins them to, in this order."""
PADDED_ROWS = 64
"""vLLM pads embedding and head with rows of zeros to a multiple of this."""
NOTHING = hashlib.sha256(b"").hexdigest()
"""The checksum of a weight that vLLM has replaced by a form of its own, as it does on the CPU."""


def probe_tokens(ids: Sequence[int], vocabulary: int) -> list[int]:
    """The tokens of the probe: the first of ``ids``, or fixed ones if these are too few."""
    return list(ids[:MOST]) if len(ids) >= FEWEST else [(7 * i + 3) % vocabulary for i in range(2 * FEWEST)]


def own_logprobs(policy: Policy, root: nn.Module, ids: Sequence[int]) -> list[float]:
    """Log-probs of ``ids[1:]`` under the policy at temperature 1, in nats.

    Under FSDP all ranks call it; ``root`` is then the sharded module that holds the policy's model. ValueError if one is not finite.
    """
    sequence_1S = torch.tensor([list(ids)], device=policy.device)

    def logits() -> torch.Tensor:
        return policy.model(input_ids=sequence_1S, use_cache=False).logits[0, :-1].float()

    with policy.inference():
        logprobs_SV = torch.log_softmax(compute_inside(root, logits), dim=-1)
    logprobs_S = logprobs_SV.gather(1, sequence_1S[0, 1:, None])[:, 0]
    if not torch.isfinite(logprobs_S).all():
        raise ValueError(
            f"the model computes log-probs that are not finite under runtime.precision={policy.precision}: its weights or activations are too "
            "large"
        )
    return logprobs_S.tolist()


def check_probe(
    server: Server, ids: Sequence[int], expected: Sequence[float], precision: str, model: str | None
) -> float:
    """The mean difference of the server's log-probs of ``ids[1:]`` from the expected ones; ServerError if it is too large.

    ``model``: the name of an adapter; None: the model itself.
    """
    found = server.prompt_logprobs(ids, model)
    difference = sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected)
    if not difference <= LIMITS[precision]:
        raise ServerError(
            f"{server} does not compute with the weights it was given: log-probs of {len(expected)} tokens differ by {difference:.3g} on average "
            f"(limit {LIMITS[precision]:g} in {precision}): start it again, with the model that is trained"
        )
    return difference


class Checksums:
    """SHA-256 of weights under vLLM's names, added one tensor at a time."""

    def __init__(self) -> None:
        self._hashes: dict[str, hashlib._Hash] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """``tensor``: on the CPU, in the server's dtype."""
        parts = name.split(".")
        if len(parts) > 1 and parts[-2] in FUSED:
            parts[-2] = FUSED[parts[-2]]
        digest = self._hashes.setdefault(".".join(parts), hashlib.sha256())
        digest.update(_bytes(tensor))
        if parts[-2] in ("embed_tokens", "lm_head") and (missing := -len(tensor) % PADDED_ROWS):
            digest.update(bytes(missing * tensor[0].numel() * tensor.element_size()))

    def result(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def check_checksums(server: Server, expected: Mapping[str, str], tensor_parallel: int) -> int:
    """Compare the server's checksums with ours; returns the number of weights compared, ServerError if one differs.

    With tensor parallelism each worker holds a part of a matrix: only the norms are whole.
    """
    compared = 0
    for full_name, digest in server.checksums().items():
        name = full_name.rpartition(":")[2].replace(".base_layer.", ".")
        is_whole = tensor_parallel == 1 or "norm" in name
        if digest == NOTHING or name not in expected or not is_whole:
            continue
        if digest != expected[name]:
            raise ServerError(
                f"{server} holds other weights than it was given: the checksum of {name} differs: start it again, with the model that is trained"
            )
        compared += 1
    return compared
