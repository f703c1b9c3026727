"""Scoring and its backward pass: packed groups beside padded rows, tokens a second and peak memory.

    python benchmarks/update.py --model DIR
    python benchmarks/update.py --shape qwen2.5-0.5b --device cuda --prompt 256 --completion 256 --group 8

A fresh process for each measurement, in turn. Tokens are completion tokens: the same number for both. Peak memory is CUDA's where there
is one, else the process's peak RSS less what it was before the pass.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]


def worker(a) -> None:
    import torch
    from rollout import load

    from grpo.batch import Completion, Group, Problem, collate, microbatches
    from grpo.logprobs import CompletionScorer

    torch.set_num_threads(a.threads)
    device = torch.device(a.device)
    policy = load(a, device)
    scorer = CompletionScorer(policy.model)
    if a.side == "packed":
        assert scorer.pack_groups() is None
    rng = torch.Generator().manual_seed(0)
    vocabulary = policy.model.config.vocab_size

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocabulary, (n,), generator=rng).tolist())

    lengths = torch.randint(max(a.completion // 4, 1), a.completion + 1, (a.prompts, a.group), generator=rng).tolist()
    groups = [
        Group(Problem(p, "", ids(a.prompt)), tuple(Completion(ids(n), "", True) for n in row))
        for p, row in enumerate(lengths)
    ]
    batch = collate(groups, torch.zeros(a.prompts, a.group), pad_id=0, device=device)

    def run() -> None:
        for micro, _ in microbatches(batch, a.tokens_per_microbatch, packed=scorer.packed):
            with policy.autocast():
                logprobs_BT, _ = scorer(*micro.to_score)
            logprobs_BT.sum().backward()
        policy.model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    print(json.dumps({"tokens_per_second": sum(map(sum, lengths)) / min(seconds[1:]), "peak_mib": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--completion", type=int, default=256, help="longest; lengths are uniform from a quarter of it")
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.side:
        worker(a)
        return
    found: dict[str, list[dict]] = {"packed": [], "padded": []}
    for number in range(a.repeats):
        for side in found if number % 2 == 0 else reversed(found):
            command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found[side].append(json.loads(done.stdout.splitlines()[-1]))
    rate = {side: statistics.median(r["tokens_per_second"] for r in rows) for side, rows in found.items()}
    peak = {side: statistics.median(r["peak_mib"] for r in rows) for side, rows in found.items()}
    print(
        f"{a.precision}, {a.prompts} prompts of {a.prompt} x {a.group} completions of up to {a.completion}: packed "
        f"{rate['packed']:.0f} completion tokens/s and {peak['packed']:.0f} MiB, padded {rate['padded']:.0f} and "
        f"{peak['padded']:.0f}: {rate['packed'] / rate['padded']:.2f} times, {peak['packed'] / peak['padded']:.0%} of the memory"
    )
    if a.output:
        Path(a.output).write_text(
            json.dumps({"found": found, "arguments": vars(a), "date": time.strftime("%Y-%m-%d")}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
