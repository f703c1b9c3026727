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


def run(scenario: str, arguments: dict, folder: str) -> None:
    """In the fork: run the scenario, for at most 300 s; write ``output`` and ``returned`` into ``folder``."""
    signal.alarm(300)
    with Path(folder, "output").open("w+") as file:
        for number in (0, 1, 2):
            os.dup2(file.fileno(), number)
    open_streams()
    returned = getattr(scenarios, scenario)(**arguments)
    Path(folder, "returned").write_text(json.dumps(returned))


del os.environ["LD_PRELOAD"]  # the guard is for this process and its forks
for name in PRELOAD:
    importlib.import_module(name)
install()
scenarios = importlib.import_module("scenarios")
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        end_as_interpreter(functools.partial(run, *json.loads(line)))
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)  # an orderly end would take seconds
