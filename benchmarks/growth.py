"""Time of a step as group, prompt, completion and vocabulary grow: this trainer and TRL's GRPOTrainer.

    python benchmarks/growth.py --model DIR --trl-python TRLVENV/bin/python

One axis varies at a time; the others stay at 4 problems x 8 completions of 128 tokens after prompts of 256 tokens, with the model's vocabulary.
The weights are random, in the shape of the model's config.json, so hardly a completion ends before the limit and both trainers do the same
work. The two sides take turns, in new processes for each point; the first step of each is not counted. Results go to results/growth.json, .md and .png.
Points that are already in growth.json are not measured again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import compare_trl
from step_side import PROMPTS

BASE = {"precision": "fp32", "beta": 0.04, "threads": 2, "generations": 8, "max-tokens": 128, "prompt-tokens": 256}
AXES = {
    "generations": ("completions per problem", (4, 8, 16)),
    "prompt-tokens": ("prompt tokens", (64, 256, 640)),
    "max-tokens": ("completion tokens", (64, 128, 256)),
    "vocabulary": ("vocabulary", (4104, 16384)),
}
OUTPUT = compare_trl.ROOT / "benchmarks" / "results" / "growth"


def random_model(like: str, vocabulary: int, folder: str) -> str:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(like)
    config.vocab_size, config.dtype = vocabulary, torch.float32
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(like).save_pretrained(folder)
    return folder


def table(points: list[dict]) -> str:
    lines = [
        "| axis | value | ours, s a step | TRL, s a step | TRL / ours | ours, MiB | TRL, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in points:
        ours, trl = point["ours"], point["trl"]
        lines.append(
            f"| {AXES[point['axis']][0]} | {point['value']:,} | {ours['seconds']:.2f} | {trl['seconds']:.2f} "
            f"| {trl['seconds'] / ours['seconds']:.1f} | {ours['peak_rss_mib']:.0f} | {trl['peak_rss_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def plot(points: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(AXES), figsize=(14, 3.4))
    for panel, (axis, (label, _)) in zip(panels, AXES.items(), strict=True):
        mine = [point for point in points if point["axis"] == axis]
        for side, name in (("trl", "TRL 1.16.0"), ("ours", "this trainer")):
            panel.plot([p["value"] for p in mine], [p[side]["seconds"] for p in mine], "o-", label=name)
        panel.set(xlabel=label, ylim=(0, None), xlim=(0, None))
    panels[0].set_ylabel("seconds a step")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    a = compare_trl.arguments().parse_args()
    a.steps, like = 2, a.model
    where = {
        "date": time.strftime("%Y-%m-%d"), "machine": compare_trl.processor(), "setting": BASE,
        "versions": {"ours": compare_trl.versions(sys.executable), "trl": compare_trl.versions(a.trl_python)},
    }  # fmt: skip
    there = json.loads(OUTPUT.with_suffix(".json").read_text()) if OUTPUT.with_suffix(".json").exists() else {}
    points = there["points"] if there.get("setting") == BASE and there["versions"] == where["versions"] else []
    done = {(point["axis"], point["value"]) for point in points}
    for axis, (_, values) in AXES.items():
        for value in values:
            if (axis, value) in done:
                continue
            setting = dict(BASE)
            if axis != "vocabulary":
                setting[axis] = value
            with tempfile.TemporaryDirectory() as folder:
                a.model = random_model(like, value if axis == "vocabulary" else AXES["vocabulary"][1][0], folder)
                point = {"axis": axis, "value": value}
                theirs = str(PROMPTS * setting["generations"])  # TRL computes all rows at once
                options = {name.replace("-", "_"): value for name, value in setting.items()}
                found = compare_trl.measure(a, ["ours", theirs], options)
                for name, side in (("ours", "ours"), ("trl", theirs)):
                    point[name] = {
                        "seconds": found[side]["step"][1],
                        "tokens": found[side]["tokens"][1],
                        "peak_rss_mib": found[side]["peak_rss_mib"],
                    }
            points.append(point)
            print(json.dumps(point), flush=True)
            OUTPUT.with_suffix(".json").write_text(json.dumps(where | {"points": points}, indent=1) + "\n")
    about = f"{where['date']}, {where['machine']}, {json.dumps(where['versions'])}; {json.dumps(BASE)}; one counted step of each\n\n"
    OUTPUT.with_suffix(".md").write_text(about + table(points))
    plot(points, OUTPUT.with_suffix(".png"))
    print(table(points))


if __name__ == "__main__":
    main()
