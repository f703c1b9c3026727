"""The parts of a decode step between its matrix products: each is one kernel where PyTorch can compile it, several otherwise.

In CUDA graphs the number of kernels decides how long a step of few rows takes. The compiled parts need a GPU and Triton. They have never
run on a GPU; on the CPU they are tested with PyTorch's C++ backend.

Shapes: ``R`` rows, ``H`` hidden size (in ``gated``: of the MLP), ``A`` query and key heads, ``D`` head size, ``P`` and ``C`` tokens of a
prompt and own tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._triton import has_triton

from grpo.system import first_line


class Pieces:
    """The parts as plain PyTorch."""

    @staticmethod
    def add_norm(x_RH, change_RH, weight_H, epsilon: float, dtype: torch.dtype | None):
        """``x + change`` (None: 0), and its RMSNorm in ``dtype`` (None: as the norm computes it)."""
        x_RH = x_RH if change_RH is None else x_RH + change_RH
        normed_RH = torch.rms_norm(x_RH.to(weight_H.dtype), weight_H.shape, weight_H, epsilon)
        return x_RH, normed_RH if dtype is None else normed_RH.to(dtype)

    @staticmethod
    def rotate(x_RAD, cos_R1D, signed_sin_R1D, dtype: torch.dtype):
        """Rotary embedding. The first half of the sine has its sign flipped: ``rotate_half(x) * sin == roll(x) * signed_sin``."""
        return torch.addcmul(x_RAD * cos_R1D, x_RAD.roll(x_RAD.shape[-1] // 2, dims=-1), signed_sin_R1D).to(dtype)

    @staticmethod
    def gated(activation, gate_up_RH):
        """``activation(gate) * up``."""
        gate_RH, up_RH = gate_up_RH.chunk(2, dim=-1)
        return activation(gate_RH) * up_RH

    @staticmethod
    def weights(from_prompt_RKgP, from_own_RKgC, bias_R11S, scaling: float, dtype: torch.dtype):
        """Softmax of the scaled scores of prompt and own tokens, beside each other; the bias is -inf at padding."""
        scores_RKgS = torch.cat([from_prompt_RKgP, from_own_RKgC], dim=-1)
        return torch.add(bias_R11S, scores_RKgS, alpha=scaling).softmax(dim=-1).to(dtype)


class CompiledPieces(Pieces):
    """The parts compiled, for shapes that may differ from call to call."""

    def __init__(self):
        for name in ("add_norm", "rotate", "gated", "weights"):
            setattr(self, name, torch.compile(getattr(Pieces, name), dynamic=True))


def pieces_for(device: torch.device, say: Callable[[str], None]) -> Pieces:
    """Compiled parts, if the device is a GPU, Triton is there, and they compute what plain PyTorch computes; else the plain ones."""
    if device.type != "cuda" or not has_triton():
        return Pieces()
    try:
        compiled = CompiledPieces()
        check(compiled, device)
    except Exception as error:  # the compiler is not ours
        say(f"note: parts of decode steps are not compiled ({first_line(error)})")
        return Pieces()
    return compiled


def check(compiled: Pieces, device: torch.device) -> None:
    """Compute each part with two shapes by ``compiled`` and plainly. ValueError if they differ."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        _check(compiled, Pieces(), device)


def _check(compiled: Pieces, plain: Pieces, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(0)
    weight_H = torch.nn.Parameter(torch.linspace(0.5, 1.5, 64, device=device))
    for R in (3, 6):
        shapes = (R, 64), (R, 64), (R, 6, 16), (R, 2, 3, 40)
        x_RH, change_RH, heads_RAD, scores = (torch.randn(s, generator=generator, device=device) for s in shapes)
        cos_R1D, sin_R1D = heads_RAD[:, :1], heads_RAD[:, 1:2]
        change_RH, heads_RAD = change_RH.bfloat16(), heads_RAD.bfloat16()  # outputs of products, as when decoding
        bias = torch.zeros(R, 1, 1, 60, device=device)
        calls = [("add_norm", (x_RH, delta, weight_H, 1e-6, torch.bfloat16)) for delta in (None, change_RH)]
        calls += [("rotate", (heads_RAD, cos_R1D, sin_R1D, torch.bfloat16))]
        calls += [("gated", (torch.nn.functional.silu, x_RH))]
        calls += [("weights", (scores, scores[..., :20] * 0.5, bias, 0.125, torch.bfloat16))]
        for name, arguments in calls:
            found, expected = (getattr(pieces, name)(*arguments) for pieces in (compiled, plain))
            for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
                if one.dtype != other.dtype or not torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-5):
                    raise ValueError(f"compiled, {name} gives other numbers")
