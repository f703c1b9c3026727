"""metrics.jsonl: what a resumed run keeps of it, and values that JSON does not have."""

import json

from grpo.telemetry.metrics_file import MetricsFile


def steps_and_rewards(path):
    return [(line["step"], line["reward"]) for line in map(json.loads, path.read_text().splitlines())]


def test_a_resumed_run_removes_the_lines_that_it_writes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, last_kept_step=-1)
    for step in range(6):
        first.write({"step": step, "reward": step / 2, "loss": float("nan"), "range": (1.0, float("inf"))})
    first.close()
    line = json.loads(path.read_text().splitlines()[2])
    assert line == {"step": 2, "reward": 1.0, "loss": None, "range": [1.0, None]}, "JSON has no NaN and no infinity"
    with open(path, "a") as file:
        file.write('{"step": 6, "rew')  # the process was killed while it wrote
    second = MetricsFile(path, last_kept_step=3)
    assert [metrics["step"] for metrics in second.kept] == [0, 1, 2, 3]
    assert second.newest_earlier_step == 5
    second.write({"step": 4, "reward": 9.0})
    second.close()
    assert steps_and_rewards(path) == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0)]
    MetricsFile(path, last_kept_step=-1).close()
    assert path.read_text() == ""
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"], "no temporary file is left"


def test_damaged_lines_are_removed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "reward": 0}\nnot json\n[1]\n{"reward": 1}\n{"step": 1, "reward": 2}\n{"step": 2, "reward": 3}'
    )
    MetricsFile(path, last_kept_step=9).close()
    assert steps_and_rewards(path) == [(0, 0), (1, 2)], "the last line has no line break: it may be incomplete"
