"""The scripts in examples/, the notebook made from one of them, and the code in docs/library.md.

``.ci/run`` runs examples/own_reward.py, in an environment as a user has it.
"""

import json
import re
import subprocess
import sys

import pytest
from conftest import ROOT, environment_of_runs

EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "own_loop.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_the_loop_learns_arithmetic(capsys):
    namespace = {"__name__": "__main__"}
    for cell in CELLS:
        exec(compile(cell, "own_loop.ipynb", "exec"), namespace)
    shown = capsys.readouterr().out
    rewards = [float(value) for value in re.findall(r"step +\d+ +reward (-?[\d.]+)", shown)]
    assert sum(rewards[-5:]) / 5 > 0.8 > 0.6 > rewards[0]


def test_the_notebook_is_made_from_its_script():
    subprocess.run([sys.executable, EXAMPLES / "make_notebook.py", "--check"], check=True)


def printed_in(folder, *arguments: str) -> str:
    """What Python prints in a process of its own, in another working directory."""
    env = environment_of_runs({"PYTHONPATH": str(ROOT)})
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_compare_checkpoints(tmp_path):
    shown = printed_in(tmp_path, str(EXAMPLES / "compare_checkpoints.py"))
    value, low, high = map(
        float, re.search(r"accuracies: (\S+), 95% interval (\S+) to (\S+)", shown).groups()
    )
    assert low < value < high


@pytest.mark.slow
def test_the_code_of_the_document_runs(tmp_path):
    (code,) = re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / "docs" / "library.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    code = code.replace("configs/", f"{ROOT}/configs/").replace(
        '{"max_steps": 20}', '{"max_steps": 2}'
    )
    code = code.replace('output_dir="', f'eval={{"max_samples": 8}}, output_dir="{tmp_path}/')
    assert "TrainingResult: 2 steps in" in printed_in(tmp_path, "-c", code)
