"""Checks that a model's decode steps compute what its modules compute without a cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from grpo.attention import packing_enabled, window_of
from grpo.attention.precision import ieee_fp32
from grpo.model import Policy
from grpo.rollout.llama_decoder import LlamaDecoder, has_llama_layers
from grpo.rollout.prefill import prefill

LENGTH = 7
"""Tokens of the longest prompt, unless a window asks for more."""


def check_sampling(policy: Policy, reach: int = 0) -> None:
    """Compare the logits of decode steps, with a cache, with those of each row alone, unpadded.

    If the model's attention has a window that a row of ``reach`` tokens exceeds, a prompt of the
    window's length is decoded, too. ValueError, with the model's class, if the logits differ; what
    the model's own code raises, if it cannot decode with a cache.
    """
    lengths = [LENGTH]
    window = window_of(policy.model.config.get_text_config())
    if window is not None and window[1] < reach:
        lengths.append(window[1])
    with policy.inference():
        for length in lengths:
            compute = partial(_decoded_and_plain_logits, policy, length)
            if not policy.computes_equally(compute):
                raise ValueError(
                    f"{type(policy.model).__name__} cannot be sampled: decode steps with its cache "
                    "give other logits than its forward pass: take another architecture"
                )


def matches_model(
    policy: Policy,
    gathered: Callable[[nn.Module], AbstractContextManager] = nullcontext,
) -> bool:
    """True if decode steps of :class:`LlamaDecoder` give the logits of the model's own modules.

    ``gathered``: see :class:`LlamaDecoder`.
    """
    if not packing_enabled(policy.model):
        return False
    if not has_llama_layers(policy.backbone):
        return False

    # Some models scale queries by position.
    context = policy.context_length or 2**20
    decoded = partial(
        _decoded,
        policy,
        LENGTH,
        far=max(context - LENGTH - 3, 0),
    )
    fp32 = torch.autocast(policy.device.type, enabled=False)
    with policy.inference(), fp32, ieee_fp32():
        _, expected = decoded()
        try:
            decoder = LlamaDecoder(policy.backbone, gathered)
            _, found = decoded(decoder)
        except Exception:  # modules with Llama's names, but with another interface
            return False
    expected_NV = torch.cat(expected)
    error = (torch.cat(found) - expected_NV).abs().max()
    return bool(error <= 5e-5 * expected_NV.abs().max())


def _decoded_and_plain_logits(
    policy: Policy,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Logits ``[N, V]`` by decode steps with a cache, and by a forward pass over each row."""
    sequences, decoded = _decoded(policy, length)
    plain = []
    for sequence, logits_NV in zip(sequences, decoded, strict=True):
        ids_1S = torch.tensor([sequence], device=policy.device)
        logits_1SV = policy.model(input_ids=ids_1S, use_cache=False).logits
        plain.append(logits_1SV[0, -len(logits_NV) :])
    return torch.cat(decoded), torch.cat(plain)


def _decoded(
    policy: Policy,
    length: int,
    llama_decoder: LlamaDecoder | None = None,
    far: int = 0,
) -> tuple[list[list[int]], list[Tensor]]:
    """The tokens of four rows, and for each row the logits ``[N, V]`` of its last N positions.

    Prompts of ``length`` and fewer tokens continue by fixed tokens, as a rollout decodes them; two
    rows leave on the way. The others continue up to ``far`` positions further.
    """
    embedding = policy.model.get_input_embeddings()
    ids_N = torch.randint(
        len(embedding.weight),
        (max(24, length),),
        generator=torch.Generator().manual_seed(0),
    )
    ids = ids_N.tolist()
    prompts = [ids[:length], ids[7:11], ids[7:11], ids[11:12]]
    answers = [ids[12:13], ids[13:14], ids[14:17], ids[17:20]]

    decoder, logits_RV = prefill(
        policy,
        llama_decoder,
        list(map(tuple, prompts)),
        capacity=3,
    )
    if far:
        decoder.positions_R += decoder.positions_R.new_tensor([0, 0, far // 2, far])
    logits = [[logits_V] for logits_V in logits_RV]
    rows = [0, 1, 2, 3]
    for step in range(3):
        if step == 1:
            rows = [2, 3]
            decoder.keep_rows(torch.tensor(rows, device=policy.device))
        tokens = [answers[row][step] for row in rows]
        logits_RV = decoder.step(torch.tensor(tokens, device=policy.device))
        for row, logits_V in zip(rows, logits_RV, strict=True):
            logits[row].append(logits_V)

    sequences = []
    for prompt, answer in zip(prompts, answers, strict=True):
        sequences.append(prompt + answer)
    return sequences, [torch.stack(of_row) for of_row in logits]
