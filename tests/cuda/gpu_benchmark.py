"""Scenarios: ``benchmarks/gpu.py`` on the emulated device, whole and with planted mistakes."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu
import gpu_checks
import torch
from emulated_cuda.install import chosen_kernel
from emulated_cuda.tensors import device


def set_memory_fraction(fraction, _=None):
    device.memory_limit = fraction * device.memory_limit


def runs(folder, *arguments, mistake=None, only=()):
    gpu_checks.chosen_kernel = chosen_kernel
    torch.cuda.set_per_process_memory_fraction = set_memory_fraction
    if mistake:
        PLANT[mistake]()
    words = ["--shape", "small", "--no-figures", "--output", folder, *arguments]
    code = gpu.main([*words, *(word for name in only for word in ("--only", name))])
    results = json.loads((Path(folder) / ("gpu_part.json" if only else "gpu.json")).read_text())
    return {"code": code, "rows": {row["name"]: row for row in results["checks"]}}


PLANT = {}
