"""The training loop of docs/library.md, executed as it stands in the document."""

import re

import pytest
from conftest import ROOT

(CODE,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "library.md").read_text(), re.MULTILINE | re.DOTALL)


def rewards_of(code: str, capsys) -> list[float]:
    """Execute the code; the reward of each step that it prints."""
    exec(compile(code, "docs/library.md", "exec"), {"__name__": "library"})
    return [float(value) for value in re.findall(r"step +\d+ +reward (-?[\d.]+)", capsys.readouterr().out)]


def test_the_loop_learns(random_model, capsys):
    """On an untrained model, which can only learn to write less, with fewer steps and a higher learning rate."""
    changes = {
        'str(build_tiny_model("arithmetic"))': repr(str(random_model)),
        "0, 30, 8, 8": "0, 10, 4, 8",
        "lr=2e-4": "lr=2e-3",
    }
    code = CODE
    for old, new in changes.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    rewards = rewards_of(code, capsys)
    assert len(rewards) == 10
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.01, rewards


@pytest.mark.slow
def test_the_loop_learns_arithmetic(capsys):
    rewards = rewards_of(CODE, capsys)
    assert sum(rewards[-5:]) / 5 > 0.8 > 0.6 > rewards[0]


def test_the_loop_is_as_short_as_it_is_said_to_be():
    lines = [line for line in CODE.splitlines() if line and not line.startswith(("import ", "from "))]
    assert len(lines) <= 30
