"""The policy loss: ``policy.py`` puts it together, ``objectives.py`` has one function per objective, ``corrections.py`` weights and masks."""

from grpo.loss.corrections import entropy_threshold, kept_sequences, sampler_weights
from grpo.loss.objectives import clipped_tokens, surrogate_loss
from grpo.loss.policy import importance_ratio, kl_estimate, loss_denominator, policy_loss

__all__ = [
    "clipped_tokens", "entropy_threshold", "importance_ratio", "kept_sequences", "kl_estimate", "loss_denominator", "policy_loss",
    "sampler_weights", "surrogate_loss",
]  # fmt: skip
