"""One run of this trainer; started by learning_vs_trl.py.

    python benchmarks/ours_side.py OUTPUT.json EVERY --config X.yaml key=value ...

It evaluates every EVERY steps. The peak of memory leaves out evaluations and the checkpoint at the
end, as TRL's side does: there our code evaluates too, and nothing is saved."""

import json
import sys
import tempfile
from pathlib import Path

from common import peak_rss_mib, reset_peak_rss  # isort: skip  # puts the checkout on the path

import grpo.run.steps
import train_grpo
from grpo.run.records import Run
from grpo.telemetry.records import read_lines

QUIET = ["logging.every=1000", "logging.log_completions=0"]


def main() -> None:
    output, every, *arguments = sys.argv[1:]
    evaluate_if_due = grpo.run.steps.evaluate_if_due
    peaks = []

    def evaluate_apart(run: Run) -> dict[str, float]:
        peaks.append(peak_rss_mib())
        metrics = evaluate_if_due(run)
        reset_peak_rss()
        return metrics

    # The loop calls it before the first step, and after each step before the checkpoint is saved.
    grpo.run.steps.evaluate_if_due = evaluate_apart
    with tempfile.TemporaryDirectory(dir=Path(output).parent) as folder:
        settings = [f"output_dir={folder}", f"eval.every={every}"]
        code = train_grpo.main([*arguments, *settings, *QUIET])
        assert code == 0
        lines = read_lines(Path(folder, "metrics.jsonl"))
        intervals = {line["step"]: line for line in read_lines(Path(folder, "intervals.jsonl"))}

    points = []
    steps = []
    seconds = 0.0
    for line in lines:
        if "step_time" in line:
            steps.append(line)
            seconds += line["step_time"]
        if "eval/greedy_accuracy" in line:
            step = line["step"]
            metrics = {name: line[name] for name in line if name.startswith("eval/")}
            point = {"step": step, "seconds": seconds, "intervals": intervals[step]}
            points.append(point | metrics)
    found = {
        "points": points,
        "reward_by_step": [round(line["reward"], 4) for line in steps],
        "step_seconds": [round(line["step_time"], 3) for line in steps],
        "mean_length": [round(line["completions/mean_length"], 2) for line in steps],
        "num_tokens": steps[-1]["num_tokens"],
        "seconds": seconds,
        "peak_rss_mib": max(peaks),
    }
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
