"""The model that is trained: its precision, head and dropout; and the frozen reference of the KL
term."""

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

LAYER = re.compile(r"^.*?\.\d+\.")
"""The beginning of a parameter's name up to the number of its layer: ``model.layers.0.``"""


@dataclass
class Policy:
    """A causal language model, its tokenizer, and the precision it computes in."""

    model: PreTrainedModel
    """The bare model with fp32 master weights. DDP wraps a scorer around it; FSDP shards its
    parameters in place."""
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    """Every token that ends a completion: all that tokenizer, config and generation config name."""
    pad_id: int
    """Fills padding. Padding is never recognised by this value, which may be an EOS token."""
    device: torch.device
    precision: str
    """``bf16`` (autocast) or ``fp32``."""
    adapter: Any = None
    """peft's model around ``model``, whose LoRA adapter is all that is trained; None: all weights
    are trained."""
    unreached: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that :func:`freeze_unreached` has frozen, by name; checkpoints hold them, too."""
    is_llama: bool = False
    """True if the written-out decode step computes it right; :func:`grpo.rollout.check_model` finds
    that out."""

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
        """See :func:`context_limit`."""
        return context_limit(self.model.config)

    def check_context_room(self, prompt_length: int, max_length: int) -> None:
        """UserError if a prompt and a completion of ``max_length`` tokens exceed the context
        together."""
        context = self.context_length
        # The start of a run has refused a completion that does not fit alone.
        if context is not None and max_length < context < prompt_length + max_length:
            raise UserError(
                f"a prompt of {prompt_length} tokens and a completion of up to {max_length} "
                f"exceed the model's context of {context} tokens"
            )

    def without_weights(self) -> Policy:
        """A copy whose parameters are on the meta device: the same modules, ties, adapters and
        buffers."""
        # A hook that no pickle takes, and that checkpointing here does not need.
        self.model.disable_input_require_grads()
        copies = {}
        for parameter in self.model.parameters():
            empty = torch.empty_like(parameter, device="meta")
            copies[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
        return copy.deepcopy(self, copies)

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def score_one_token(self, scorer: nn.Module) -> torch.Tensor:
        """A log-prob by this model's scorer. It depends on all parameters that the model uses for a
        token."""
        ids_BS = torch.full((1, 2), self.pad_id, device=self.device)
        prompt_lengths_B = torch.tensor([1], device=self.device)
        mask_BT = torch.tensor([[True]], device=self.device)
        with self.autocast():
            logprobs_BT, _ = scorer(ids_BS, prompt_lengths_B, mask_BT)
        return logprobs_BT.sum()

    @contextlib.contextmanager
    def comparison(self) -> Iterator[float]:
        """:meth:`inference` for comparing two ways of the model to compute log-probs.

        Gives the bound for :func:`grpo.attention.precision.is_close`: a state may be computed at
        once or step by step. In fp32, unless attention (flash attention) may have no fp32.
        """
        has_fp32 = self.model.config._attn_implementation in ("sdpa", "eager")
        in_bf16 = self.precision == "bf16" and not has_fp32
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=in_bf16)
        with self.inference(), autocast, ieee_fp32():
            yield 0.5 if in_bf16 else 1e-3

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """Eval mode, no gradients, autocast. The previous mode is restored, also after an
        exception.

        In train mode transformers ignores the KV cache under gradient checkpointing, and there may
        be dropout.
        """
        was_training = self.model.training
        self.model.eval()
        assert not any(module.training for module in self.model.modules())
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            self.model.train(was_training)


def context_limit(config: PreTrainedConfig) -> int | None:
    """Most tokens of a sequence; None if the configuration names no limit. Of longrope the
    *original* context.

    Beyond it longrope has other frequencies, and transformers chooses by the longest row of a pass:
    log-probs would depend on which rows share a pass.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    # Some models have one entry for each type of layer.
    for options in (rope, *rope.values()):
        if isinstance(options, dict) and options.get("rope_type", options.get("type")) in (
            "longrope",
            "su",
        ):
            original = options.get("original_max_position_embeddings")
            limit = original or text.original_max_position_embeddings
    return limit


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Errors of transformers and peft about a folder, of many types, as a ValueError that begins
    with ``what``."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {first_line(error)}") from error


