"""The policy, which is the model that is trained, and the frozen reference model of the KL term."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo.attention.precision import ieee_fp32
from grpo.system import UserError, first_line

LAYER_PREFIX = re.compile(r"^.*?\.\d+\.")
"""Matches a parameter's name up to the number of its layer: ``model.layers.0.``"""


@dataclass
class Policy:
    """A causal language model, its tokenizer, and the precision of its forward passes."""

    model: PreTrainedModel
    """The bare model with fp32 master weights. DDP wraps the scorer that calls this model. FSDP
    shards the model's parameters in place."""
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    """Ids of all tokens that end a completion; see :func:`grpo.model.end_tokens`."""
    pad_id: int
    """Token id in padded positions. Masks come from lengths, never from this id, which may be an
    EOS token."""
    device: torch.device
    precision: str
    """``bf16`` (autocast) or ``fp32``."""
    adapter: Any = None
    """peft's wrapper of ``model``, if a LoRA adapter alone is trained. None if all weights are
    trained."""
    unused_by_text: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters, by name, that :func:`freeze_unused_by_text` has frozen. Checkpoints hold these
    parameters, too."""
    is_llama: bool = False
    """True if the decode step that is written for Llama's architecture computes the same logits as
    this model. :func:`grpo.rollout.check_model` sets it."""

    @property
    def trained_model(self) -> Any:
        """The object that checkpoints write with ``save_pretrained``: the model, or peft's wrapper
        of it."""
        return self.adapter or self.model

    @property
    def backbone(self) -> nn.Module:
        """The model without its language-model head."""
        return self.model.base_model

    @property
    def context_length(self) -> int | None:
        """Largest number of tokens in a sequence; see :func:`context_limit`."""
        return context_limit(self.model.config)

    def check_fits_context(self, prompt_length: int, max_length: int) -> None:
        """Raise a UserError if a prompt and a completion of ``max_length`` tokens together exceed
        the context."""
        context = self.context_length
        # A max_length that alone exceeds the context is no fault of the prompt. The start of the
        # run has refused it.
        if context is not None and max_length < context < prompt_length + max_length:
            raise UserError(
                f"a prompt of {prompt_length} tokens and a completion of up to {max_length} "
                f"exceed the model's context of {context} tokens"
            )

    def without_weights(self) -> Policy:
        """Return a copy with the same modules, tied parameters, adapters and buffers, but with its
        parameters on the meta device.

        Rank 0 sends this copy to the other ranks, which then receive their shards of the weights.
        """
        # This hook cannot be pickled, and non-reentrant gradient checkpointing does not need it.
        self.model.disable_input_require_grads()

        # deepcopy returns the object that it finds under an id in this dictionary, and copies only
        # other objects. So no weight is copied, and modules that share a parameter also share the
        # new one.
        copies = {}
        for parameter in self.model.parameters():
            empty = torch.empty_like(parameter, device="meta")
            copies[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        return copy.deepcopy(self, copies)

    def autocast(self) -> contextlib.AbstractContextManager:
        """Context of every forward pass: bf16 autocast, or in fp32 a context without effect."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def score_one_token(self, scorer: nn.Module) -> torch.Tensor:
        """Log-prob of one token, computed by this model's scorer. The autograd graph of this scalar
        reaches the parameters that the model uses for text."""
        # A prompt of one token and a completion of one. Which tokens they are does not matter.
        ids_BS = torch.full((1, 2), self.pad_id, device=self.device)
        prompt_lengths_B = torch.tensor([1], device=self.device)
        mask_BT = torch.tensor([[True]], device=self.device)
        with self.autocast():
            logprobs_BT, _ = scorer(ids_BS, prompt_lengths_B, mask_BT)
        return logprobs_BT.sum()

    @contextlib.contextmanager
    def precise_inference_mode(self) -> Iterator[float]:
        """Enter :meth:`inference_mode` in fp32, to compare two ways of computing the same
        log-probs. A bf16 model stays in bf16 if its attention has no fp32.

        Yields:
            The ``bound`` for :func:`grpo.attention.precision.is_close`.
        """
        # The rounding of bf16 would hide mistakes, but flash attention may have no fp32.
        has_fp32 = self.model.config._attn_implementation in ("sdpa", "eager")
        in_bf16 = self.precision == "bf16" and not has_fp32
        # Orders of summation differ, and a recurrent state may be computed at once or step by step.
        bound = 1e-3
        if in_bf16:
            bound = 0.5
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=in_bf16)
        with self.inference_mode(), autocast, ieee_fp32():
            yield bound

    @contextlib.contextmanager
    def inference_mode(self) -> Iterator[None]:
        """Run a block in eval mode, without gradients, under autocast. The previous mode is
        restored, also after an exception."""
        was_training = self.model.training
        self.model.eval()
        # In train mode transformers drops the KV cache under gradient checkpointing, which gives
        # wrong tokens without an error; and dropout may be on.
        assert not any(module.training for module in self.model.modules())
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            self.model.train(was_training)


