"""The model that is trained, with what sampling and scoring need to know about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Policy:
    """A causal language model, its tokenizer, and the precision it computes in."""

    model: PreTrainedModel
    """The bare model with fp32 master weights. DDP wraps a scorer around it, never this attribute."""
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    """Every token that ends a completion: all that tokenizer, config and generation config name."""
    pad_id: int
    """Fills padding. Padding is never recognised by this value, which may be an EOS token."""
    device: torch.device
    precision: str
    """``bf16`` (autocast) or ``fp32``."""

    @property
    def backbone(self) -> nn.Module:
        """The model without its language-model head."""
        return self.model.base_model

    @property
    def context_length(self) -> int | None:
        """Most tokens that the model's position embeddings allow; None if its config names no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Eval mode, no gradients, autocast. The mode before is restored, also after an exception.

        In train mode transformers ignores the KV cache while gradient checkpointing is on, and dropout would change the policy.
        """
        was_training = self.model.training
        self.model.eval()
        assert not any(module.training for module in self.model.modules())
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            self.model.train(was_training)