def check_finite(model: nn.Module, path: str | Path) -> None:
    """ValueError if a weight is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        # It takes a tenth of the time of isfinite() on CPU, and is NaN where a value is.
        extremes = torch.stack(parameter.aminmax())
        if not extremes.isfinite().all():
            raise ValueError(f"{path}: {name} contains NaN or infinity; take another checkpoint")


def num_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Number of parameters, or of those that are trained; tied ones count once."""
    counted = [p for p in model.parameters() if p.requires_grad or not trained]
    return sum(p.numel() for p in counted)


def freeze_unreached(model: nn.Module, output: torch.Tensor) -> dict[str, nn.Parameter]:
    """Freeze the parameters that ``output``, computed from text, does not depend on, and return
    them by name.

    In a model that reads images, text does not reach the vision tower. DDP would wait for its
    gradient for ever. ValueError if nothing is left to train.
    """
    if not output.requires_grad:
        raise ValueError(
            f"the output of {type(model).__name__} for text depends on no parameter that is trained: "
            "lora.target_modules must name layers of its language model"
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(output, list(trained.values()), allow_unused=True)

    # Inside of a layer that text reaches, other tokens may use more: other experts, for example.
    reached_layers = set()
    missed = []
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            missed.append(name)
        else:
            reached_layers.update(LAYER.findall(name))
    unreached = {}
    for name in missed:
        if reached_layers.isdisjoint(LAYER.findall(name)):
            unreached[name] = trained[name].requires_grad_(False)
    return unreached


def make_reference(model: nn.Module) -> nn.Module:
    """A frozen copy of a model, or of its scorer, in eval mode. Under the policy's autocast, the KL
    at step 0 is 0."""
    reference = copy.deepcopy(model)
    return reference.eval().requires_grad_(False)


def store_frozen_in_bf16(policy: Policy) -> None:
    """Store the frozen weights of linear layers in bf16: logits keep their bits, since autocast
    casts at every use.

    A weight that two modules use (an embedding tied to the head) stays in fp32. If a short forward
    pass gives other logits or fails, all weights stay in fp32.
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
        if is_frozen and num_users[module.weight] == 1:
            layers[name] = module

    vocabulary = len(model.get_input_embeddings().weight)
    ids_1S = torch.arange(16, device=policy.device)[None, :] % vocabulary
    with policy.inference():
        expected = model(input_ids=ids_1S, use_cache=False).logits
        for name, layer in layers.items():
            model.set_submodule(name, half_linear(layer))
        # Some models' own code reads a weight, or multiplies by fp32 tensors without autocast.
        with contextlib.suppress(Exception):
            found = model(input_ids=ids_1S, use_cache=False).logits
            if torch.equal(found, expected):
                return
    for name, layer in layers.items():
        model.set_submodule(name, layer)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's list of modules with the most parameters, which its hidden states pass through;
    or ValueError."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of decoder layers: set runtime.parallel=ddp"
        )
    return list(max(lists, key=num_parameters))


@torch.no_grad()
def sync_reference(reference: nn.Module, model: nn.Module, alpha: float) -> None:
    """``ref = alpha * policy + (1 - alpha) * ref``, in place."""
    for old, new in zip(reference.parameters(), model.parameters(), strict=True):
        old.lerp_(new, alpha)


class HalfLinear(nn.Linear):
    """A frozen linear layer in bf16. Without autocast it computes in the dtype of its input, for
    checks in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def half_linear(layer: nn.Linear) -> HalfLinear:
    """A copy in bf16 of a frozen layer."""
    half = copy.deepcopy(layer).bfloat16()
    half.__class__ = HalfLinear
    return half


def turn_dropout_off(model: nn.Module) -> None:
    """Set every number named after randomness to 0, in modules and in configurations, which some
    models read.

    :func:`grpo.rollout.check_model` checks that nothing stays random, and that nothing else has
    changed.
    """
    holders = []
    for module in model.modules():
        holders.append(module)
        if hasattr(module, "config"):
            holders.append(module.config)
    for holder in holders:
        for name, value in list(vars(holder).items()):
            is_random = any(part in name for part in ("drop", "jitter", "noise"))
            if is_random and isinstance(value, float):
                setattr(holder, name, 0.0)
        if isinstance(holder, nn.modules.dropout._DropoutNd):
            holder.p = 0.0


def in_training_mode(policy: Policy, compute: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Results in training mode under two seeds. The mode, and the state of global generators, stay
    as they were."""
    devices = [policy.device] if policy.device.type == "cuda" else []
    was_training = policy.model.training
    policy.model.train()
    results = []
    with torch.random.fork_rng(devices=devices):
        for seed in range(2):
            torch.manual_seed(seed)
            results.append(compute())
    policy.model.train(was_training)
    return results
