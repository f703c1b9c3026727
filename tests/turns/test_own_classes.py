"""Scripts whose rewards, tools and environments use classes of the script, or hold what no worker can have."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import environment_of_runs

SCRIPT = Path(__file__).parent / "own_classes.py"
HERE = "runs in this process, where a hang cannot end: it cannot be sent to a worker process"


def run_script(*arguments) -> list[str]:
    """The lines that the script prints, as ``__main__`` of a process of its own."""
    environment = environment_of_runs({"PYTHONPATH": os.pathsep.join(sys.path)})
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_rewards_use_classes_of_the_script():
    """A pydantic model, an Enum and a generic class; members of the Enum in a column are those of the function."""
    first, second, *notes = run_script("score")
    assert first == second == "[[3.0, 1.0], [-1.0, -1.0], [3.0, 1.0]] [0, 0] {}"
    assert notes == [f"note: reward 'python:judge_here' {HERE} (TypeError: cannot pickle '_thread.lock' object)"]


def test_tools_and_environments_use_classes_of_the_script(random_model):
    """They run in workers alone: one that holds a connection of the script is refused."""
    answers, refused = run_script("converse", random_model)
    assert answers == "['1', 'Ann 5 GOOD', '2'] [[7.0, 7.0]]"
    assert refused == "tool 'python:capital': TypeError: cannot pickle 'sqlite3.Connection' object"
