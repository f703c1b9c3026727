"""Scenarios: ``benchmarks/gpu.py`` on the emulated device, sound and with planted mistakes."""

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from emulated_cuda.install import chosen_kernel
from emulated_cuda.tensors import device

from grpo.attention import packed
from grpo.checkpoint import format as checkpoint
from grpo.rollout import engine as engine_module
from grpo.rollout.cuda_graphs import CUDAGraphRunner, FixedWidthCache
from grpo.rollout.engine import BuiltinEngine
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.weights import copies_of, in_place_of
from grpo.run import memory

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
gpu, checks = (importlib.import_module(name) for name in ("gpu", "gpu_checks"))


def runs(folder, *, only=(), mistake=None, arguments=("--shape", "small", "--no-figures")):
    """The command's exit code, and the row of each check and figure by its name."""
    torch._fused_sdp_choice = lambda *x, **options: ["math", "flash", "efficient"].index(chosen_kernel(*x, **options))
    limit = device.memory_limit
    torch.cuda.set_per_process_memory_fraction = lambda part: setattr(device, "memory_limit", int(part * limit))
    plant(mistake)
    code = gpu.main([*arguments, "--output", folder, *(word for name in only for word in ("--only", name))])
    (path,) = Path(folder).glob("gpu*.json")
    return {"code": code, "rows": {row["name"]: row for row in json.loads(path.read_text())["rows"]}}


def plant(mistake):
    match mistake:
        case "wrong_positions":  # captured steps rotate as if every token stood one place further, and are not checked
            CUDAGraphRunner._check = lambda _, replay, *__: replay()
            decode = LlamaDecoder.__call__
            LlamaDecoder.__call__ = lambda self, token_R, positions_R, cache: decode(
                self, token_R, positions_R + isinstance(cache, FixedWidthCache), cache
            )
        case "copied_once":  # graphs compute from the first copies of the weights
            kept, copied, generate = {}, engine_module.copied_weights, BuiltinEngine.generate

            def first_copies(model, precision):
                return in_place_of(model, kept.setdefault(model, copies_of(list(model.modules()), precision)))

            def generate_from_first(self, *arguments, **options):
                engine_module.copied_weights = first_copies if self.cuda_graphs else copied
                return generate(self, *arguments, **options)

            BuiltinEngine.generate = generate_from_first
        case "silent_fallback":  # graphs are off, and nothing says so
            BuiltinEngine._replay = lambda *_: None
        case "other_scale":  # attention over packed rows has 1.05 times its scale
            attention = packed.packed_attention
            packed.packed_attention = lambda q, k, v, layout, s: attention(q, k, v, layout, 1.05 * q.shape[-1] ** -0.5)
        case "wrong_kernel":  # the output is 3% too large if a backward pass is to follow
            sdpa = F.scaled_dot_product_attention
            F.scaled_dot_product_attention = lambda q, *more, **o: (
                sdpa(q, *more, **o) * (1.03 if q.requires_grad else 1)
            )
        case "forgets_averages":  # a continued run begins with new averages in its optimizer
            restore = checkpoint.restore

            def forgetful(folder, model, optimizer, reference):
                restore(folder, model, optimizer, reference)
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()

            checkpoint.restore = forgetful
        case "short_rehearsal":  # the try of the largest step leaves out the update
            memory._update = lambda *_, **__: None


def goes_on(folder, *, limit_s, arguments):
    """Checks that crash, hang, raise, are left out or pass, and a figure that hangs before the time is used up."""
    crashes = checks.named("crashes", "a", lambda bench: os.kill(os.getpid(), signal.SIGSEGV))
    hangs = checks.named("hangs", "b", lambda bench: time.sleep(60))
    raises = checks.named("raises", "c", lambda bench: {}["reason"])
    is_left_out = checks.named("is_left_out", "d", lambda bench: bench.need("an abacus"))
    passes = checks.named("passes", "e", lambda bench: {"number": 1.5})
    gpu.LIMIT_S, gpu.FIGURES = limit_s, [passes]
    gpu.GROUPS = {"first": [crashes, hangs, raises, is_left_out, passes], "rest": [hangs, passes]}
    return runs(folder, arguments=("--shape", "small", *arguments))
