"""LoRA: adapters, which peft puts into a model in place, their files, and the plain weights that they stand for.

The model keeps its class. Each adapted linear layer becomes peft's ``lora.Linear``, which computes ``base(x) + scale * B(A(x))``.
``A`` is ``[rank, in]`` and ``B`` is ``[out, rank]``.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo.model.policy import Policy, cast_frozen_to_bf16
from grpo.model.targets import check_targets
from grpo.system import first_line, import_extra, open_regular

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TRAINED, REFERENCE_ADAPTER = "default", "reference"
"""Names of adapters inside of peft's layers: the one that is trained, and a frozen one that the KL is measured from."""
PREFIX = "base_model.model."
"""The part of a name in files that peft writes before the name of a layer."""
UNSUPPORTED = (
    "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices",
    "target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config",
    "kasa_config",
)  # fmt: skip
"""Settings of peft under which an adapter is more, or other, than one ``scale * B @ A`` for each layer."""

FITS = {
    "r": lambda value: type(value) is int and value > 0,
    "lora_alpha": lambda value: type(value) in (int, float),
    "target_modules": lambda value: isinstance(value, str | list) and bool(value),
    "base_model_name_or_path": lambda value: isinstance(value, str | None),
}
"""Settings of peft that are read here, and the values that they may have."""


def is_adapter(path: str | Path) -> bool:
    """True for a folder that holds an adapter, as peft writes it."""
    return os.path.isfile(os.path.join(path, CONFIG_FILE))


def read_adapter_config(folder: str | Path, setting: str) -> dict[str, Any]:
    """The content of ``adapter_config.json``; ValueError, which begins with ``setting``, if it cannot be read or is no plain LoRA."""
    given = f"{setting}={folder}"
    try:
        with open_regular(Path(folder, CONFIG_FILE)) as file:
            values = json.load(file)
        kind = values["peft_type"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{given}: {CONFIG_FILE} cannot be read ({type(error).__name__}: {first_line(error)})"
        ) from None
    used = [name for name in UNSUPPORTED if values.get(name)] + ["bias"] * (values.get("bias") not in (None, "none"))
    wrong = [f"its {name} is {values.get(name)!r}" for name, fits in FITS.items() if not fits(values.get(name))]
    if kind != "LORA" or used or wrong:
        reason = f"its peft_type is {kind}" if kind != "LORA" else f"it uses {', '.join(used)}" if used else wrong[0]
        raise ValueError(f"{given} is not an adapter that can be read here ({reason}): plain LoRA works")
    return values


def base_of(path: str, setting: str = "model.name_or_path") -> str:
    """The model that an adapter folder belongs to, as its configuration names it; any other path is returned as it is."""
    if not is_adapter(path):
        return path
    base = read_adapter_config(path, setting).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{setting}={path}: {CONFIG_FILE} does not name its model (base_model_name_or_path)")
    return base


def scale_of(config: Mapping[str, Any]) -> float:
    """The factor of ``B @ A``."""
    return config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])