def context_limit(config: PreTrainedConfig) -> int | None:
    """Largest number of tokens in a sequence; None if the configuration names no limit.

    With longrope the limit is the context of the *original* model. Longer rows get other rotary
    frequencies, and transformers chooses the frequencies by the longest row of a forward pass. The
    log-probs of a row would then depend on the other rows of the pass.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        # The name of the field before transformers 5, which custom model code may still use.
        rope = getattr(text, "rope_scaling", None) or {}
    # Some models have one entry for each type of layer.
    for options in (rope, *rope.values()):
        if not isinstance(options, dict):
            continue
        rope_type = options.get("rope_type", options.get("type"))
        if rope_type in ("longrope", "su"):
            original = options.get("original_max_position_embeddings")
            limit = original or text.original_max_position_embeddings
    return limit


@contextlib.contextmanager
def as_value_error(prefix: str) -> Iterator[None]:
    """Raise any error of the block as a ValueError of one line that begins with ``prefix``.

    transformers and peft raise errors of many types for a folder that they cannot read.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(f"{prefix}: {first_line(error)}") from error


def check_finite(model: nn.Module, path: str | Path) -> None:
    """Raise a ValueError if a weight is NaN or infinite. The message names ``path``."""
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        # One NaN makes both extremes NaN. On a CPU this takes a tenth of the time of isfinite() on
        # all values.
        extremes = torch.stack(parameter.aminmax())
        if not extremes.isfinite().all():
            raise ValueError(f"{path}: {name} contains NaN or infinity; take another checkpoint")


def num_parameters(
    model: nn.Module,
    *,
    trained: bool = False,
) -> int:
    """Number of parameters; with ``trained``, of trained parameters only. A tied parameter counts
    once."""
    return sum(
        parameter.numel()
        for parameter in model.parameters()
        if parameter.requires_grad or not trained
    )


def freeze_unused_by_text(model: nn.Module, output: torch.Tensor) -> dict[str, nn.Parameter]:
    """Freeze the parameters that ``output`` does not depend on, and return them by name.

    ``output`` is computed from text. In a model that also reads images, ``output`` does not depend
    on the vision tower, and DDP would wait forever for the tower's gradients.

    Raises:
        ValueError: if ``output`` depends on no trained parameter.
    """
    if not output.requires_grad:
        raise ValueError(
            f"the output of {type(model).__name__} for text depends on no parameter "
            "that is trained: lora.target_modules must name layers of its language model"
        )
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    parameters = list(trained.values())
    gradients = torch.autograd.grad(output, parameters, allow_unused=True)

    reached_layers = set()
    without_gradient = []
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            without_gradient.append(name)
        else:
            reached_layers.update(LAYER_PREFIX.findall(name))

    frozen = {}
    for name in without_gradient:
        # In a layer that this token reaches, other tokens may use more parameters, such as other
        # experts. These parameters stay trained.
        if reached_layers.isdisjoint(LAYER_PREFIX.findall(name)):
            frozen[name] = trained[name].requires_grad_(False)
    return frozen


