"""The reporter: lines on the console, hints, metrics.jsonl and intervals.jsonl, on the main rank only."""

import json

from grpo.config import Config
from grpo.telemetry.records import read_steps, remove_steps_after
from grpo.telemetry.reporter import Reporter
from grpo.telemetry.terminal import print_user_error


def reporter(folder, *, every=100, **changes):
    config = Config(output_dir=str(folder), logging={"every": every})
    return Reporter(config, **{"is_main": True, "first_step": 0, "max_steps": 9} | changes)


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_that_are_damaged_or_written_again_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "x": 0.1}\nnot json\n{"step": 1, "x": null}\n{"step": 2}\n{"step": 3, "rew')
    assert remove_steps_after(path, 1) == [{"step": 0, "x": 0.1}, {"step": 1, "x": None}]
    assert path.read_text() == '{"step": 0, "x": 0.1}\n{"step": 1, "x": null}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"], "no temporary file is left"


def test_a_file_that_is_moved_during_the_run_loses_no_step(tmp_path):
    writer = reporter(tmp_path)
    writer.step({"step": 1, "reward": float("nan"), "range": (1.0, float("inf"))})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "old.jsonl")
    writer.sync()
    writer.step({"step": 2, "reward": 0.5})
    writer.close()
    assert steps_in(tmp_path / "old.jsonl") == [1] and steps_in(tmp_path / "metrics.jsonl") == [2]
    line = json.loads((tmp_path / "old.jsonl").read_text())
    assert line == {"step": 1, "reward": None, "range": [1.0, None]}, "JSON has no NaN and no infinity"


def test_a_resumed_run_continues_both_files(tmp_path):
    first = reporter(tmp_path)
    for step in range(6):
        if step:
            first.step({"step": step, "reward": 0.5})
        evaluate(first, step)
    first.close()
    other_rank = reporter(tmp_path, is_main=False)
    other_rank.step({"step": 9})
    evaluate(other_rank, 9)
    other_rank.close()
    second = reporter(tmp_path, first_step=3)
    second.step({"step": 4, "reward": 9.0})
    second.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert steps_in(tmp_path / "intervals.jsonl") == [0, 1, 2, 3]
    reporter(tmp_path, first_step=0).close()
    assert steps_in(tmp_path / "metrics.jsonl") == [], "a new run keeps nothing, also not step 0"


def evaluate(writer, step, accuracy=0.5):
    metrics = {"eval/greedy_accuracy": accuracy}
    writer.evaluation(step, metrics, {"eval/greedy_accuracy": (0.25, 0.75)}, seconds=2.0)


def test_an_evaluation_is_in_the_line_of_its_step(tmp_path):
    """Also where it is made a second time, by a run that a stop cut off in it; shorter numbers leave nothing behind."""
    writer = reporter(tmp_path)
    writer.step({"step": 1, "reward": 0.5, "time/eval": 0.0})
    writer.step({"step": 2, "reward": 0.25, "time/eval": 0.0})
    evaluate(writer, 2, accuracy=0.123456789)
    evaluate(writer, 2, accuracy=0.5)
    writer.step({"step": 3, "reward": 1.0})
    writer.close()
    assert read_steps(tmp_path / "metrics.jsonl") == [
        {"step": 1, "reward": 0.5, "time/eval": 0.0},
        {"step": 2, "reward": 0.25, "time/eval": 2.0, "eval/greedy_accuracy": 0.5},
        {"step": 3, "reward": 1.0},
    ]
    assert steps_in(tmp_path / "intervals.jsonl") == [2]


def test_escape_sequences_do_not_reach_the_terminal(tmp_path, capsys):
    writer = reporter(tmp_path)
    writer.print("prompt \x1b]0;title\x07 \x1b[2J\rend\n\tindented")
    print_user_error(ValueError("row 3: \x1b[31mred"))
    shown = capsys.readouterr()
    assert shown.out == "prompt \\u001b]0;title\\u0007 \\u001b[2J\\u000dend\n\tindented\n"
    assert shown.err == "error: row 3: \\u001b[31mred\n"
    writer.close()


def test_a_hint_is_printed_once_also_over_an_interruption(tmp_path, capsys):
    first = reporter(tmp_path)
    for step in range(1, 6):
        first.step({"step": step, "reward": 0.5, "kl": 2.0})
        assert ("hint: the KL to the reference is 2.00 nats" in capsys.readouterr().out) == (step == 3)
    first.close()
    second = reporter(tmp_path, first_step=4)
    second.step({"step": 5, "reward": 0.5, "kl": 2.0})
    assert list(second.hints.verdict()) == ["KL"], "the verdict knows the steps before the interruption"
    second.close()
    assert "hint" not in capsys.readouterr().out
    other_rank = reporter(tmp_path, is_main=False)
    assert other_rank.hints.verdict() == {}


def test_what_was_not_computed_is_no_part_of_the_lines(tmp_path, capsys):
    writer = reporter(tmp_path, every=1)
    nothing = float("nan")
    line = {"step": 1, "reward": nothing, "rewards/a/mean": nothing, "rewards/b/mean": 0.5, "entropy": nothing}
    writer.step(line | {"kl": None, "grad_norm": 0.0})  # None: the line was read from a file
    writer.step({"step": 2, "reward": 1.0})
    writer.evaluation(2, {"eval/greedy_accuracy": 0.5, "eval/rewards/a": nothing}, {}, seconds=1.0)
    writer.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 1/9  b 0.500  grad norm 0.000",
        "step 2/9  reward 1.000  left 00:00",
        "eval 2/9  greedy accuracy 50.0%",
    ]
    written = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written[0]["entropy"] is None and written[0]["rewards/b/mean"] == 0.5