def read_adapter_weights(folder: str | Path, setting: str) -> dict[str, torch.Tensor]:
    """``{layer}.lora_A.weight`` and ``.lora_B.weight`` in fp32, by the names of peft's files without their prefix."""
    try:
        found = load_file(Path(folder, WEIGHTS_FILE))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{setting}={folder}: {WEIGHTS_FILE} cannot be read ({first_line(error)})") from None
    bad = [name for name, tensor in found.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise ValueError(f"{setting}={folder}: {bad[0]} contains NaN or infinity; take another checkpoint")
    return {name.removeprefix(PREFIX): tensor.float() for name, tensor in found.items()}


@dataclass
class Adapter:
    """One adapter of a model: its matrices, which are read and written under the names that peft gives them.

    It holds the layers themselves: while a rollout has other modules in their places in the model, the matrices are found all the same.
    """

    layers: dict[str, nn.Module]
    """peft's layers by their names in the bare model."""
    config: dict[str, Any]
    """The content of ``adapter_config.json``."""
    name: str = TRAINED

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for layer_name, layer in self.layers.items():
            yield f"{layer_name}.lora_A.weight", layer.lora_A[self.name].weight
            yield f"{layer_name}.lora_B.weight", layer.lora_B[self.name].weight

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy the values of another adapter of the same shape; ValueError if its layers or shapes are others."""
        own = self.state_dict()
        if differing := sorted(own.keys() ^ state.keys()):
            raise ValueError(f"the adapters are on other layers, {differing[0]} is on one side only")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(f"{name} has shape {list(state[name].shape)}, expected {list(tensor.shape)}")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def read(self, folder: str | Path, setting: str) -> None:
        """Take the values of an adapter folder; ValueError, which begins with ``setting``, if they do not fit."""
        weights = read_adapter_weights(folder, setting)
        try:
            self.load_state_dict(weights)
        except ValueError as error:
            raise ValueError(f"{setting}={folder} does not fit the model: {error}") from None

    def save_pretrained(self, folder: str | Path, *, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write the two files that peft reads, with the given values or the current ones."""
        Path(folder, CONFIG_FILE).write_text(json.dumps(self.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        weights = {PREFIX + name: tensor.contiguous() for name, tensor in (state_dict or self.state_dict()).items()}
        save_file(weights, Path(folder, WEIGHTS_FILE), metadata={"format": "pt"})

    def frozen_copy(self) -> Adapter:
        """A second adapter of the same layers with the same values, which nothing trains; see :meth:`reference`."""
        for layer in self.layers.values():
            for matrices in (layer.lora_A, layer.lora_B):
                matrix = matrices[self.name]
                copied = nn.Linear(matrix.in_features, matrix.out_features, bias=False, device="meta")
                copied.weight = nn.Parameter(matrix.weight.detach().clone(), requires_grad=False)
                matrices[REFERENCE_ADAPTER] = copied
            layer.lora_dropout[REFERENCE_ADAPTER] = nn.Identity()
            layer.scaling[REFERENCE_ADAPTER] = layer.scaling[self.name]
        return Adapter(self.layers, self.config, REFERENCE_ADAPTER)

    @contextlib.contextmanager
    def switched_to(self, other: Adapter | None) -> Iterator[None]:
        """Inside the block the model computes with another adapter, or with none. No weight changes, nor which weights are trained."""
        # peft's own switches also set requires_grad, which DDP must not see change.
        try:
            for layer in self.layers.values():
                layer._disable_adapters, layer._active_adapter = other is None, other.name if other else self.name
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters, layer._active_adapter = False, self.name


def load_peft() -> ModuleType:
    """The package peft; ValueError, with the command that installs it, if it is missing."""
    return import_extra("peft", extra="lora", needed_by="LoRA")


def add_adapter(
    policy: Policy,
    settings: Mapping[str, Any],
    *,
    base: str,
    seed: int = 0,
    base_precision: str = "bf16",
    asked: str | None = None,
) -> Adapter:
    """Put an adapter into the policy's model, freeze everything else, and store the frozen weights in ``base_precision`` if that keeps
    the bits of the logits. ``policy.adapter`` holds it afterwards.

    Args:
        settings: of peft's ``LoraConfig``.
        base: the folder or Hub id of the model, for ``adapter_config.json``.
        seed: of the first matrices. No global random number is drawn.
        asked: what an error begins with; None: ``lora.target_modules`` and its value.

    Raises:
        ValueError: if peft is not installed, or if the settings name layers that the model does not have or that cannot be adapted.
    """
    peft, model = load_peft(), policy.model
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    if asked is None:
        asked = f"lora.target_modules={settings['target_modules']}"
        check_targets(model, settings["target_modules"], settings["r"])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it transposes the weights of Conv1D layers
        torch.default_generator.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model)
        except ValueError as error:
            raise ValueError(f"{asked}: {first_line(error)}") from None
    layers = {name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    for name, layer in layers.items():
        is_head = layer is model.get_output_embeddings()
        if is_head or not isinstance(layer.base_layer, (nn.Linear, Conv1D)):
            kind = "the head" if is_head else type(layer.base_layer).__name__
            raise ValueError(f"{asked}: {name} is {kind}, and only the linear layers before the head can have adapters")
        # The input stays in bf16 under autocast: peft would cast it to fp32, and autocast would cast it back.
        layer.cast_input_dtype_enabled = False
    model.requires_grad_(False)
    written = config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    written |= {"peft_type": "LORA", "target_modules": _short_names(model, layers)}
    written = {name: sorted(value) if isinstance(value, set) else value for name, value in written.items()}
    policy.adapter = Adapter(layers, written)
    for _, parameter in policy.adapter.named_parameters():
        parameter.requires_grad_(True)
    if base_precision == "bf16":
        with policy.inference():
            is_cast = cast_frozen_to_bf16(model, policy)
        if is_cast:
            use_half_linears(model)
    return policy.adapter


def read_adapter(
    policy: Policy, folder: str, *, setting: str, base: str, base_precision: str, dropout: float = 0.0
) -> Adapter:
    """:func:`add_adapter` with the settings, but for the dropout, and the values of a folder."""
    found = read_adapter_config(folder, setting)
    names = ("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules")
    names += ("layers_to_transform", "layers_pattern", "fan_in_fan_out")
    settings = {name: found[name] for name in names if found.get(name) is not None}
    asked = f"{setting}={folder}, an adapter of {found.get('base_model_name_or_path')}"
    options = dict(base=base, base_precision=base_precision, asked=asked)
    adapter = add_adapter(policy, settings | {"lora_dropout": dropout}, **options)
    adapter.read(folder, setting)
    return adapter


def _short_names(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
    """The ends of the layers' names where all layers that end so are adapted (``q_proj``), else the whole names."""
    ends = {name.rpartition(".")[2] for name in layers}
    inside = tuple(f"{name}." for name in layers)
    same_end = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if {n for n in same_end if not n.startswith(inside)} == layers.keys() else layers)


class HalfLinear(nn.Linear):
    """A frozen linear layer with weights in bf16. Without autocast it computes in the dtype of its input, as checks in fp32 need it."""

    def __init__(self, layer: nn.Linear):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def use_half_linears(model: nn.Module) -> None:
    """Replace each plain linear layer inside, whose weights are in bf16, by a :class:`HalfLinear` with its parameters."""
    children = [(parent, *named) for parent in model.modules() for named in parent.named_children()]
    for parent, name, child in children:
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
            setattr(parent, name, HalfLinear(child))


def adapted_base(layer: nn.Module) -> nn.Linear | None:
    """The frozen linear layer inside of one that has an adapter; None for every other module, and where the base is no ``nn.Linear``."""
    base = getattr(layer, "base_layer", None)
    return base if hasattr(layer, "lora_A") and isinstance(base, nn.Linear) else None


@torch.no_grad()
def effective_weight(layer: nn.Module) -> torch.Tensor:
    """``[out, in]`` the weight that a linear layer computes with. With an adapter ``W + scale * B @ A``, added up in fp32; without, ``W``."""
    base = adapted_base(layer)
    if base is None:
        return layer.weight.detach()
    a, b, scale = layer.lora_A[TRAINED].weight, layer.lora_B[TRAINED].weight, layer.scaling[TRAINED]
    with torch.autocast(a.device.type, enabled=False):
        return torch.addmm(base.weight.to(a.dtype), b, a, alpha=scale)
