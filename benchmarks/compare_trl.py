"""Time and memory of a step of this trainer and of TRL's GRPOTrainer: same model, prompts, group size, lengths, threads and precision.

    python benchmarks/compare_trl.py --model DIR --data train.jsonl --trl-python TRLVENV/bin/python

Both run in fresh processes that alternate, so a machine that gets slower affects both. Each runs ``--steps`` steps on the same ``4 * steps``
problems in its own order; the first step is warm-up and is not counted. The two sample different completions of the same distribution (the
learning rate is 1e-6), so times are seconds per 1,000 completion tokens.

TRL is configured for speed: one micro-batch holds the whole batch, gradient checkpointing is off (its default is on), completions are not
logged, attention is SDPA. In bf16 both keep fp32 master weights under autocast; with ``--trl-bf16-weights`` TRL has bf16 weights.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = 4
SYSTEM = (
    "Answer the question. First think step by step between <think> and </think>, then give the final number between <answer> and "
    "</answer>.\n\nExample question: Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?\nExample answer: <think>\nNatalia sold 48/2 = 24 clips in May. "
    "Natalia sold 48+24 = 72 clips altogether in April and May.\n</think>\n<answer>72</answer>"
)


def problems(a) -> list[dict]:
    """Rows of GSM8K; with ``--prompt-tokens``, as many generated questions of about that many tokens."""
    if a.prompt_tokens:
        words = ["one two three four five six seven eight nine ten"] * (a.prompt_tokens // 10)
        return [{"question": " ".join([str(number), *words]), "answer": "1"} for number in range(PROMPTS * a.steps)]
    rows = [json.loads(line) for line in Path(a.data).read_text(encoding="utf-8").splitlines()[: PROMPTS * a.steps]]
    return [{"question": row["question"], "answer": row["answer"].split("####")[-1].strip()} for row in rows]


def ours(a) -> dict:
    sys.path.insert(0, str(ROOT))
    import train_grpo

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in problems(a)), encoding="utf-8")
        code = train_grpo.main(
            [
                f"output_dir={folder}/run",
                f"model.name_or_path={a.model}",
                f"data.dataset={data}",
                "data.prompt_column=question",
                "data.answer_column=answer",
                "data.max_prompt_length=1024",
                f"data.system_prompt={json.dumps('' if a.prompt_tokens else SYSTEM)}",
                "reward.functions=[{name: format}]",
                f"rollout={{prompts_per_step: {PROMPTS}, num_generations: {a.generations}, max_completion_length: {a.max_tokens}}}",
                f"algorithm={{name: grpo, beta: {a.beta}}}",
                f"optim={{learning_rate: 1.0e-6, max_steps: {a.steps}, tokens_per_microbatch: {a.tokens_per_microbatch}}}",
                f"runtime={{precision: {a.precision}, threads_per_rank: {a.threads}, packed: {not a.padded}}}",
            ]
        )
        assert code == 0
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = PROMPTS * a.generations
    return {
        "tokens": [line["completions/mean_length"] * rows for line in lines if line["step"]],
        "step": [line["step_time"] for line in lines if line["step"]],
        "sampling": [line["time/rollout"] for line in lines if line["step"]],
    }


def trl(a) -> dict:
    import torch

    torch.set_num_threads(a.threads)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    record = {"tokens": [], "step": [], "sampling": []}

    def has_format(completions, completion_ids, **columns):
        record["tokens"].append(sum(len(ids) for ids in completion_ids))
        return [float("</think>\n<answer>" in completion[0]["content"]) for completion in completions]

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            record["step"].append(time.perf_counter() - self.start)

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            record["sampling"].append(time.perf_counter() - start)
            return result

    rows = [
        {
            "prompt": [{"role": "system", "content": SYSTEM}] * (not a.prompt_tokens)
            + [{"role": "user", "content": row["question"]}],
            "answer": row["answer"],
        }
        for row in problems(a)
    ]
    weights = torch.bfloat16 if a.precision == "bf16" and a.trl_bf16_weights else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * a.generations // a.trl_microbatches,
            gradient_accumulation_steps=a.trl_microbatches,
            num_generations=a.generations,
            max_completion_length=a.max_tokens,
            temperature=1.0,
            beta=a.beta,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            loss_type="grpo",
            max_steps=a.steps,
            bf16=a.precision == "bf16",
            use_cpu=True,
            gradient_checkpointing=False,
            use_transformers_continuous_batching=a.trl_continuous_batching,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        Timed(
            model=AutoModelForCausalLM.from_pretrained(a.model, dtype=weights, attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(a.model, padding_side="left"),
            reward_funcs=has_format,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Clock()],
        ).train()
    return record


def worker(a) -> None:
    record = {"ours": ours, "trl": trl}[a.side](a)
    tokens = sum(record["tokens"][1:]) / 1000
    step, sampling = sum(record["step"][1:]), sum(record["sampling"][1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {
        "step": step / tokens,
        "sampling": sampling / tokens,
        "rest": (step - sampling) / tokens,
        "peak_rss_mib": peak,
    }
    Path(a.result).write_text(json.dumps(result | {"tokens_per_step": tokens * 1000 / (len(record["step"]) - 1)}))


def measure(a, side: str, setting: dict) -> dict:
    python = a.trl_python if side == "trl" else sys.executable
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [python, __file__, "--side", side, "--result", file.name, "--model", a.model, "--data", str(a.data)]
        command += [f"--{name}={value}" for name, value in setting.items()]
        command += [f"--steps={a.steps}", f"--trl-microbatches={a.trl_microbatches}"]
        command += [f"--tokens-per-microbatch={a.tokens_per_microbatch}"]
        command += ["--trl-bf16-weights"] * a.trl_bf16_weights + ["--padded"] * a.padded
        command += ["--trl-continuous-batching"] * a.trl_continuous_batching
        environment = os.environ | {"OMP_NUM_THREADS": str(setting["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return json.loads(Path(file.name).read_text())


def summary(pairs: list[dict]) -> dict:
    """The medians of both sides, and the median, lowest and highest ratio of the pairs."""
    result = {}
    for name in ("step", "sampling", "rest", "peak_rss_mib"):
        of_ours, of_trl = [pair["ours"][name] for pair in pairs], [pair["trl"][name] for pair in pairs]
        ratios = [theirs / mine for mine, theirs in zip(of_ours, of_trl, strict=True)]
        result[name] = {
            "ours": statistics.median(of_ours),
            "trl": statistics.median(of_trl),
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "greatest": max(ratios),
        }
    return result


def versions(python: str) -> dict:
    code = (
        "import json, importlib.metadata as m; print(json.dumps({p: m.version(p) for p in ('torch', 'transformers', 'trl') "
        "if any(d.metadata['Name'] == p for d in m.distributions())}))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores"
    return f"{platform.processor()}, {os.cpu_count()} cores"


def table(results: list[dict]) -> str:
    lines = [
        "| precision | beta | threads | pairs | phase | ours | TRL | TRL / ours (least to greatest) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {
        "step": "whole step, s",
        "sampling": "sampling, s",
        "rest": "after sampling, s",
        "peak_rss_mib": "peak RSS, MiB",
    }
    for entry in results:
        s = entry["setting"]
        for phase, figures in entry["summary"].items():
            digits = 0 if phase == "peak_rss_mib" else 2
            lines.append(
                f"| {s['precision']} | {s['beta']} | {s['threads']} | {len(entry['pairs'])} | {names[phase]} "
                f"| {figures['ours']:.{digits}f} | {figures['trl']:.{digits}f} "
                f"| {figures['ratio']:.2f} ({figures['least']:.2f} to {figures['greatest']:.2f}) |"
            )
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--data", help="GSM8K's train.jsonl")
    parser.add_argument("--trl-python", default=sys.executable, help="Python of an environment with trl")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each process; the first is not counted")
    parser.add_argument(
        "--settings", default="fp32:0.04:2 fp32:0.0:2 bf16:0.04:2 bf16:0.0:2", help="precision:beta:threads ..."
    )
    parser.add_argument(
        "--output", default=str(ROOT / "benchmarks" / "results" / "compare_trl"), help="output files, without suffix"
    )
    parser.add_argument("--padded", action="store_true", help="run this trainer with runtime.packed=false")
    parser.add_argument("--trl-microbatches", type=int, default=1)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384, help="of this trainer")
    parser.add_argument("--trl-bf16-weights", action="store_true")
    parser.add_argument("--trl-continuous-batching", action="store_true")
    for name in ("side", "result", "precision"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--beta", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    for name, default in (("generations", 8), ("max-tokens", 256), ("prompt-tokens", None)):
        parser.add_argument(f"--{name}", type=int, default=default, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    a = arguments().parse_args()
    if a.side:
        worker(a)
        return
    results = []
    where = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": processor(),
        "versions": {"ours": versions(sys.executable), "trl": versions(a.trl_python)},
        "command": "python benchmarks/compare_trl.py " + " ".join(
            f"--{name.replace('_', '-')}={getattr(a, name)!r}"
            for name in (
                "pairs", "steps", "settings", "padded", "tokens_per_microbatch", "trl_microbatches", "trl_bf16_weights",
                "trl_continuous_batching",
            )
        ),
    }  # fmt: skip
    for text in a.settings.split():
        precision, beta, threads = text.split(":")
        setting, pairs = {"precision": precision, "beta": float(beta), "threads": int(threads)}, []
        for number in range(a.pairs):
            sides = ("ours", "trl") if number % 2 == 0 else ("trl", "ours")
            pairs.append({side: measure(a, side, setting) for side in sides})
            print(
                text,
                json.dumps({side: {k: round(v, 3) for k, v in pairs[-1][side].items()} for side in sides}),
                flush=True,
            )
        results.append({"setting": setting, "summary": summary(pairs), "pairs": pairs})
        Path(a.output + ".json").write_text(json.dumps(where | {"results": results}, indent=1) + "\n")
        about = f"{where['date']}, {where['machine']}, {json.dumps(where['versions'])}\n\n`{where['command']}`\n\n"
        Path(a.output + ".md").write_text(f"{about}Seconds are per 1,000 completion tokens.\n\n{table(results)}\n")
    print(table(results))


if __name__ == "__main__":
    main()
