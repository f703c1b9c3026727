"""The check at start that a model's decode steps with its cache compute what its forward pass computes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from grpo.attention import fast_paths, window_of
from grpo.model import Policy
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.prefill import prefill


def check_sampling(policy: Policy, reach: int = 0) -> None:
    """Decode a few fixed tokens as a rollout does, and compare their logits with those of each row alone, unpadded.

    The prompts have uneven lengths, and rows leave on the way. If the model's attention has a window that a row of
    ``reach`` tokens exceeds, a prompt of its length is decoded, too. ValueError, with the model's class, if the logits
    differ; what the model's own code raises, if it cannot decode with a cache.
    """
    window = window_of(policy.model.config.get_text_config())
    lengths = [7, window[1]] if window is not None and window[1] < reach else [7]
    with policy.inference():
        if all(policy.computes_equally(partial(_decoded_and_plain_logits, policy, length)) for length in lengths):
            return
    raise ValueError(
        f"{type(policy.model).__name__} cannot be sampled: decode steps with its cache give other logits than its "
        "forward pass: take another architecture"
    )


def prove_decoding(policy: Policy, llama_decoder: LlamaDecoder | None) -> list[str]:
    """Switch on compiled decode steps if they are right for this model; else a line that says why not.

    Call it inside of the engine's ``weights()``, in inference mode. Without ``llama_decoder`` they are off.
    """
    fast_paths.switch_off(fast_paths.STEP)
    if llama_decoder is None or not fast_paths.may_use(policy.device):
        return []
    length = min(policy.context_length or 200, 200) - 10  # several blocks of a kernel

    def logits() -> list[Tensor]:
        return [torch.stack([logits_V for *_, logits_V in _decoded(policy, length, llama_decoder)[1]])]

    tolerance = 1e-3 if policy.precision == "fp32" else 0.1
    return fast_paths.prove(fast_paths.STEP, logits, tolerance)


def _decoded_and_plain_logits(policy: Policy, length: int) -> tuple[Tensor, Tensor]:
    """``length``: of the longest prompt."""
    sequences, found = _decoded(policy, length)
    inputs = [torch.tensor([sequence], device=policy.device) for sequence in sequences]
    alone = [policy.model(input_ids=ids_1S, use_cache=False).logits[0] for ids_1S in inputs]
    return torch.stack([x for *_, x in found]), torch.stack([alone[row][position] for row, position, _ in found])


def _decoded(
    policy: Policy, length: int, llama_decoder: LlamaDecoder | None = None
) -> tuple[list[list[int]], list[tuple[int, int, Tensor]]]:
    """The tokens of four rows, and ``(row, position, logits [V] of the next token)`` for every token decoded."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (max(24, length),), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [tuple(ids[:length]), tuple(ids[7:11]), tuple(ids[7:11]), tuple(ids[11:12])]
    sequences, rows, found = [list(prompt) for prompt in prompts], [0, 1, 2, 3], []
    decoder, logits_RV = prefill(policy, llama_decoder, prompts, capacity=3)
    for step in range(4):
        if step == 2:
            rows = [2, 3]
            decoder.keep_rows(torch.tensor(rows, device=policy.device))
        if step > 0:
            for row in rows:
                sequences[row].append(ids[8 + 4 * step + row])
            logits_RV = decoder.step(torch.tensor([sequences[row][-1] for row in rows], device=policy.device))
        found += [(row, len(sequences[row]) - 1, logits_V) for row, logits_V in zip(rows, logits_RV, strict=True)]
    return sequences, found
