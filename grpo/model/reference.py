"""The frozen reference model of the KL term."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo.model.policy import Policy


def make_reference(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy in eval mode. It has the policy's weights and runs under the same autocast, so that the KL at step 0 is exactly 0."""
    reference = copy.deepcopy(model).eval()
    return reference.requires_grad_(False)


@torch.no_grad()
def cast_reference_to_bf16(reference: PreTrainedModel, policy: Policy) -> bool:
    """Store the weights of linear layers in bf16: half the memory, and the same bits, since autocast casts them to bf16 at every use.

    A weight that two modules use (an embedding tied to the head) stays in fp32. A short forward pass checks that the logits are the
    same; if they are not, or if the model cannot run with bf16 weights, the reference stays in fp32.

    Returns:
        Whether the weights are in bf16 now.
    """
    if policy.precision != "bf16":
        return False
    num_users = Counter(id(p) for module in reference.modules() for p in module.parameters(recurse=False))
    layers = [m for m in reference.modules() if type(m) is nn.Linear and num_users[id(m.weight)] == 1]
    ids = torch.arange(16, device=policy.device)[None, :] % reference.get_input_embeddings().weight.shape[0]
    before = [(p, p.data) for layer in layers for p in layer.parameters(recurse=False)]
    with policy.autocast():
        expected = reference(input_ids=ids, use_cache=False).logits
        for parameter, _ in before:
            parameter.data = parameter.data.bfloat16()
        try:
            if torch.equal(reference(input_ids=ids, use_cache=False).logits, expected):
                return True
        except Exception:  # the model's code is not ours: some of it multiplies by fp32 tensors without autocast
            pass
    for parameter, value in before:
        parameter.data = value
    return False


@torch.no_grad()
def sync_reference(reference: nn.Module, model: nn.Module, alpha: float) -> None:
    """``ref = alpha * policy + (1 - alpha) * ref``, in place."""
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        old.lerp_(new, alpha)
