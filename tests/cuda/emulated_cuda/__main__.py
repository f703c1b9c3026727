"""The process that :class:`emulated_cuda.Emulator` starts: it has imported the trainer, and forks for scenarios."""

import functools
import importlib
import json
import os
import signal
import sys
from pathlib import Path

from processes import PRELOAD, end_as_interpreter, open_streams

from emulated_cuda.install import install
from emulated_cuda.tensors import device


def run(scenario: str, arguments: dict, folder: str) -> None:
    """In the fork: run the scenario, for at most 300 s; write ``output`` and ``report`` into ``folder``."""
    signal.alarm(300)
    opened = os.open(Path(folder, "output"), os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for number in (0, 1, 2):
        os.dup2(opened, number)
    open_streams()
    module, _, function = scenario.rpartition(".")
    returned = getattr(importlib.import_module(module), function)(**arguments)
    noticed = {name: getattr(device, name) for name in ("problems", "captured", "replays")}
    Path(folder, "report").write_text(json.dumps({"returned": returned} | noticed))


del os.environ["LD_PRELOAD"]  # the guard is for this process and its forks
for name in PRELOAD:
    importlib.import_module(name)
install()
for line in sys.stdin:
    if (child := os.fork()) == 0:
        end_as_interpreter(functools.partial(run, *json.loads(line)))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)  # an orderly end would take seconds
