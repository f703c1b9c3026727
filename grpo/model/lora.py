"""LoRA adapters, which peft makes, loads, switches and writes.

peft puts its layers into the model in place, and ``policy.adapter`` is peft's wrapper of that
model. An adapted linear layer computes ``base(x) + scale * B(A(x))``; ``A`` is ``[rank, in]`` and
``B`` is ``[out, rank]``. Sampling, and the reference of the KL, rely on this formula.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from grpo.algorithm.logprobs import CompletionScorer
from grpo.distributed import reshard
from grpo.model.policy import Policy, as_value_error, check_finite
from grpo.system import import_extra

TRAINED_ADAPTER = "default"
REFERENCE_ADAPTER = "reference"
"""Name, in peft's layers, of the frozen adapter that is the reference of the KL. The name above is
that of the trained adapter."""
PLAIN_LORA_FIELDS = {
    # kind of the adapter, and its base model
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode",
    # the product B @ A and its scale
    "r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern",
    "fan_in_fan_out",
    # the adapted layers
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
}  # fmt: skip
"""Fields of peft's ``LoraConfig`` that may have any value. Whatever the value, an adapted layer has
the weight ``W + scale * B @ A``."""


def is_adapter(path: str | Path) -> bool:
    """True if ``path`` is a folder that holds an adapter in the form that peft writes."""
    return Path(path, "adapter_config.json").is_file()


def load_peft() -> ModuleType:
    """Return the package peft.

    Raises:
        ValueError: if peft is missing, with the command that installs it.
    """
    return import_extra("peft", extra="lora", needed_by="LoRA")


def read_adapter_config(folder: str | Path) -> Any:
    """Return peft's configuration of an adapter folder.

    Raises:
        ValueError: if it cannot be read.
    """
    peft = load_peft()
    with as_value_error(f"{folder} cannot be loaded"):
        return peft.PeftConfig.from_pretrained(str(folder))


def base_of(path: str) -> str:
    """Folder or Hub id of the base model if ``path`` is the folder of an adapter; else ``path``."""
    if not is_adapter(path):
        return path
    return read_adapter_config(path).base_model_name_or_path


def add_adapter(
    policy: Policy,
    settings: Mapping[str, Any],
    *,
    base: str,
    seed: int = 0,
) -> None:
    """Put a new adapter into the policy's model as ``policy.adapter``, and freeze everything else.

    Args:
        settings: arguments of peft's ``LoraConfig``.
        base: folder or Hub id of the base model, for ``adapter_config.json``.
        seed: seed of the adapter's initial values. The global random generators do not advance.

    Raises:
        ValueError: if ``target_modules`` names layers that are missing or not linear.
    """
    targets = settings["target_modules"]
    has_experts = any(p.dim() == 3 for p in policy.model.parameters())
    if targets == "all-linear" and has_experts:
        # With all-linear, peft would also adapt the experts and routers of a mixture of experts.
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = load_peft().LoraConfig(task_type="CAUSAL_LM", **settings)
    config.target_modules = targets
    _inject(policy, config, base, seed)

    # peft notices a wrong name only if all names are wrong. If targets is a string, it is a regular
    # expression or a word such as all-linear.
    if isinstance(targets, list):
        adapted = policy.adapter.base_model.targeted_module_names
        for target in targets:
            suffix = f".{target}"
            if not any(f".{name}".endswith(suffix) for name in adapted):
                raise ValueError(f"lora.target_modules={targets}: no layer has the name {target}")


def read_adapter(
    policy: Policy,
    folder: str,
    *,
    base: str,
    dropout: float = 0.0,
) -> None:
    """Load the adapter of a folder into the policy's model as ``policy.adapter``.

    Args:
        base: folder or Hub id of the base model, for ``adapter_config.json``.
        dropout: probability of dropout, which replaces the adapter's setting.

    Raises:
        ValueError: unless the adapter is plain LoRA: the weight is ``W + scale * B @ A``, with
            ``W`` of the base model. The sampler and the reference of the KL rely on this formula.
            DoRA and trained biases add other terms, and PiSSA and OLoRA change ``W``.
    """
    config = read_adapter_config(folder)
    defaults = load_peft().LoraConfig()
    for name, value in vars(config).items():
        is_default = not value or value == getattr(defaults, name, None)
        # "gaussian" is a value of init_lora_weights. It changes the initial values of the adapter,
        # not W.
        if not is_default and name not in PLAIN_LORA_FIELDS and value != "gaussian":
            raise ValueError(
                f"{folder} is not plain LoRA ({name}): merge it into its model with peft"
            )
    config.lora_dropout = dropout
    # The configuration that peft has saved says that the adapter is for inference, so peft would
    # freeze it.
    config.inference_mode = False
    _inject(policy, config, base, seed=0)
    read_values(policy, folder)


def read_values(policy: Policy, folder: str | Path) -> None:
    """Load the adapter weights of a folder into the trained adapter.

    Raises:
        ValueError: if the weights do not fit the model or are not finite.
    """
    with as_value_error(f"{folder} cannot be loaded"):
        report = policy.adapter.load_adapter(
            str(folder),
            TRAINED_ADAPTER,
            is_trainable=True,
            torch_device=str(policy.device),
        )
    # peft raises nothing for keys that are missing or unexpected: it only reports them.
    mismatches = report.missing_keys + report.unexpected_keys
    if mismatches:
        raise ValueError(f"{folder} does not fit the model: {mismatches[0]} is on one side only")
    check_finite(policy.model, folder)


def _inject(policy: Policy, config: Any, base: str, seed: int) -> None:
    """Let peft put its layers into the policy's model.

    Raises:
        ValueError: if peft rejects the configuration, or adapts the head or a layer that is not
            linear.
    """
    peft = load_peft()
    model = policy.model
    # Gradient checkpointing has registered hooks that make embeddings require a gradient, though
    # non-reentrant checkpointing does not need them. If peft registered such hooks again,
    # transformers could not remove the first ones.
    model.disable_input_require_grads()
    with (
        # The initial values do not depend on earlier random draws, and do not change later ones.
        torch.random.fork_rng(devices=[]),
        # peft calls functions that transformers has deprecated.
        warnings.catch_warnings(action="ignore", category=FutureWarning),
        as_value_error(f"lora.target_modules={config.target_modules}"),
    ):
        torch.default_generator.manual_seed(seed)
        policy.adapter = peft.get_peft_model(model, config)
    model.disable_input_require_grads()
    config.base_model_name_or_path = base
    if isinstance(config.target_modules, set):
        # The order of a set differs from process to process, and with it the files would differ.
        config.target_modules = sorted(config.target_modules)

    for name, layer in model.named_modules():
        if not isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
            continue
        # The input stays in bf16 under autocast: peft would cast it to fp32, and autocast would
        # cast it back.
        layer.cast_input_dtype_enabled = False
        is_linear = isinstance(layer.get_base_layer(), nn.Linear | Conv1D)
        # Log-probs are computed in chunks from the head's plain weight, so an adapter of the head
        # would have no effect.
        if layer is model.get_output_embeddings() or not is_linear:
            raise ValueError(
                f"lora.target_modules would adapt {name}: name linear layers before the head, "
                "of a mixture of experts those of attention"
            )


def adapter_parameters(model: nn.Module, name: str = TRAINED_ADAPTER) -> dict[str, nn.Parameter]:
    """Matrices A and B of the adapter called ``name``, by their names in the model."""
    suffixes = (f".lora_A.{name}.weight", f".lora_B.{name}.weight")
    return {
        full_name: parameter
        for full_name, parameter in model.named_parameters()
        if full_name.endswith(suffixes)
    }


def add_reference_adapter(policy: Policy) -> None:
    """Add a frozen copy of the trained adapter, for :class:`AdapterReference`."""
    # peft draws initial values, which are overwritten below.
    with torch.random.fork_rng(devices=[]):
        policy.adapter.add_adapter(REFERENCE_ADAPTER, policy.adapter.peft_config[TRAINED_ADAPTER])
    policy.adapter.set_adapter(TRAINED_ADAPTER)
    copy_to_reference_adapter(policy.model)


@torch.no_grad()
def copy_to_reference_adapter(model: nn.Module) -> None:
    """Copy the values of the trained adapter into the frozen reference adapter, in place."""
    trained = adapter_parameters(model).values()
    frozen = adapter_parameters(model, REFERENCE_ADAPTER).values()
    for old, new in zip(frozen, trained, strict=True):
        old.copy_(new)


class AdapterReference:
    """Reference of the KL that needs no second model in memory.

    It is the policy's model, with the trained adapter switched off or replaced by a frozen adapter.
    It is called like a :class:`grpo.algorithm.logprobs.CompletionScorer`, between updates, and
    computes no gradients.
    """

    def __init__(self, policy: Policy, scorer: CompletionScorer):
        """``scorer`` is the policy's scorer, which FSDP may have sharded."""
        self.policy = policy
        self.scorer = scorer
        self.model = policy.model

    @property
    def is_packed(self) -> bool:
        return self.scorer.is_packed

    @torch.no_grad()
    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        adapter = self.policy.adapter
        was_training = self.model.training
        # In train mode the adapter's dropout would make the reference random.
        self.model.eval()
        try:
            if REFERENCE_ADAPTER in adapter.peft_config:
                adapter.set_adapter(REFERENCE_ADAPTER, inference_mode=True)
            else:
                adapter.base_model.disable_adapter_layers()
            return self.scorer(*inputs)
        finally:
            # set_adapter() marks parameters as trained. Under FSDP it must mark the shards, which
            # the optimizer holds, not the gathered weights of the forward pass.
            reshard(self.scorer)
            adapter.base_model.enable_adapter_layers()
            adapter.set_adapter(TRAINED_ADAPTER)
            # set_adapter() marks the whole adapter, also in a vision tower, for whose gradients DDP
            # would wait forever.
            for parameter in self.policy.unused_by_text.values():
                parameter.requires_grad_(False)
            self.model.train(was_training)


def adapted_base(layer: nn.Module) -> nn.Linear | None:
    """The frozen ``nn.Linear`` inside of a layer that peft has adapted; None for any other
    module."""
    base = getattr(layer, "base_layer", None)
    if isinstance(base, nn.Linear) and hasattr(layer, "lora_A"):
        return base
    return None


@torch.no_grad()
def effective_weight(layer: nn.Module) -> torch.Tensor:
    """Weight ``[out, in]`` of a linear layer. For a layer with an adapter this is the sum ``W +
    scale * B @ A``, in fp32."""
    base = adapted_base(layer)
    if base is None:
        return layer.weight.detach()
    a = layer.lora_A[TRAINED_ADAPTER].weight
    b = layer.lora_B[TRAINED_ADAPTER].weight
    # Autocast would multiply in bf16 and round the adapter's small change away.
    with torch.autocast(a.device.type, enabled=False):
        weight = base.weight.to(a.dtype)
        return torch.addmm(weight, b, a, alpha=layer.scaling[TRAINED_ADAPTER])
