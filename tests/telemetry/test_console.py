"""The console: no noise of libraries and a summary at the start of a run; the lines of steps and
evaluations."""

import re

import pytest
from conftest import run_trainer, small_run

from grpo.telemetry.console import console_line, evaluation_line, evaluation_table


@pytest.mark.slow
def test_libraries_print_nothing_and_the_run_starts_with_a_summary(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "model.gradient_checkpointing=true",
        "optim.max_steps=1",
        ranks=2,
        fresh=True,
    )
    assert not re.search(r"Warning|deprecated|Writing|Loading|it/s", done.stderr)
    shown = done.stdout
    assert "6 problems x 4 completions, 2 rank(s), 1 update(s); 1 steps" in shown
    assert (
        f"{tmp_path}/run, checkpoint.save_steps=none, saved also at the end, at Ctrl-C and "
        "SIGTERM; the same command or call continues from there"
    ) in shown


def test_the_line_of_a_step():
    metrics = {
        "step": 3,
        "reward": 1.5,
        "rewards/accuracy/mean": 0.25,
        "entropy": 0.5,
        "kl": 0.01,
        "step_time": 2.0,
        "frac_reward_zero_std": 0.25,
    }
    line = (
        "step   3/150  reward 1.500  accuracy 0.250  equal groups 25%  seconds 2.00  kl 0.0100  "
        "entropy 0.500  left 04:54"
    )
    assert console_line(metrics, 150) == line
    # A completion that a reward failed on is not in its mean.
    metrics |= {"rewards/accuracy/errors": 15, "rewards/format/errors": 0}
    assert "accuracy 0.250  errors 15  equal" in console_line(metrics, 150)


def test_the_table_of_evaluations_shows_what_was_computed():
    before = {"eval/greedy_accuracy": 0.25, "eval/rewards/a": None}  # as read from a file
    after = {
        "eval/greedy_accuracy": 0.5,
        "eval/greedy_format": 0.5,
        "eval/pass@1": 0.5,
        "eval/pass@2": 0.75,
        "eval/mean_length": 20.5,
        "eval/rewards/a": float("nan"),
    }
    assert [line.split() for line in evaluation_table(before, after).splitlines()] == [
        ["before", "after"],
        ["greedy", "accuracy", "25.0%", "50.0%"],
        ["pass@2", "-", "75.0%"],
        ["mean", "length", "-", "20.5"],
        ["rewards/a", "-", "-"],
    ]
    assert evaluation_table(None, after).splitlines()[1].split()[2:] == ["-", "50.0%"]


@pytest.mark.parametrize(
    ("accuracy", "format_rate", "lenient", "shown"),
    [
        (0.5, 0.0, 0.0, []),  # right without tags and numbers
        (0.5, 0.0, float("nan"), []),
        (0.0, 0.0, 0.0, []),  # most tasks ask for no form
        (0.0, 0.0, 0.25, ["lenient accuracy 25.0%"]),  # right answers in another form
        (0.5, 0.25, 0.5, ["format 25.0%", "lenient accuracy 50.0%"]),
    ],
)
def test_a_form_that_nobody_asks_for_is_not_shown(accuracy, format_rate, lenient, shown):
    metrics = {
        "step": 3,
        "eval/greedy_accuracy": accuracy,
        "eval/format": format_rate,
        "eval/lenient_accuracy": lenient,
    }
    parts = evaluation_line(metrics, 9).split("  ")
    assert parts == ["eval 3/9", f"greedy accuracy {accuracy:.1%}", *shown]
