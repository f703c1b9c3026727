"""Makes run folders with the trainer's own writers; their texts contain everything that could break a page."""

import json
import math

import yaml

from grpo.config import Config
from grpo.telemetry.records import record_start
from grpo.telemetry.samples import write_samples

NASTY = (
    "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>"
    "\u2028\u202e\x00\x1b&amp;<!--\ud800 ${1} @@DATA@@"
)


def write_run(folder, *, steps=12, seed=0, lines=(), **config):
    folder.mkdir(parents=True)
    settings = Config.model_validate({"output_dir": str(folder), "seed": seed, **config}).model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True))
    record_start(folder, {"torch": "2.13.0", "command": f"train {NASTY}"})
    (folder / "completions").mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        file.write(json.dumps({"step": 0, **evaluation(0.25, 20.5)}) + "\n")
        for step in range(1, steps + 1):
            line = {
                "step": step, "epoch": step / 10, "reward": step / 10, "rewards/accuracy/mean": step / 10,
                "kl": 0.01 * step, "entropy": None, "completions/mean_length": 10.0, "completions/min_length": 5.0,
                "completions/max_length": 20.0, "num_tokens": 100 * step, "step_time": 2.0,
                "time/rollout": 1.0 + step / 100, "time/reward": 0.1, "time/logprobs": 0.2, "time/update": 0.5,
                "time/eval": 0.0,
            }  # fmt: skip
            if step == 5:
                line["kl"] = None
            if step in (steps // 2, steps):
                line |= evaluation(0.75, 18.0) if step == steps else evaluation(0.5, 19.0)
            file.write(json.dumps(line) + "\n")
        file.writelines(lines)
    intervals = [{"step": 0, "eval/greedy_accuracy": [0.175, 0.343], "eval/mean_length": [18.0, 23.0]},
                 {"step": steps, "eval/greedy_accuracy": [0.657, 0.825], "eval/truncated": [None, None]}]  # fmt: skip
    (folder / "intervals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in intervals))
    for step in range(1, steps + 1, 2):
        write_samples(folder / "completions" / f"step_{step:06d}.parquet", [sample(step, i) for i in range(7)])
    return folder


def evaluation(rate, length):
    return {
        "eval/greedy_accuracy": rate, "eval/mean_length": length, "eval/greedy_mean_length": length,
        "eval/truncated": 1 - rate, "eval/greedy_truncated": 1 - rate, "eval/rewards/penalty": rate - 1,
        "eval/rewards/bonus": rate,
    } | {f"eval/pass@{k}": rate for k in range(1, 8)}  # fmt: skip


def sample(step, number):
    advantage = number - 3.0
    return {
        "step": step, "problem": number, "answer": f"{2 * number} {NASTY}" if number else None,
        "prompt": json.dumps([{"role": "user", "content": f"{number}+{number} {NASTY}"}]),
        "completion": f"it is {2 * number} {NASTY}",
        "rewards": {"accuracy": math.nan if number == 6 else number % 2},
        "reward": math.nan if number == 6 else number % 2, "advantage": advantage, "length": 4, "finished": number != 2,
        "token_ids": [1, 2, 3, 4], "tokens": ["it", " is", "\n", NASTY], "logprobs": [-0.5, -1.0, math.nan, 0.0],
        "updated_logprobs": [-0.25, -1.5, -1.0, 0.0], "ref_logprobs": [-0.5, -1.0, -1.0, -1.0],
    }  # fmt: skip
