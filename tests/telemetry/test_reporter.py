"""The reporter: lines on the console, hints, metrics.jsonl and intervals.jsonl, on the main rank only."""

import json

from grpo.config import Config
from grpo.telemetry.records import read_lines, remove_steps_after
from grpo.telemetry.reporter import Reporter
from grpo.telemetry.terminal import print_user_error

NAN = float("nan")


def reporter(folder, *, every=100, is_main=True, first_step=0):
    config = Config(output_dir=str(folder), logging={"every": every})
    return Reporter(config, is_main=is_main, first_step=first_step, max_steps=9)


def steps_in(path):
    return [line["step"] for line in read_lines(path)]


def evaluate(writer, step, accuracy=0.5):
    metrics = {"eval/greedy_accuracy": accuracy}
    writer.evaluation(step, metrics, {"eval/greedy_accuracy": (0.25, 0.75)}, seconds=2.0)


def test_lines_that_are_damaged_or_written_again_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 0.1}\nnot json\n{"step": 1, "x": null}\n{"step": 2}\n{"step": 3, "rew')
    assert remove_steps_after(path, 1) == [{"step": 0, "x": 0.1}, {"step": 1, "x": None}]
    assert path.read_text() == '{"step": 0, "x": 0.1}\n{"step": 1, "x": null}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"], "no temporary file is left"


def test_a_file_that_is_moved_during_the_run_loses_no_step(tmp_path):
    writer = reporter(tmp_path)
    writer.step({"step": 1, "reward": NAN, "range": (1.0, float("inf"))})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "old.jsonl")
    writer.step({"step": 2, "reward": 0.5})
    assert steps_in(tmp_path / "metrics.jsonl") == [2]
    line = json.loads((tmp_path / "old.jsonl").read_text())
    assert line == {"step": 1, "reward": None, "range": [1.0, None]}, "JSON has no NaN and no infinity"


def test_a_resumed_run_continues_both_files(tmp_path):
    first = reporter(tmp_path)
    for step in range(6):
        if step:
            first.step({"step": step, "reward": 0.5})
        evaluate(first, step)
    other_rank = reporter(tmp_path, is_main=False)
    other_rank.step({"step": 9})
    evaluate(other_rank, 9)
    other_rank.close()
    reporter(tmp_path, first_step=3).step({"step": 4, "reward": 9.0})
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert steps_in(tmp_path / "intervals.jsonl") == [0, 1, 2, 3]
    reporter(tmp_path, first_step=0)
    assert steps_in(tmp_path / "metrics.jsonl") == [], "a new run keeps nothing, also not step 0"


def test_an_evaluation_is_in_the_line_of_its_step(tmp_path):
    """Also where it is made a second time, by a run that a stop cut off in it; shorter numbers leave nothing behind."""
    writer = reporter(tmp_path)
    writer.step({"step": 1, "reward": 0.5})
    writer.step({"step": 2, "reward": 0.25})
    evaluate(writer, 2, accuracy=0.123456789)
    evaluate(writer, 2, accuracy=0.5)
    writer.step({"step": 3, "reward": 1.0})
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward": 0.5},
        {"step": 2, "reward": 0.25, "time/eval": 2.0, "eval/greedy_accuracy": 0.5},
        {"step": 3, "reward": 1.0},
    ]
    assert steps_in(tmp_path / "intervals.jsonl") == [2]


def test_escape_sequences_do_not_reach_the_terminal(tmp_path, capsys):
    reporter(tmp_path).print("prompt \x1b]0;title\x07 \x1b[2J\rend\n\tindented")
    print_user_error(ValueError("row 3: \x1b[31mred"))
    shown = capsys.readouterr()
    assert shown.out == "prompt \\u001b]0;title\\u0007 \\u001b[2J\\u000dend\n\tindented\n"
    assert shown.err == "error: row 3: \\u001b[31mred\n"


def test_a_hint_is_printed_once_also_over_an_interruption(tmp_path, capsys):
    first = reporter(tmp_path)
    for step in range(1, 6):
        first.step({"step": step, "reward": 0.5, "kl": 2.0})
        assert ("hint: the KL to the reference is 2.00 nats" in capsys.readouterr().out) == (step == 3)
    second = reporter(tmp_path, first_step=4)
    second.step({"step": 5, "reward": 0.5, "kl": 2.0})
    assert list(second.hints.verdict()) == ["KL"], "the verdict knows the steps before the interruption"
    assert "hint" not in capsys.readouterr().out


def test_what_was_not_computed_is_no_part_of_the_lines(tmp_path, capsys):
    writer = reporter(tmp_path, every=1)
    # None: the line was read from a file.
    writer.step({"step": 1, "reward": NAN, "rewards/b/mean": 0.5, "entropy": NAN, "kl": None})
    writer.step({"step": 2, "reward": 1.0})
    writer.evaluation(2, {"eval/greedy_accuracy": 0.5, "eval/rewards/a": NAN}, {}, seconds=1.0)
    assert capsys.readouterr().out.splitlines() == [
        "step 1/9  b 0.500",
        "step 2/9  reward 1.000",
        "eval 2/9  greedy accuracy 50.0%",
    ]
    first, _ = read_lines(tmp_path / "metrics.jsonl")
    assert first["entropy"] is None and first["rewards/b/mean"] == 0.5
