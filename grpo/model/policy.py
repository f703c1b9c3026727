"""The model that is trained, with its tokenizer and precision, and the frozen reference of the KL term."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo.attention.precision import ieee_fp32


@dataclass
class Policy:
    """A causal language model, its tokenizer, and the precision it computes in."""

    model: PreTrainedModel
    """The bare model with fp32 master weights. DDP wraps a scorer around it; FSDP shards its parameters in place."""
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    """Every token that ends a completion: all that tokenizer, config and generation config name."""
    pad_id: int
    """Fills padding. Padding is never recognised by this value, which may be an EOS token."""
    device: torch.device
    precision: str
    """``bf16`` (autocast) or ``fp32``."""
    adapter: Any = None
    """peft's model around ``model``, whose LoRA adapter is all that is trained; None: all weights are trained."""

    @property
    def trained(self) -> Any:
        """The model, or peft's model around it: what checkpoints write with ``save_pretrained``."""
        return self.adapter or self.model

    @property
    def backbone(self) -> nn.Module:
        """The model without its language-model head."""
        return self.model.base_model

    @property
    def context_length(self) -> int | None:
        """Most tokens that :func:`context_limit` allows; None if the model's config names no limit."""
        return context_limit(self.model.config)[0]

    def without_weights(self) -> Policy:
        """A copy whose parameters are on the meta device: the same modules, ties, adapters and buffers."""
        self.model.disable_input_require_grads()  # a hook that no pickle takes, and that checkpointing here needs not
        parameters = self.model.parameters()
        empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in parameters}
        return copy.deepcopy(self, empty)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def computes_equally(self, compute: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """True if both logits ``[..., V]`` differ by less than 0.1% of their standard deviation, in fp32.

        Where a kernel has no fp32 (flash attention, for example), in the precision of the run and by less than 50%:
        that finds gross errors only.
        """
        try:
            with torch.autocast(self.device.type, enabled=False), ieee_fp32():
                (found, expected), tolerance = compute(), 1e-3
        except Exception:  # the kernels are not ours
            if self.precision == "fp32":
                raise
            with self.autocast():
                (found, expected), tolerance = compute(), 0.5
        return bool((found - expected).abs().max() <= tolerance * expected.float().std(dim=-1).max())

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Eval mode, no gradients, autocast. The previous mode is restored, also after an exception.

        In train mode transformers ignores the KV cache under gradient checkpointing, and there may be dropout.
        """
        was_training = self.model.training
        self.model.eval()
        assert not any(module.training for module in self.model.modules())
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            self.model.train(was_training)


def context_limit(config: PreTrainedConfig) -> tuple[int | None, str]:
    """Most tokens of a sequence, None if the configuration names no limit, and what the limit is.

    Longrope has one set of frequencies up to its original context and another beyond it, and transformers chooses by
    the longest row of a pass: beyond the original context, log-probs would depend on which rows share a pass.
    """
    text = config.get_text_config()
    limit, what = getattr(text, "max_position_embeddings", None), "the model's context"
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for options in [rope, *rope.values()]:  # some models have one entry for each type of layer
        if isinstance(options, dict) and options.get("rope_type", options.get("type")) in ("longrope", "su"):
            original = options.get("original_max_position_embeddings") or text.original_max_position_embeddings
            if limit is None or original < limit:
                limit = original
                what = "the model's original context (beyond it, longrope computes all rows as the longest one)"
    return limit, what


def num_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Number of parameters, or of those that are trained; tied ones count once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trained)


def make_reference(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy in eval mode, which runs under the policy's autocast: the KL at step 0 is exactly 0."""
    return copy.deepcopy(model).eval().requires_grad_(False)


@torch.no_grad()
def cast_frozen_to_bf16(reference: PreTrainedModel, policy: Policy) -> bool:
    """Store the frozen weights of linear layers in bf16: logits keep their bits, since autocast casts at every use.

    A weight that two modules use (an embedding tied to the head) stays in fp32. If a short forward pass gives other
    logits or fails, all weights stay in fp32. Returns whether the weights are in bf16 now.
    """
    if policy.precision != "bf16":
        return False
    # Without those that another module uses too.
    num_users = Counter(id(p) for module in reference.modules() for p in module.parameters(recurse=False))
    linear = [m for m in reference.modules() if type(m) is nn.Linear and not m.weight.requires_grad]
    linear = [m for m in linear if num_users[id(m.weight)] == 1]
    before = [(p, p.data) for m in linear for p in m.parameters(recurse=False)]
    ids = torch.arange(16, device=policy.device)[None, :] % reference.get_input_embeddings().weight.shape[0]
    with policy.autocast():
        expected = reference(input_ids=ids, use_cache=False).logits
        for parameter, _ in before:
            parameter.data = parameter.data.bfloat16()
        with contextlib.suppress(Exception):  # some models' own code multiplies by fp32 tensors without autocast
            if torch.equal(reference(input_ids=ids, use_cache=False).logits, expected):
                return True
    for parameter, value in before:
        parameter.data = value
    return False


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that the model's hidden states pass through: of its lists of modules the one with the most parameters.

    ValueError if it has none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers: set runtime.parallel=ddp")
    return list(max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters())))


@torch.no_grad()
def sync_reference(reference: nn.Module, model: nn.Module, alpha: float) -> None:
    """``ref = alpha * policy + (1 - alpha) * ref``, in place."""
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        old.lerp_(new, alpha)
