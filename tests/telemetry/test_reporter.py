"""The reporter: lines on the console, hints, metrics.jsonl and intervals.jsonl, on the main rank
only."""

from grpo.config import Config
from grpo.telemetry.records import read_lines
from grpo.telemetry.reporter import Reporter
from grpo.telemetry.terminal import print_user_error

NAN = float("nan")


def reporter(folder, *, every=100, is_main=True, first_step=0):
    config = Config(output_dir=str(folder), logging={"every": every})
    return Reporter(
        config,
        is_main=is_main,
        first_step=first_step,
        max_steps=9,
        newest_line=None,
        wandb_run_id=None,
    )


def steps_in(path):
    return [line["step"] for line in read_lines(path)]


def evaluate(writer, step, accuracy=0.5):
    metrics = {"eval/greedy_accuracy": accuracy}
    writer.evaluation(step, metrics, {"eval/greedy_accuracy": (0.25, 0.75)}, seconds=2.0)


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
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')
    reporter(tmp_path, first_step=3).step({"step": 4, "reward": 9.0})
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2, 3, 4]
    assert steps_in(tmp_path / "intervals.jsonl") == [0, 1, 2, 3]
    reporter(tmp_path, first_step=0)
    assert steps_in(tmp_path / "metrics.jsonl") == [], "a new run keeps nothing, also not step 0"


def test_an_evaluation_is_in_the_line_of_its_step(tmp_path):
    """Also where it is made a second time, by a run that a stop cut off in it; shorter numbers
    leave nothing behind."""
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
    reporter(tmp_path).print("prompt \x1b]0;title\x07\rend\n\tindented")
    print_user_error(ValueError("row 3: \x1b[31mred"))
    shown = capsys.readouterr()
    assert shown.out == "prompt \\u001b]0;title\\u0007\\u000dend\n\tindented\n"
    assert shown.err == "error: row 3: \\u001b[31mred\n"


def test_a_hint_is_printed_once_also_over_an_interruption(tmp_path, capsys):
    first = reporter(tmp_path)
    for step in range(1, 6):
        first.step({"step": step, "reward": 0.5, "kl": 2.0})
        assert ("hint: the KL to the reference is 2.00 nats" in capsys.readouterr().out) == (
            step == 3
        )
    second = reporter(tmp_path, first_step=4)
    second.step({"step": 5, "reward": 0.5, "kl": 2.0})
    assert list(second.hints.verdict()) == ["KL"], (
        "the verdict knows the steps before the interruption"
    )
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
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and '"entropy": null' in text
