"""A model whose weights are not there yet: its modules and buffers are real, its parameters on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from grpo.system import first_line


def model_without_weights(
    path: str, *, device: torch.device, attn_implementation: str, trust_remote_code: bool, setting: str
) -> PreTrainedModel:
    """The model of a folder or Hub id in fp32, its parameters on the meta device and its buffers on ``device``.

    ValueError, which begins with ``setting``, if transformers cannot build it.
    """
    options = dict(trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(path, **options)
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attn_implementation, **options
            )
    except Exception as error:  # as in load_policy
        if "scaled_dot_product_attention" in str(error):
            kind = f"{str(error).split()[0]} has no attention of the name sdpa"
            raise ValueError(f"{setting}={path}: {kind}: set model.attn_implementation=eager") from None
        raise ValueError(f"{setting}={path} cannot be loaded: {first_line(error)}") from None
    with contextlib.suppress(OSError):  # not every model has the file
        model.generation_config = GenerationConfig.from_pretrained(path)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model.eval()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside the block every parameter that a module registers goes to the meta device; one that is there already stays itself (tying)."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that the model's hidden states pass through: of its lists of modules the one with the most parameters.

    ValueError if it has none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers: set runtime.parallel=ddp")
    return list(max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters())))
