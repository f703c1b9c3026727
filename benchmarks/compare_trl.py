"""Time and memory of a step, beside TRL's GRPOTrainer: same model, prompts, groups, lengths,
threads and precision.

    python benchmarks/compare_trl.py --model DIR --data train.jsonl --trl-python TRLVENV/bin/python

TRL runs with micro-batches of 8 rows and gradient checkpointing (its defaults), and of 8, 16 and 32
rows without. An optimizer step has 32 rows each time, which TRL samples together. A ratio is to the
best of these, which may be another one for time than for memory. ``--trl`` names other settings:
rows of a micro-batch, with ``+checkpointing``, ``+bf16-weights`` or ``+continuous-batching``.
``--settings`` are ``precision:beta:threads``; the first step of ``--steps`` is not counted. TRL's
completions are not logged, its attention is SDPA, and in bf16 all sides keep fp32 master weights
under autocast, except with ``+bf16-weights``.

Each side is a process of its own, and the processes take turns step by step, so a machine that gets
slower affects all. Each runs ``--steps`` steps on the same ``4 * steps`` problems in its own order;
the first step is warm-up. ``--prompt-tokens`` takes problems whose prompts have about that length,
without the worked example. The sides sample different completions of the same distribution (the
learning rate is 1e-6), so times are seconds per 1,000 completion tokens. What the trainers print
goes to stderr."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from common import RESULTS, about, in_turn, markdown, parser, ratios, shown, versions, write

SIDE = Path(__file__).with_name("step_side.py")
PHASES = {
    "step": "whole step, s",
    "sampling": "sampling, s",
    "rest": "after sampling, s",
    "peak_rss_mib": "peak RSS, MiB",
}


def measure(
    sides: list[str],
    trl_python: str,
    setting: dict,
) -> dict[str, dict]:
    """Run all sides in turn; the records of each, by side: ``ours``, or a setting of TRL."""
    started: dict[str, subprocess.Popen] = {}
    answers = {}
    threads = str(setting["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}

    def reply(side: str) -> str:
        """The next line of a side; an empty one if it has failed."""
        if line := started[side].stdout.readline().strip():
            return line
        raise SystemExit(f"{side} failed")

    try:
        for side in sides:
            python = sys.executable if side == "ours" else trl_python
            started[side] = subprocess.Popen(
                [python, str(SIDE), json.dumps(setting | {"side": side})],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        for side in sides:
            reply(side)
        for number in range(setting["steps"]):
            for side in in_turn(sides, number):
                print("go", file=started[side].stdin, flush=True)
                answers[side] = reply(side)
        return {side: json.loads(answer) for side, answer in answers.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def per_thousand_tokens(record: dict) -> dict[str, list[float]]:
    """Seconds per 1,000 completion tokens for each counted step, and the peak RSS."""
    figures = {
        "step": [],
        "sampling": [],
        "rest": [],
        "peak_rss_mib": [record["peak_rss_mib"]],
    }
    for n in range(1, len(record["step"])):
        step = 1000 * record["step"][n] / record["tokens"][n]
        sampling = 1000 * record["sampling"][n] / record["tokens"][n]
        figures["step"].append(step)
        figures["sampling"].append(sampling)
        figures["rest"].append(step - sampling)
    return figures


def summary(records: dict[str, dict]) -> dict:
    """For each phase the medians of all sides, and the ratio of TRL's best setting to ours."""
    figures = {side: per_thousand_tokens(record) for side, record in records.items()}
    mine = figures.pop("ours")
    result = {}
    for phase in PHASES:
        medians = {side: statistics.median(values[phase]) for side, values in figures.items()}
        best = min(medians, key=medians.get)
        result[phase] = {
            "ours": statistics.median(mine[phase]),
            "trl": medians[best],
            "best": best,
            "of_trl": medians,
            **ratios(figures[best][phase], mine[phase]),
        }
    return result


def note(results: list[dict], num_steps: int) -> str:
    """Sentences on the unit of the seconds, and on the mean lengths of prompts and completions."""
    text = f"Seconds are per 1,000 completion tokens, medians of {num_steps - 1} steps. "
    text += f"A prompt has {results[0]['records']['ours']['prompt_tokens']:.1f} tokens on average. "
    for entry in results:
        of_sides = []
        for side, record in entry["records"].items():
            of_sides.append(f"{record['completion_tokens']:.1f} ({side})")
        setting = entry["setting"]
        text += f"A completion in {setting['precision']} at beta {setting['beta']:g}: "
        text += f"{', '.join(of_sides)}. "
    return f"{text.rstrip()}\n\n"


def table(results: list[dict]) -> str:
    names = results[0]["summary"]["step"]["of_trl"]
    columns = ["precision", "beta", "threads", "phase", "ours", *(f"TRL, {name}" for name in names)]
    rows = []
    for entry in results:
        for phase, found in entry["summary"].items():
            digits = 0 if phase == "peak_rss_mib" else 2
            values = [f"{x:.{digits}f}" for x in (found["ours"], *found["of_trl"].values())]
            best = f"{found['best']}: {shown(found)}"
            rows.append([*entry["setting"].values(), PHASES[phase], *values, best])
    return markdown([*columns, "best of TRL / ours (least to greatest)"], rows)


def main() -> None:
    a = parser(
        __doc__,
        model=None,
        data=None,
        trl_python=sys.executable,
        trl="8+checkpointing 8 16 32",
        steps=4,
        settings="fp32:0.04:2 fp32:0.0:2 bf16:0.04:2 bf16:0.0:2",
        output=str(RESULTS / "compare_trl"),
        tokens_per_microbatch=16384,
        max_tokens=256,
        prompt_tokens=0,
    ).parse_args()
    both = {"ours": versions(sys.executable), "trl": versions(a.trl_python)}
    where = about(a, versions=both)
    results = []
    for text in a.settings.split():
        precision, beta, threads = text.split(":")
        setting = {
            "precision": precision,
            "beta": float(beta),
            "threads": int(threads),
        }
        sides = ["ours", *a.trl.split()]
        records = measure(sides, a.trl_python, vars(a) | setting)
        results.append({"setting": setting, "summary": summary(records), "records": records})
        print(table(results[-1:]), flush=True)
        text = note(results, a.steps) + table(results)
        write(a.output, where | {"results": results}, text)


if __name__ == "__main__":
    main()
