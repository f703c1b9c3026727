"""trackio's database, read back: names and steps, an interruption, a new run of the same name."""

import json
import sqlite3

import torch
from test_samples import record

from grpo.config import Config
from grpo.telemetry.reporter import Reporter


def test_metrics_histograms_and_completions_are_in_trackios_database(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the package is imported
    config = Config(output_dir=str(tmp_path / "run"), logging={"trackio": True, "project": "p", "run_name": "r"})

    def start(first_step: int) -> Reporter:
        return Reporter(config, is_main=True, first_step=first_step, max_steps=9)

    first = start(0)
    first.step({"step": 0, "eval/greedy_accuracy": 0.25})
    for step in (1, 2, 3):
        first.histogram("reward", torch.tensor([[0.0, 1.0], [1.0, 3.0]]))
        first.completions(step, [record(logged={})])
        first.step({"step": step, "reward": step / 8, "rewards/f/mean": float("nan")})
    first.close()
    resumed = start(2)
    for step in (3, 4):
        resumed.step({"step": step, "reward": step / 8})
    resumed.close()
    new = start(0)
    new.step({"step": 1, "reward": 0.5})
    new.close()

    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        found = database.execute("select run_id, run_name, step, metrics from metrics")
        rows = [(*row, json.loads(metrics)) for *row, metrics in found]
    ids, names, steps, metrics = zip(*rows, strict=True)
    assert set(names) == {"r"} and steps == (0, 1, 2, 3, 3, 4, 1), "step 3, which was computed again, is there twice"
    assert len(set(ids[:6])) == 1 and len(set(ids)) == 2, "a resumed start is no run of its own, a new start is"
    assert metrics[0] == {"eval/greedy_accuracy": 0.25} and [m["reward"] for m in metrics[3:]] == [
        0.375,
        0.375,
        0.5,
        0.5,
    ]
    assert sum(metrics[1]["histograms/reward"]["values"]) == 4
    assert "rewards/f/mean" not in metrics[1], "no point where there is no number"
    (completion,) = metrics[1]["completions"]["_value"]
    assert completion["completion"] == record(logged={})["completion"] and "rewards/a" in completion
