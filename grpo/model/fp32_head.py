"""A language-model head that computes logits in fp32 under bf16 autocast (``model.fp32_head``)."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel


class FP32Head(nn.Linear):
    """Hidden states to logits in fp32, with another layer's parameters. bf16 rounds a logit of 20 by up to 0.06."""

    computes_in = torch.float32
    """Read by ``grpo.algorithm.logprobs``, which computes the head itself, in chunks."""

    def __init__(self, head: nn.Linear):
        super().__init__(head.in_features, head.out_features, bias=head.bias is not None, device="meta")
        self.weight, self.bias = head.weight, head.bias
        self.train(head.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.weight, self.bias)


def use_fp32_head(model: PreTrainedModel) -> None:
    """Replace the model's head, a plain ``nn.Linear`` or ValueError, by an :class:`FP32Head` of the same parameters."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(f"model.fp32_head=true needs a head that is a plain nn.Linear, not {type(head).__name__}")
    model.set_output_embeddings(FP32Head(head))
