"""Scenarios: ``benchmarks/gpu.py`` on the emulated device, sound and with planted mistakes."""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from emulated_cuda.install import chosen_kernel
from emulated_cuda.tensors import device

from grpo.attention import packed
from grpo.rollout import engine as engine_module
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.static_batch import StaticCache
from grpo.rollout.weights import FusedLinear
from grpo.run import checkpoint
from grpo.run.memory import largest_step

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
gpu, gpu_checks, gpu_common = (importlib.import_module(name) for name in ("gpu", "gpu_checks", "gpu_common"))


def runs(folder, *, only, mistake=None, arguments=("--shape", "small", "--no-figures")):
    """The command's exit code, and the row of each check and figure by its name."""
    gpu_checks.chosen_kernel = chosen_kernel
    torch.cuda.set_per_process_memory_fraction = set_memory_fraction
    if mistake:
        MISTAKES[mistake]()
    words = [word for name in only for word in ("--only", name)]
    code = gpu.main([*arguments, "--output", folder, *words])
    results = json.loads((Path(folder) / ("gpu_part.json" if only else "gpu.json")).read_text())
    rows = {row["name"]: row for row in [*results["checks"], *results["figures"]]}
    return {"code": code, "rows": rows}


def set_memory_fraction(fraction, _=None):
    device.memory_limit = int(fraction * device.memory_limit)


# --- mistakes. The engine's own check of its graphs is switched off with them, so that those of the command stand alone.


def trust_graphs():
    engine_module.agrees_with_loop = lambda *_: True


def wrong_positions():
    """Captured steps rotate queries and keys as if every token stood one place further."""
    trust_graphs()
    decode = LlamaDecoder.__call__

    def moved(self, token_R, positions_R, cache):
        return decode(self, token_R, positions_R + isinstance(cache, StaticCache), cache)

    LlamaDecoder.__call__ = moved


def stale_weights():
    """Graphs keep reading the copies of the first weights."""
    trust_graphs()
    FusedLinear.refresh = lambda self: None


def other_scale():
    """Attention over packed rows has 1.05 times its scale."""
    attention = packed.packed_attention
    packed.packed_attention = lambda q, k, v, layout, scaling: attention(q, k, v, layout, 1.05 * q.shape[-1] ** -0.5)


def silent_fallback():
    """Graphs are off, and nothing says so."""
    engine_module.BuiltinEngine._replay = lambda *_: None


def wrong_kernel():
    """An attention kernel whose output is 3% too large if a backward pass is to follow."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def wrong(query, *inputs, **options):
        return attention(query, *inputs, **options) * (1.03 if query.requires_grad else 1.0)

    torch.nn.functional.scaled_dot_product_attention = wrong


def shared_save():
    """A save in the background writes tensors that training changes."""
    checkpoint.Trained.on_host = lambda self: (self.weights(), self.states())


def forgets_averages():
    """A continued run begins with new averages in its optimizer."""
    restore = checkpoint.restore

    def forgetful(folder, model, optimizer, reference):
        restore(folder, model, optimizer, reference)
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    checkpoint.restore = forgetful


def short_rehearsal():
    """The memory rehearsal leaves out the update."""
    largest_step._update = lambda *_, **__: None


MISTAKES = {f.__name__: f for f in (
    wrong_positions, stale_weights, other_scale, silent_fallback, wrong_kernel, shared_save, forgets_averages, short_rehearsal,
)}  # fmt: skip


# --- the command itself


def goes_on(folder):
    """Checks that crash, hang, end their process or pass, and a figure after the time is used up."""

    def crashes(bench):
        """a"""
        os.kill(os.getpid(), signal.SIGSEGV)

    def hangs(bench):
        """b"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    def raises(bench):
        """c"""
        raise RuntimeError("the reason")

    def is_left_out(bench):
        """d"""
        raise gpu_common.NotRun("no pydantic")

    def passes(bench):
        """e"""
        return {"number": 1.5}

    gpu.CHECKS[:], gpu.FIGURES[:] = [], []
    for function in (crashes, hangs, raises, is_left_out, passes):
        gpu_common.check(4)(function)
    gpu_common.figure(60)(hangs)
    gpu_common.figure(60)(passes)
    return runs(folder, only=(), arguments=("--shape", "small", "--seconds", "15"))
