"""A CUDA device that is emulated on the CPU: tensors say ``cuda:0`` and compute on the CPU, so that the trainer runs as if on a GPU.

It notices tensors of two devices in one operation, host-device synchronisations and where they come from, the kernel that attention would
choose, operations that are illegal while a graph is captured, graphs that read freed memory, operations that are refused in deterministic
mode. It counts kernels and the bytes of living tensors, and computes products in TF32 where PyTorch is told to. It says nothing about
time, real kernels, NCCL or the caching allocator.

A **scenario** is a function in a file beside the tests, which returns something that JSON can hold. It runs in a process of its own::

    # tests/cuda/scenarios.py
    def adds_up(count):
        return torch.ones(count, device="cuda").sum().item()

    # tests/cuda/test_something.py                   `gpu` is a fixture of tests/conftest.py
    def test_sum(gpu):
        report = gpu.run("scenarios.adds_up", count=3)
        assert report.returned == 3.0 and report.problems == [] and report.kernels == {"ones": 1, "sum": 1}

A scenario that raises makes ``run`` raise, with its output and traceback. By hand, from the checkout's root:
``PYTHONPATH=.:tests:tests/cuda python -m emulated_cuda scenarios.adds_up count=3`` prints output and report. In a scenario,
``from emulated_cuda.tensors import device`` gives what has been noticed so far (``device.forget()`` starts anew).

Parts: ``guard.cpp`` is what a CPU build of PyTorch lacks to accept CUDA tensors; it is compiled at first use (g++, 5 s) and kept in a
temporary folder. :mod:`~emulated_cuda.tensors` are the tensors and the notices, :mod:`~emulated_cuda.kernels` the operations that only
CUDA has, :mod:`~emulated_cuda.graphs` streams and graphs, :mod:`~emulated_cuda.install` puts it all in the place of ``torch.cuda``.
A process that loaded the guard, installed the device and imported the trainer is forked for each scenario (``__main__.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = Path(__file__).with_name("guard.cpp")
TORCH = Path(importlib.util.find_spec("torch").origin).parent  # not imported: the guard is loaded before torch


@dataclass
class Report:
    """What a scenario returned and printed, and what the device noticed meanwhile; see :class:`emulated_cuda.tensors.Device`."""

    returned: object = None
    output: str = ""
    problems: list[str] = field(default_factory=list)
    syncs: Counter = field(default_factory=Counter)
    kernels: Counter = field(default_factory=Counter)
    attention: Counter = field(default_factory=Counter)
    captured: list[int] = field(default_factory=list)
    replays: int = 0


class ScenarioFailed(AssertionError):
    """The scenario raised, ended its process or took too long."""


def why_impossible() -> str | None:
    """The reason why this machine cannot emulate a GPU, or None."""
    if shutil.which("g++") is None:
        return "needs g++ to compile the emulated device's guard"
    if not (TORCH / "include/c10").is_dir():
        return "needs the headers of PyTorch"
    return "needs a CPU build of PyTorch" if (TORCH / "lib/libtorch_cuda.so").exists() else None


def compiled_guard() -> Path:
    """The compiled ``guard.cpp`` for this PyTorch; compiled once, also if several processes ask at the same time."""
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(f"{version} {TORCH}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"emulated-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"guard-{key}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            libraries = [f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib", "-lc10", "-ltorch_cpu"]
            unfinished = library.with_suffix(".unfinished")
            flags = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-I{TORCH}/include"]
            subprocess.run(["g++", *flags, str(SOURCE), "-o", str(unfinished), *libraries], check=True)
            unfinished.rename(library)
    return library


class Emulator:
    """Runs scenarios, each in a fork of one process, which is started at first use.

    ``env``: additional environment variables of that process, for what PyTorch reads when it is loaded.
    """

    def __init__(self, env: dict[str, str] | None = None):
        self.env, self._server = env or {}, None

    def run(self, scenario: str, *, timeout: float = 300, **arguments) -> Report:
        """Run ``module.function`` with these arguments.

        Raises:
            ScenarioFailed: if it raises, exits, or takes more than ``timeout`` seconds.
        """
        if self._server is None:
            self._server = self._start()
        with tempfile.TemporaryDirectory() as folder:
            order = dict(scenario=scenario, arguments=arguments, timeout=timeout, folder=folder)
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            ending = self._server.stdout.readline().strip()
            printed = Path(folder, "output")
            output = printed.read_text(errors="replace") if printed.exists() else ""
            if ending != "0":
                raise ScenarioFailed(f"{scenario} ended with {ending or 'its server'}\n{output[-6000:]}")
            found = json.loads(Path(folder, "report").read_text())
        counters = {name: Counter(found.pop(name)) for name in ("syncs", "kernels", "attention")}
        return Report(output=output, **counters, **found)

    def close(self) -> None:
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.stdin.close()
            self._server.wait()

    def _start(self) -> subprocess.Popen:
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parents[1])))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path, **self.env}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return subprocess.Popen([sys.executable, "-m", "emulated_cuda", "--serve"], env=env, cwd=ROOT, **pipes)
