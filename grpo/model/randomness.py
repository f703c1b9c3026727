"""Dropout and other randomness of training, switched off: scoring then sees the policy that sampled."""

from __future__ import annotations

import torch
from torch import nn

from grpo.model.policy import Policy

NAMES = ("drop", "jitter", "noise")
"""Parts of the names of numbers that set how random training mode is: ``attention_dropout``, ``resid_pdrop``, ..."""


def turn_dropout_off(model: nn.Module) -> None:
    """Set every number named after randomness to 0, in modules and in configurations, which some models read."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    for holder in [*model.modules(), *configs]:
        for name, value in list(vars(holder).items()):
            if isinstance(value, float) and any(part in name for part in NAMES):
                setattr(holder, name, 0.0)
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0


@torch.no_grad()
def turn_randomness_off(policy: Policy) -> None:
    """:func:`turn_dropout_off`, and a check on a short batch that training mode now computes what sampling computes.

    ValueError if two passes in training mode, with different seeds, are not the pass in evaluation mode. No global
    random number is drawn.
    """
    # The evaluation pass comes first: a number that also counts in evaluation must not be set to 0 unnoticed.
    model, was_training = policy.model, policy.model.training
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids_BS = torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(0)).to(policy.device)

    def train_and_eval_logits() -> tuple[torch.Tensor, torch.Tensor]:
        model.eval()
        expected = model(input_ids=ids_BS, use_cache=False).logits
        turn_dropout_off(model)
        model.train()
        found = []
        for seed in range(2):
            torch.manual_seed(seed)
            found.append(model(input_ids=ids_BS, use_cache=False).logits)
        return torch.stack(found), expected

    with torch.random.fork_rng(devices=[policy.device] if policy.device.type == "cuda" else []):
        is_off = policy.computes_equally(train_and_eval_logits)
    model.train(was_training)
    if not is_off:
        raise ValueError(
            f"model.disable_dropout=true leaves randomness in the training mode of {type(model).__name__}: "
            "take another model, or model.disable_dropout=false (scoring then differs: sampling/logprob_difference)"
        )
