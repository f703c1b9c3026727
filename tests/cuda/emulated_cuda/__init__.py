"""A CUDA device that is emulated on the CPU: tensors say ``cuda:0`` and compute on the CPU.

The trainer runs on it as on a GPU. It refuses tensors of two devices in one operation, host syncs
while a graph is captured, and graphs that read freed memory. It says nothing about time, real
kernels, NCCL or the caching allocator.

A **scenario** is a function in ``scenarios.py`` beside the tests, with arguments and a result that
JSON can hold. It runs in a process of its own. ``gpu``, a fixture of ``tests/conftest.py``, returns
the result and what was printed::

    returned, output = gpu.run("trains", folder=str(tmp_path), settings=[])

``guard.cpp`` is what a CPU build of PyTorch lacks to accept CUDA tensors.
:mod:`~emulated_cuda.tensors` has the tensors, :mod:`~emulated_cuda.graphs` streams and graphs;
:mod:`~emulated_cuda.install` puts them in the place of ``torch.cuda``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def why_impossible() -> str | None:
    """The reason why this machine cannot emulate a GPU, or None."""
    if shutil.which("g++") is None:
        return "needs g++ to compile the emulated device's guard"
    return "needs a CPU build of PyTorch" if torch.version.cuda or torch.version.hip else None


def compiled_guard() -> Path:
    """The library of ``guard.cpp`` for this version of PyTorch; compiled at first use."""
    source = HERE / "guard.cpp"
    library = HERE / "__pycache__" / f"guard-{torch.__version__}-{source.stat().st_mtime_ns}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        folder = Path(torch.__file__).parent
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = (
            f"g++ -O1 -std=c++20 -shared -fPIC {source} -o {unfinished} -I{folder}/include "
            f"-L{folder}/lib -Wl,-rpath,{folder}/lib -lc10 -ltorch_cpu"
        )
        subprocess.run(command.split(), check=True)
        unfinished.rename(library)
    return library


def run(scenario: str, **arguments) -> tuple[object, str]:
    """Run a scenario with these arguments. AssertionError, with its output, if it fails."""
    env = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONPATH=f"{ROOT}:{ROOT}/tests:{HERE.parent}",
        LD_PRELOAD=str(compiled_guard()),
    )
    with tempfile.TemporaryDirectory() as folder:
        returned = Path(folder, "returned")
        done = subprocess.run(
            [sys.executable, "-m", "emulated_cuda", scenario, json.dumps(arguments), returned],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return json.loads(returned.read_text()), done.stdout
