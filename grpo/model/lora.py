"""LoRA: peft makes, loads, switches and writes adapters. Here is what peft lacks: the plain weight of an adapted layer.

peft puts its layers into the model in place, and ``policy.adapter`` is peft's own object around that model. An adapted
linear layer computes ``base(x) + scale * B(A(x))``; ``A`` is ``[rank, in]`` and ``B`` is ``[out, rank]``.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo.model.policy import Policy, cast_frozen_to_bf16
from grpo.system import first_line, import_extra

CONFIG_FILE = "adapter_config.json"
TRAINED, REFERENCE_ADAPTER = "default", "reference"
"""Names of adapters inside of peft's layers: the one that is trained, and a frozen one that the KL is measured from."""
EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Ends of names that peft takes for experts and routers, in a mixture, also where they name dense layers."""


def is_adapter(path: str | Path) -> bool:
    """True for a folder that holds an adapter, as peft writes it."""
    return os.path.isfile(os.path.join(path, CONFIG_FILE))


def load_peft() -> ModuleType:
    """The package peft; ValueError, with the command that installs it, if it is missing."""
    return import_extra("peft", extra="lora", needed_by="LoRA")


def read_adapter_config(folder: str | Path, setting: str) -> Any:
    """peft's ``LoraConfig`` of a folder; ValueError, which begins with ``setting``, if there is none."""
    peft = load_peft()
    try:
        config = peft.PeftConfig.from_pretrained(str(folder))
        assert isinstance(config, peft.LoraConfig), f"its peft_type is {config.peft_type}"
    except Exception as error:  # of any type: the file may hold anything
        raise ValueError(f"{setting}={folder} is no LoRA adapter that peft can read: {first_line(error)}") from None
    return config


def base_of(path: str, setting: str = "model.name_or_path") -> str:
    """The model that an adapter folder names as its own; any other path as it is."""
    base = read_adapter_config(path, setting).base_model_name_or_path if is_adapter(path) else path
    if not isinstance(base, str) or not base:
        raise ValueError(f"{setting}={path}: {CONFIG_FILE} does not name its model (base_model_name_or_path)")
    return base


def add_adapter(policy: Policy, settings: Mapping[str, Any], *, base: str, seed: int = 0) -> None:
    """Put a new adapter into the policy's model as ``policy.adapter``, and freeze everything else.

    Args:
        settings: of peft's ``LoraConfig``.
        base: the folder or Hub id of the model, for ``adapter_config.json``.
        seed: of the first matrices. No global random number is drawn.

    Raises:
        ValueError: if peft is missing, or if ``target_modules`` names layers that are missing or not linear.
    """
    targets, linear = settings["target_modules"], _linear_layers(policy.model)
    asked = f"lora.target_modules={targets}"
    # peft's own "all-linear" would adapt the experts and routers of a mixture too, which are no linear layers.
    found = linear if targets == "all-linear" else targets
    config = load_peft().LoraConfig(task_type="CAUSAL_LM", **{**settings, "target_modules": found})
    _inject(policy, config, base, asked, seed)
    adapted = policy.adapter.base_model.targeted_module_names
    names = [] if isinstance(found, str) else found
    if absent := [t for t in names if not any(f".{n}".endswith(f".{t}") for n in adapted)]:  # peft notices if all are
        choice = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ValueError(f"{asked}: no layer has the name {absent[0]}; use all-linear or a list of {choice}")


def read_adapter(policy: Policy, folder: str, *, setting: str, base: str, dropout: float = 0.0) -> None:
    """Load the adapter of a folder into the policy's model as ``policy.adapter``, with another dropout.

    ValueError, which begins with ``setting``, unless the model then computes with ``W + scale * B @ A``, and ``W`` are
    the weights that it has without the adapter: what the sampler and the reference of the KL compute with.
    """
    config = read_adapter_config(folder, setting)
    asked = f"{setting}={folder}, an adapter of {config.base_model_name_or_path}"
    config.lora_dropout, config.inference_mode = dropout, False
    with policy.inference():
        before = _logits(policy)
        _inject(policy, config, base, asked, seed=0)
        read_values(policy, folder, asked)
        with policy.adapter.disable_adapter():
            is_base_unchanged = torch.equal(_logits(policy), before)
        if not is_base_unchanged or not policy.computes_equally(lambda: _adapted_and_summed_logits(policy)):
            raise ValueError(
                f"{asked}: it does more than add scale * B @ A to weights of its model (PiSSA and OLoRA change these, "
                "for example): plain LoRA works, and python -m grpo.merge makes a whole model of any other"
            )


def read_values(policy: Policy, folder: str | Path, asked: str) -> None:
    """Give the trained adapter the values of a folder; ValueError, which begins with ``asked``, if they do not fit."""
    try:
        with _quiet(seed=0):
            found = policy.adapter.load_adapter(
                str(folder), TRAINED, is_trainable=True, torch_device=str(policy.device)
            )
    except Exception as error:  # of any type: the file may hold anything
        raise ValueError(f"{asked}, cannot be loaded: {first_line(error)}") from None
    if wrong := [*found.missing_keys, *found.unexpected_keys]:
        raise ValueError(f"{asked}, does not fit the model: {wrong[0]} is on one side only")
    if bad := [name for name, p in adapter_parameters(policy.model).items() if not torch.isfinite(p).all()]:
        raise ValueError(f"{asked}: {bad[0]} contains NaN or infinity; take another checkpoint")


