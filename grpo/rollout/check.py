"""The check at start that a model's decode steps with its cache compute what its forward pass computes."""

from __future__ import annotations

from functools import partial

import torch

from grpo.attention import window_of
from grpo.model import Policy
from grpo.rollout.prefill import prefill
from grpo.system import first_line


def check_sampling(policy: Policy, reach: int = 0) -> None:
    """Decode a few fixed tokens as a rollout does, and compare their logits with those of each row alone, without cache
    and padding.

    The prompts have uneven lengths, and rows leave on the way. If the model's attention has a window that a row of
    ``reach`` tokens exceeds, a prompt of its length is decoded, too. ValueError, with the model's class, if the logits
    differ.
    """
    name, window = type(policy.model).__name__, window_of(policy.model.config.get_text_config())
    lengths = [7, window[1]] if window is not None and window[1] < reach else [7]
    try:
        with policy.inference():
            agrees = all(
                policy.computes_equally(partial(_decoded_and_plain_logits, policy, length)) for length in lengths
            )
    except Exception as error:  # the model's code is not ours
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"{name} cannot be sampled with a cache ({reason}): take another architecture") from None
    if not agrees:
        reason = "decode steps with its cache give other logits than its forward pass"
        raise ValueError(f"{name} cannot be sampled: {reason}: take another architecture")


def _decoded_and_plain_logits(policy: Policy, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``length``: of the longest prompt."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (max(24, length),), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [tuple(ids[:length]), tuple(ids[7:11]), tuple(ids[7:11]), tuple(ids[11:12])]
    sequences, kept, found = [list(prompt) for prompt in prompts], [0, 1, 2, 3], []
    decoder, logits_RV = prefill(policy, None, prompts, capacity=3)
    for step in range(4):
        if step == 2:
            kept = [2, 3]
            decoder.keep_rows(torch.tensor(kept, device=policy.device))
        if step > 0:
            for row in kept:
                sequences[row].append(ids[8 + 4 * step + row])
            logits_RV = decoder.step(torch.tensor([sequences[row][-1] for row in kept], device=policy.device))
        found += [(row, len(sequences[row]) - 1, logits_V) for row, logits_V in zip(kept, logits_RV, strict=True)]
    rows = [torch.tensor([sequence], device=policy.device) for sequence in sequences]
    alone = [policy.model(input_ids=ids_1S, use_cache=False).logits[0] for ids_1S in rows]
    expected = torch.stack([alone[row][position] for row, position, _ in found])
    return torch.stack([logits_V for *_, logits_V in found]), expected
