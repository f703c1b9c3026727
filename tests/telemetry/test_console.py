"""The console of a whole run: no noise of libraries and a summary at the start."""

import re

import pytest
from conftest import run_trainer, small_run

from grpo.telemetry.console import console_line, evaluation_table


@pytest.mark.slow
def test_libraries_print_nothing_and_the_run_starts_with_a_summary(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"), "model.gradient_checkpointing=true", "optim.max_steps=1",
        ranks=2, fresh=True,
    )  # fmt: skip
    noise = [line for line in done.stderr.splitlines() if re.search(r"Warning|deprecated|Writing|Loading|it/s", line)]
    assert noise == []
    shown = done.stdout
    assert "6 problems x 4 completions, 2 rank(s), 1 update(s); 1 steps" in shown
    assert f"{tmp_path}/run, checkpoint.save_steps=None; the same command or call continues from there" in shown


def test_the_line_of_a_step_fits_the_terminal():
    metrics = {"step": 3, "reward": 1.5, "rewards/accuracy/mean": 0.25, "kl": 0.01, "entropy": 0.5, "step_time": 2.0}
    metrics |= {"completions/mean_length": 20.0, "learning_rate": 1e-3}
    line = "step   3/150  reward 1.500  accuracy 0.250  length 20.0  seconds 2.00  kl 0.0100  entropy 0.500  lr 1.0e-03"
    assert console_line(metrics, 150, "04:54") == line + "  left 04:54"
    for width, last in ((119, "1.0e-03"), (118, "0.500"), (80, "20.0")):
        shown = console_line(metrics, 150, "04:54", width=width)
        assert shown == line[: line.index(last) + len(last)] + "  left 04:54" and len(shown) <= width


def test_the_table_of_evaluations_shows_what_was_computed():
    before = {"eval/greedy_accuracy": 0.25, "eval/rewards/a": None}  # as read from a file
    after = {"eval/greedy_accuracy": 0.5, "eval/mean_length": 20.5, "eval/rewards/a": float("nan")}
    rows = [line.split() for line in evaluation_table(before, after).splitlines()]
    assert rows == [
        ["before", "after"],
        ["greedy", "accuracy", "25.0%", "50.0%"],
        ["mean", "length", "-", "20.50"],
        ["rewards/a", "-", "-"],
    ]
    assert evaluation_table(None, after).splitlines()[1].split() == ["greedy", "accuracy", "-", "50.0%"]
