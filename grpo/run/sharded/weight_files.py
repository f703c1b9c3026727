"""The weights of a model folder or Hub id, read from its safetensors files one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils import cached_file

from grpo.system import first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """Fills the parameters of a model that are on the meta device."""

    def __init__(self, path: str, model: nn.Module, *, setting: str):
        """ValueError, which begins with ``setting``, unless the files hold every parameter of the model under its name and in its shape."""
        self.given = f"{setting}={path}"
        self.names: dict[nn.Parameter, list[str]] = {}
        """Of each parameter; a tied one has several names, of which the files may have any."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(parameter, []).append(name)
        self.files: dict[str, Path] = {}
        """Name of a tensor -> the file that holds it."""
        for file in _files_of(path, self.given):
            try:
                with safe_open(file, framework="pt") as opened:
                    self.files |= dict.fromkeys(opened.keys(), file)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self.given} cannot be loaded: {first_line(error)}") from None
        self._check()

    def fill(
        self, modules: Iterable[nn.Module], device: torch.device, dtype_of: Callable[[nn.Parameter], torch.dtype]
    ) -> None:
        """Give the modules' own meta parameters their values, on ``device``. A tied parameter stays one."""
        filled: dict[nn.Parameter, nn.Parameter] = {}
        for module in modules:
            for name, empty in module._parameters.items():
                if empty is None or not empty.is_meta:
                    continue
                if empty not in filled:
                    value = self._read(empty).to(device, dtype_of(empty))
                    filled[empty] = nn.Parameter(value, requires_grad=empty.requires_grad)
                module._parameters[name] = filled[empty]

    @torch.no_grad()
    def fill_buffers(self, model: nn.Module) -> None:
        """Give the buffers that a model folder holds their values, in place."""
        saved = model.state_dict().keys() & self.files.keys()
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.copy_(self._tensor(name))

    def _read(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._tensor(next(name for name in self.names[parameter] if name in self.files))

    def _tensor(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def _check(self) -> None:
        missing = [names[0] for names in self.names.values() if not any(name in self.files for name in names)]
        if missing:
            raise ValueError(
                f"{self.given}: the files lack {len(missing)} weights of the names that the model has, such as {sorted(missing)[0]}: "
                "runtime.parallel=fsdp reads weights by their names; from_pretrained(...).save_pretrained(FOLDER) writes them so"
            )
        for parameter, names in self.names.items():
            name = next(name for name in names if name in self.files)
            with safe_open(self.files[name], framework="pt") as opened:
                found = list(opened.get_slice(name).get_shape())
            if found != list(parameter.shape):
                problem = f"weights are not of the shape that config.json asks for, such as {name}"
                raise ValueError(f"{self.given}: {problem}: {found}, expected {list(parameter.shape)}")


def _files_of(path: str, given: str) -> list[Path]:
    """The safetensors files of a folder or of the Hub's cache."""
    options = dict(_raise_exceptions_for_missing_entries=False)
    try:
        index = cached_file(path, INDEX, **options)
        if index is not None:
            listed = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
            return [Path(cached_file(path, name)) for name in dict.fromkeys(listed)]
        single = cached_file(path, SINGLE, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{given} cannot be loaded: {first_line(error)}") from None
    if single is None:
        raise ValueError(
            f"{given} has no {SINGLE}: runtime.parallel=fsdp reads safetensors only; "
            "from_pretrained(...).save_pretrained(FOLDER) writes them"
        )
    return [Path(single)]
