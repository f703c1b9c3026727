"""Scripts whose rewards, tools and environments use classes of the script, or hold what no worker can have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
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
    assert first == second == "[[3.0, 1.0, 1.0], [-1.0, -1.0, 1.0], [3.0, 1.0, 1.0]] [0, 0, 0] {}"
    assert notes == [
        f"note: reward 'python:judge_here' {HERE} (TypeError: cannot pickle '_thread.lock' object)",
        f"note: reward 'python:refuses' {HERE} (RuntimeError: only in the process that made it)",
    ]


@pytest.mark.parametrize("how", ["converse", pytest.param("in a loop", marks=pytest.mark.slow)])
def test_tools_and_environments_use_classes_and_connections_of_the_script(how, random_model):
    """A connection of sqlite3 refuses other threads than the one that made it. A notebook runs in an event loop."""
    tools, again, game, query, scores, *notes = run_script(how, random_model)
    answers = "['Ann 3 GOOD', 'Lima', 'Oslo 0.566 0.520', \"{'error': 'cannot unpack non-iterable NoneType object'}\"]"
    assert tools == f"{answers} [False, False, False, True]"
    assert again != tools and again.startswith("['Ann 3 GOOD', 'Lima', 'Oslo 0."), "other random numbers"
    assert game == "['1', 'Lima', '2', 'Ann 5 GOOD'] 7.0"
    assert query.endswith("'Ann 5 GOOD'] 2.0") and query.startswith("['Lima', 'Oslo', ")
    assert scores == "[[7.0, 7.0, None], [2.0, None, 2.0]]", "look runs in a worker for one row, and here for the other"
    connection = "TypeError: cannot pickle 'sqlite3.Connection' object"
    assert notes == [
        f"note: tool 'python:capital' {HERE} ({connection})",
        f"note: tool 'python:capital_later' {HERE} (TypeError: cannot pickle cities)",
        f"note: tool 'python:capital' {HERE} ({connection})",
        f"note: environment 'python:query' {HERE} ({connection})",
    ]


@pytest.mark.slow
def test_a_run_with_classes_and_connections_of_the_script(random_model, tmp_path):
    *shown, names, means = run_script("train", random_model, tmp_path / "run")
    assert means == "[1.0, 0.0, 0.0]"
    assert all(f"'tools/{name}/calls'" in names for name in ("describe", "capital", "capital_later", "add"))
    assert sum(HERE in line for line in shown) == 3