def _inject(policy: Policy, config: Any, base: str, asked: str, seed: int) -> None:
    """Let peft put its layers in; ValueError if anything but the matrices of linear layers would be trained."""
    peft, model, plain = load_peft(), policy.model, set()
    model.disable_input_require_grads()  # peft asks for them anew, and both are needless for checkpointing as done here
    try:
        with _quiet(seed):
            policy.adapter = peft.get_peft_model(model, config)
    except Exception as error:  # of many types, also those of regular expressions
        raise ValueError(f"{asked}: {first_line(error)}") from None
    config.base_model_name_or_path = base
    if isinstance(config.target_modules, set):  # whose order differs from process to process
        config.target_modules = sorted(config.target_modules)
    model.disable_input_require_grads()
    for layer in [m for m in model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]:
        # The input stays in bf16 under autocast: peft would cast it to fp32, and autocast would cast it back.
        layer.cast_input_dtype_enabled = False
        is_linear = isinstance(layer.get_base_layer(), nn.Linear | Conv1D) and not layer.lora_variant
        if is_linear and layer is not model.get_output_embeddings():
            plain |= {layer.lora_A[TRAINED].weight, layer.lora_B[TRAINED].weight}
    if other := [name for name, p in model.named_parameters() if p.requires_grad and p not in plain]:
        raise ValueError(
            f"{asked}: {other[0]} would be trained, and only plain LoRA of linear layers before the head can be"
        )


def adapter_parameters(model: nn.Module, name: str = TRAINED) -> dict[str, nn.Parameter]:
    """The matrices of one adapter by their names in the model."""
    return {
        n: p for n, p in model.named_parameters() if n.endswith((f".lora_A.{name}.weight", f".lora_B.{name}.weight"))
    }


def add_reference_adapter(policy: Policy) -> None:
    """Add a frozen copy of the adapter, for :func:`reference_adapter`."""
    with _quiet(seed=0):
        policy.adapter.add_adapter(REFERENCE_ADAPTER, policy.adapter.peft_config[TRAINED])
        policy.adapter.set_adapter(TRAINED)
    copy_to_reference_adapter(policy.model)


@torch.no_grad()
def copy_to_reference_adapter(model: nn.Module) -> None:
    """Give the frozen adapter the values of the trained one."""
    pairs = zip(adapter_parameters(model, REFERENCE_ADAPTER).values(), adapter_parameters(model).values(), strict=True)
    for frozen, trained in pairs:
        frozen.copy_(trained)


@contextlib.contextmanager
def reference_adapter(policy: Policy) -> Iterator[None]:
    """Inside the block, without gradient, the model computes with the frozen adapter; if it has none, with none."""
    if REFERENCE_ADAPTER not in policy.adapter.peft_config:
        with policy.adapter.disable_adapter():
            yield
        return
    try:
        policy.adapter.set_adapter(REFERENCE_ADAPTER, inference_mode=True)
        yield
    finally:
        policy.adapter.set_adapter(TRAINED)


def _linear_layers(model: nn.Module) -> list[str]:
    """All linear layers but the head: the ends of their names, or the whole names where an end means others too."""
    head, modules = model.get_output_embeddings(), dict(model.named_modules())
    layers = [name for name, m in modules.items() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    if any(parameter.dim() == 3 for parameter in model.parameters()):  # the experts of a mixture
        layers = [name for name in layers if name.rpartition(".")[2] not in EXPERTS]
    ends = {name.rpartition(".")[2] for name in layers}
    is_plain = {name for name in modules if name.rpartition(".")[2] in ends} == set(layers)
    return sorted(ends if is_plain else layers)


@contextlib.contextmanager
def _quiet(seed: int) -> Iterator[None]:
    """Inside the block peft warns of nothing, and draws random numbers from this seed."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        yield


def _logits(policy: Policy) -> torch.Tensor:
    """``[1, 16, V]`` of fixed tokens."""
    ids_BS = torch.arange(16, device=policy.device)[None, :] % policy.model.get_input_embeddings().weight.shape[0]
    return policy.model(input_ids=ids_BS, use_cache=False).logits


def _adapted_and_summed_logits(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits as peft computes them, and with the weight of each adapted layer added up."""
    adapted = _logits(policy)
    layers = [layer for layer in policy.model.modules() if adapted_base(layer)]
    for layer in layers:
        layer.forward = lambda x, layer=layer: F.linear(x, effective_weight(layer), layer.bias)
    try:
        return adapted, _logits(policy)
    finally:
        for layer in layers:
            del layer.forward


class HalfLinear(nn.Linear):
    """A frozen linear layer in bf16. Without autocast it computes in the dtype of its input, for checks in fp32."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def store_frozen_in_bf16(policy: Policy) -> None:
    """Store the frozen weights of linear layers in bf16, unless that changes the logits."""
    with policy.inference():
        if not cast_frozen_to_bf16(policy.model, policy):
            return
    children = [(parent, *named) for parent in policy.model.modules() for named in parent.named_children()]
    for parent, name, child in children:
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
            setattr(parent, name, HalfLinear(child))


def adapted_base(layer: nn.Module) -> nn.Linear | None:
    """The frozen ``nn.Linear`` inside of a layer that has an adapter; None for every other module."""
    base = getattr(layer, "base_layer", None)
    return base if hasattr(layer, "lora_A") and isinstance(base, nn.Linear) else None


@torch.no_grad()
def effective_weight(layer: nn.Module) -> torch.Tensor:
    """``[out, in]`` the weight of a linear layer; with an adapter ``W + scale * B @ A``, added up in fp32."""
    base = adapted_base(layer)
    if base is None:
        return layer.weight.detach()
    a, b, scale = layer.lora_A[TRAINED].weight, layer.lora_B[TRAINED].weight, layer.scaling[TRAINED]
    with torch.autocast(a.device.type, enabled=False):
        return torch.addmm(base.weight.to(a.dtype), b, a, alpha=scale)