def store_frozen_in_bf16(policy: Policy) -> None:
    """Store the weights of frozen linear layers in bf16, which halves their memory.

    Autocast casts these weights to bf16 at every use anyway, so logits stay the same to the bit. A
    short forward pass checks this: if it fails or gives other logits, all weights stay in fp32. A
    policy of precision fp32 is not changed.
    """
    if policy.precision != "bf16":
        return
    model = policy.model
    num_users = Counter()
    for module in model.modules():
        num_users.update(module._parameters.values())
    layers = {}
    for name, module in model.named_modules():
        is_frozen = type(module) is nn.Linear and not module.weight.requires_grad
        # A head that is tied to the embedding stays in fp32: autocast does not cast embeddings.
        if is_frozen and num_users[module.weight] == 1:
            layers[name] = module

    vocabulary = len(model.get_input_embeddings().weight)
    ids_1S = torch.arange(16, device=policy.device)[None, :] % vocabulary
    with policy.inference_mode():
        expected = model(input_ids=ids_1S, use_cache=False).logits
        for name, layer in layers.items():
            # The layer is copied, since the fp32 layer may have to be put back.
            half = copy.deepcopy(layer).bfloat16()
            half.__class__ = BF16Linear
            model.set_submodule(name, half)
        # The code of some models reads a weight, or multiplies by fp32 tensors without autocast,
        # which may fail here.
        with contextlib.suppress(Exception):
            logits = model(input_ids=ids_1S, use_cache=False).logits
            if torch.equal(logits, expected):
                return
    for name, layer in layers.items():
        model.set_submodule(name, layer)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers of a model, in order.

    Raises:
        ValueError: if the model has no list of modules.
    """
    # Architectures give this list different names, but it holds the most parameters. The list of
    # the experts in a layer, or of the layers of a vision tower, holds fewer.
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of decoder layers: set runtime.parallel=ddp"
        )
    return list(max(lists, key=num_parameters))


@torch.no_grad()
def sync_reference(
    reference: nn.Module,
    model: nn.Module,
    alpha: float,
) -> None:
    """Set the reference to ``alpha * policy + (1 - alpha) * reference``, in place."""
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        old.lerp_(new, alpha)


class BF16Linear(nn.Linear):
    """A frozen linear layer in bf16. Outside autocast the layer computes in the dtype of its
    input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        # The checks at the start of a run compute in fp32, where nn.Linear refuses bf16 weights.
        bias = self.bias
        if bias is not None:
            bias = bias.to(x.dtype)
        weight = self.weight.to(x.dtype)
        return F.linear(x, weight, bias)


def turn_dropout_off(model: nn.Module) -> None:
    """Set every probability of dropout, and every amount of noise, to 0.

    The attributes are found by their names, in modules and in the configurations that some models
    read in their forward pass. Afterwards :func:`grpo.rollout.check_model` checks that training
    mode computes what eval mode computes.
    """
    holders = []
    for module in model.modules():
        holders.append(module)
        if hasattr(module, "config"):
            holders.append(module.config)
    for holder in holders:
        for name, value in list(vars(holder).items()):
            is_random = any(word in name for word in ("drop", "jitter", "noise"))
            # Flags and modules with such names stay as they are.
            if is_random and isinstance(value, float):
                setattr(holder, name, 0.0)
        # PyTorch's dropout modules call the probability p.
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0


def in_training_mode(
    policy: Policy,
    compute: Callable[[], torch.Tensor],
) -> list[torch.Tensor]:
    """Call ``compute`` in training mode under two seeds, and return both results. They differ if
    ``compute`` is random.

    The model's mode and the global random generators are restored.
    """
    devices = []
    if policy.device.type == "cuda":
        devices.append(policy.device)
    was_training = policy.model.training
    policy.model.train()
    results = []
    with torch.random.fork_rng(devices=devices):
        for seed in range(2):
            torch.manual_seed(seed)
            results.append(compute())
    policy.model.train(was_training)
    return results
