"""A process with the emulated device, which runs one scenario and writes what it returns."""

import importlib
import json
import os
import sys
from pathlib import Path

from emulated_cuda.install import install

del os.environ["LD_PRELOAD"]  # the guard is for this process and its forks
install()
scenarios = importlib.import_module("scenarios")
scenario, arguments, file = sys.argv[1:]
returned = getattr(scenarios, scenario)(**json.loads(arguments))
Path(file).write_text(json.dumps(returned))
sys.stdout.flush()
os._exit(0)  # an orderly end would take seconds
