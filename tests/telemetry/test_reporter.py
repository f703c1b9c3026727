"""What a run shows and writes: lines on the console, hints, metrics.jsonl and intervals.jsonl, on the main rank only."""

import json

import pytest

from grpo.config import Config
from grpo.telemetry.console import console_line, evaluation_table, without_most_pass_at_k
from grpo.telemetry.reporter import Reporter
from grpo.telemetry.user_errors import print_user_error


def reporter(folder, *, every=100, **changes):
    config = Config(output_dir=str(folder), logging={"every": every})
    return Reporter(config, **{"is_main": True, "first_step": 0, "max_steps": 9} | changes)


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("rewrite_first_step", "kept"), [(False, [0, 1, 2, 3]), (True, [0, 1, 2])])
def test_a_resumed_run_continues_both_files(tmp_path, rewrite_first_step, kept):
    first = reporter(tmp_path)
    for step in range(6):
        first.intervals(step, {"eval/greedy_accuracy": (0.25, 0.5)})
        first.step({"step": step, "reward": 0.5})
    first.close()
    second = reporter(tmp_path, first_step=3, rewrite_first_step=rewrite_first_step)
    second.step({"step": kept[-1] + 1, "reward": 9.0})
    second.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [*kept, kept[-1] + 1]
    assert steps_in(tmp_path / "intervals.jsonl") == kept
    reporter(tmp_path, first_step=0).close()
    assert steps_in(tmp_path / "metrics.jsonl") == [], "a new run keeps nothing, also not step 0"


def test_other_ranks_write_nothing(tmp_path):
    other_rank = reporter(tmp_path / "run", is_main=False)
    other_rank.step({"step": 1})
    other_rank.completions(1, [{"a": 1}])
    other_rank.intervals(1, {})
    other_rank.sync()
    other_rank.close()
    assert not (tmp_path / "run").exists()


def test_escape_sequences_do_not_reach_the_terminal(tmp_path, capsys):
    writer = reporter(tmp_path)
    writer.print("prompt \x1b]0;title\x07 \x1b[2J\rend\n\tindented")
    print_user_error(ValueError("row 3: \x1b[31mred"))
    shown = capsys.readouterr()
    assert shown.out == "prompt \\u001b]0;title\\u0007 \\u001b[2J\\u000dend\n\tindented\n"
    assert shown.err == "error: row 3: \\u001b[31mred\n"
    writer.close()


@pytest.mark.parametrize(("algorithm", "expected"), [({}, 1), ({"name": "reinforce"}, 0)])
def test_equal_rewards_are_no_hint_where_nothing_is_subtracted_from_them(tmp_path, capsys, algorithm, expected):
    writer = Reporter(
        Config(output_dir=str(tmp_path), logging={"every": 100}, algorithm=algorithm),
        is_main=True,
        first_step=0,
        max_steps=30,
    )
    for step in range(1, 31):
        writer.step({"step": step, "reward": 1.0, "frac_reward_zero_std": 1.0})
    assert capsys.readouterr().out.count("nothing to learn from") == expected
    writer.close()


def test_the_console_line_starts_with_the_reward():
    metrics = {
        "step": 3,
        "reward": 0.5,
        "rewards/format/mean": 0.25,
        "loss": 0.0,
        "kl": 0.01,
        "frac_reward_zero_std": 0.5,
    }
    line = console_line(metrics, 120)
    assert line == "step   3/120  reward 0.500  format 0.250  kl 0.0100  equal-reward groups 50%"


def test_the_time_that_is_left_counts_steps_and_evaluations(tmp_path, capsys):
    """The median of the steps, 60 s each, and three more evaluations of the newest one's 100 s; a slow first step does not count."""
    writer = reporter(tmp_path, every=1, max_steps=20)
    writer.time_left.eval_every = 5
    writer.time_left.evaluation_s = 7.0
    for step, extra in ((1, {"step_time": 900.0}), (2, {}), (3, {}), (4, {}), (5, {"time/eval": 100.0})):
        if "time/eval" in extra:
            writer.time_left.evaluation_s = extra["time/eval"]
        writer.step({"step": step, "reward": 1.0, "step_time": 60.0} | extra)
    writer.step({"step": 20, "reward": 1.0, "step_time": 60.0})
    writer.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("  left 4:45:28"), "19 x 900 s + 4 x 7 s"
    assert lines[4].endswith("  left 20:00"), "15 x 60 s + 3 x 100 s"
    assert lines[5] == "step 20/20  reward 1.000  seconds 60.00", "none is left"


def test_the_evaluation_table():
    table = evaluation_table(
        {"eval/mean@8": 0.5, "step": 0}, {"eval/mean@8": 0.75, "eval/mean_length": 20.0, "loss": 1.0}
    )
    lines = [line.split() for line in table.splitlines()]
    assert lines == [["before", "after"], ["mean@8", "50.0%", "75.0%"], ["mean", "length", "-", "20.00"]]


def test_of_pass_at_k_the_powers_of_two_and_the_last_are_shown():
    names = ["eval/mean@6", *(f"eval/pass@{k}" for k in range(1, 7)), "eval/format"]
    assert without_most_pass_at_k(names) == [
        "eval/mean@6", "eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/pass@6", "eval/format",
    ]  # fmt: skip


def test_the_console_shows_every_nth_step_and_every_evaluation(tmp_path, capsys):
    writer = reporter(tmp_path, every=2, max_steps=5)
    writer.step({"step": 0, "eval/greedy_accuracy": 0.25, "eval/mean_length": 3.0})
    for step in range(1, 6):
        writer.step({"step": step, "reward": 1.0} | ({"eval/greedy_accuracy": 0.5} if step == 3 else {}))
    writer.close()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "eval 0/5  greedy accuracy 25.0%  mean length 3.00"
    assert [line[:8] for line in shown[1:]] == ["step 2/5", "step 3/5", "eval 3/5", "step 4/5", "step 5/5"]


def test_a_hint_is_printed_once_also_over_an_interruption(tmp_path, capsys):
    first = reporter(tmp_path)
    for step in range(1, 8):
        first.step({"step": step, "reward": 0.5, "kl": 2.0})
    first.close()
    assert capsys.readouterr().out.count("hint: the KL to the reference is 2.00 nats") == 1
    second = reporter(tmp_path, first_step=6)
    second.step({"step": 7, "reward": 0.5, "kl": 2.0})
    second.close()
    assert "hint" not in capsys.readouterr().out
