"""Makes run folders with the trainer's own writers; their texts contain everything that could break
a page."""

import json
import math

import yaml

from grpo.config import Config
from grpo.telemetry.records import append_line
from grpo.telemetry.samples import write_samples

NASTY = (
    "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"
    "\u2028\u202e\x00\x1b&amp;<!-- ${1} @@DATA@@"
)


def write_run(folder, *, steps=12, seed=0, **config):
    folder.mkdir(parents=True)
    settings = Config.model_validate(
        {"output_dir": str(folder), "seed": seed, **config}
    ).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    append_line(folder / "starts.jsonl", {"torch": "2.13.0", "command": f"train {NASTY}"})
    metrics = folder / "metrics.jsonl"
    append_line(metrics, {"step": 0, **evaluation(0.25, 20.5)})
    for step in range(1, steps + 1):
        line = {
            "step": step,
            "epoch": step / 10,
            "reward": step / 10,
            "rewards/accuracy/mean": step / 10,
            "kl": None if step == 5 else 0.01 * step,
            "entropy": None,
            "completions/mean_length": 10.0,
            "num_tokens": 100 * step,
            "step_time": 2.0,
            "time/rollout": 1.0 + step / 100,
        }
        if step == steps // 2:
            line |= evaluation(0.5, 19.0)
        if step == steps:
            line |= evaluation(0.75, 18.0)
        append_line(metrics, line)
    intervals = folder / "intervals.jsonl"
    append_line(intervals, {"step": 0, "eval/greedy_accuracy": [0.175, 0.343]})
    append_line(intervals, {"step": steps, "eval/greedy_accuracy": [0.657, 0.825]})
    (folder / "completions").mkdir()
    for step in range(1, steps + 1, 2):
        records = [sample(step, number) for number in range(7)]
        write_samples(folder / "completions" / f"step_{step:06d}.parquet", records)
    return folder


def evaluation(rate, length):
    return {
        "eval/greedy_accuracy": rate,
        "eval/mean_length": length,
        "eval/greedy_mean_length": length,
        "eval/truncated": 1 - rate,
        "eval/rewards/bonus": rate,
    }


def sample(step, number):
    reward = math.nan if number == 6 else number % 2
    return {
        "step": step,
        "problem": number,
        "answer": f"{2 * number} {NASTY}" if number else None,
        "prompt": json.dumps([{"role": "user", "content": f"{number}+{number} {NASTY}"}]),
        "completion": f"it is {2 * number} {NASTY}",
        "rewards": {"accuracy": reward},
        "reward": reward,
        "advantage": number - 3.0,
        "length": 4,
        "finished": number != 2,
        "tokens": ["it", " is", "\n", NASTY],
        "logprobs": [-0.5, -1.0, math.nan, 0.0],
        "updated_logprobs": [-0.25, -1.5, -1.0, 0.0],
        "ref_logprobs": [-0.5, -1.0, -1.0, -1.0],
    }
