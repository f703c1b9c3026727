"""``python -m emulated_cuda module.function name=value ...``: run one scenario. With ``--serve``: the process behind ``Emulator``."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from emulated_cuda import Emulator, compiled_guard

PRELOAD = ("train_grpo", "pandas", "pyarrow.parquet", "transformers.models.auto.modeling_auto", "grpo.tasks.tiny")
"""Imported once, before scenarios: they would take most of a scenario's time."""


def serve() -> None:
    """Read orders from stdin; run each in a fork; write how it ended to stdout: its exit code, or ``timeout``."""
    orders, endings = sys.stdin, os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ctypes.CDLL(str(compiled_guard()), os.RTLD_GLOBAL | os.RTLD_NOW)  # before torch, which then finds its symbols first
    for module in PRELOAD:
        importlib.import_module(module)
    from emulated_cuda.install import install

    install()
    for line in orders:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            run(**order)
        endings.write(f"{_wait(child, order['timeout'])}\n")
    os._exit(0)  # an orderly end would take seconds


def _wait(child: int, timeout: float) -> str:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def run(scenario: str, arguments: dict, folder: str, timeout: float) -> None:
    """In the fork: run the scenario, write ``output`` and ``report`` into ``folder``, end."""
    from emulated_cuda.tensors import device

    opened = os.open(Path(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    code = 1
    try:
        module, _, function = scenario.rpartition(".")
        returned = getattr(importlib.import_module(module), function)(**arguments)
        if device.pools_in_use:
            device.problem("new memory still comes from the pool of a graph whose capture failed")
        names = ("problems", "syncs", "kernels", "attention", "captured", "replays")
        Path(folder, "report").write_text(
            json.dumps({"returned": returned} | {name: getattr(device, name) for name in names})
        )
        code = 0
    except BaseException:
        traceback.print_exc()
        print("problems:", *device.problems, sep="\n  ")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(scenario: str, *words: str) -> None:
    """Run a scenario by hand; values are JSON or else strings."""

    def value(text: str):
        try:
            return json.loads(text)
        except ValueError:
            return text

    arguments = {name: value(text) for name, _, text in (word.partition("=") for word in words)}
    emulator = Emulator()
    report = emulator.run(scenario, timeout=3600, **arguments)
    emulator.close()
    print(report.output)
    for name, found in vars(report).items():
        if name != "output":
            rows = [f"{count} {what}" for what, count in found.most_common()] if hasattr(found, "most_common") else None
            print(f"{name}:", *(rows or [found]), sep="\n  ")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main(*sys.argv[1:])
