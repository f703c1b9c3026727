"""Scoring and its backward pass, packed groups beside padded rows: tokens a second and peak memory.

    python benchmarks/update.py --model DIR
    python benchmarks/update.py --model DIR --points "4:256:256 8:256:256 16:256:256 8:256:64 8:64:256"
    python benchmarks/update.py --model DIR --vocabulary 151936 --points "8:256:64 8:256:128 8:256:256"
    python benchmarks/update.py --shape qwen2.5-0.5b --device cuda
    python benchmarks/update.py --model DIR --equal-groups 2    of the 4 groups, 2 have advantage 0 and are skipped

A point is group:prompt:longest completion, in tokens. Each measurement has a fresh process, and the two sides
alternate. Tokens are completion tokens, the same number on both sides. Utilisation is relative to a large matrix
product on this machine with the same threads and precision. The counted work is each prompt once, forward and backward.
Peak memory is CUDA's, or else the growth of the process's peak RSS during the pass.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from common import about, in_turn, parser, ratios, write


def measure(a) -> dict[str, float]:
    """Tokens a second, peak memory and utilisation of one side at one point, in this process."""
    import torch
    from rollout import load

    from grpo.algorithm.batch import Completion, Group, Problem, collate, microbatches, skip_zero_advantage
    from grpo.algorithm.logprobs import CompletionScorer
    from grpo.rollout import check_model

    torch.set_num_threads(a.threads)
    device = torch.device(a.device)
    policy = load(a, device)
    scorer = CompletionScorer(policy.model)
    why_padded = check_model(policy, scorer)
    assert why_padded is None
    scorer.packed = a.side == "packed"
    rng = torch.Generator().manual_seed(0)
    vocabulary = policy.model.config.vocab_size

    def ids(n: int) -> tuple[int, ...]:
        return tuple(
            torch.randint(
                2,
                vocabulary,
                (n,),
                generator=rng,
            ).tolist()
        )

    lengths = torch.randint(
        max(a.completion // 4, 1),
        a.completion + 1,
        (a.prompts, a.group),
        generator=rng,
    ).tolist()
    groups = [
        Group(Problem(p, "", ids(a.prompt)), tuple(Completion(ids(n), "", True) for n in row))
        for p, row in enumerate(lengths)
    ]
    advantages_PG = torch.ones(a.prompts, a.group)
    advantages_PG[: a.equal_groups] = 0
    batch = skip_zero_advantage(collate(groups, advantages_PG, pad_id=0, device=device))

    def run() -> None:
        for micro, _ in microbatches(batch, a.tokens_per_microbatch, packed=scorer.packed):
            with policy.autocast():
                logprobs_BT, _ = scorer(*micro.scorer_inputs)
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
    share = flops(policy.model, a.prompt, lengths) / min(seconds[1:]) / matmul_rate(device, a.precision)
    tokens = sum(map(sum, lengths)) / min(seconds[1:])
    return {"tokens_per_second": tokens, "peak_mib": peak, "utilisation": share}


def flops(model, prompt: int, lengths: list[list[int]]) -> float:
    """FLOPs of a forward and backward pass: 6 per weight and token (head: completion tokens only), plus attention."""
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    body = sum(p.numel() for p in model.parameters() if p is not head and p is not embedding)
    completion_tokens = sum(map(sum, lengths))
    c = model.config
    tokens = prompt * len(lengths) + completion_tokens
    pairs = len(lengths) * prompt**2 / 2 + sum(prompt * n + n**2 / 2 for row in lengths for n in row)
    width = c.num_attention_heads * (getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    return 6.0 * (body * tokens + head.numel() * completion_tokens) + 12.0 * c.num_hidden_layers * width * pairs


def matmul_rate(device, precision: str) -> float:
    """FLOPs a second of a product of two square matrices, the best of ten runs."""
    import torch

    n = 8192 if device.type == "cuda" else 2048
    x = torch.randn(
        n,
        n,
        device=device,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
    )
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        x @ x
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2.0 * n**3 / min(seconds)


def main() -> None:
    p = parser(
        __doc__,
        model=None,
        shape="qwen2.5-0.5b",
        device="cpu",
        precision="bf16",
        prompts=4,
        equal_groups=0,
        points="8:256:256",
        vocabulary=0,
        tokens_per_microbatch=16384,
        threads=2,
        repeats=3,
        output=None,
    )
    p.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)  # side and point, in a process of its own
    a = p.parse_args()
    if a.measure:
        a.side, point = a.measure
        a.group, a.prompt, a.completion = (int(number) for number in point.split(":"))
        print(json.dumps(measure(a)))
        return
    columns = ["group", "prompt", "completion", "tokens/s, packed", "padded", "times", "utilisation, packed", "padded"]
    columns += ["peak MiB, packed", "padded"]
    rows = []
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for point in a.points.split():
        found: dict[str, list[dict]] = {"packed": [], "padded": []}
        for number in range(a.repeats):
            for side in in_turn(found, number):
                command = [
                    sys.executable,
                    __file__,
                    *sys.argv[1:],
                    "--measure",
                    side,
                    point,
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr[-3000:])
                found[side].append(json.loads(done.stdout.splitlines()[-1]))
        values = {side: {name: [r[name] for r in all_of] for name in all_of[0]} for side, all_of in found.items()}
        median = {side: {name: statistics.median(x) for name, x in of.items()} for side, of in values.items()}
        times = ratios(values["packed"]["tokens_per_second"], values["padded"]["tokens_per_second"])
        rows.append({"point": point, "median": median, "found": found})
        cells = [*point.split(":")]
        for name, form in (
            ("tokens_per_second", ".0f"),
            ("utilisation", ".0%"),
            ("peak_mib", ".0f"),
        ):
            cells += [f"{median[side][name]:{form}}" for side in found]
        cells.insert(5, f"{times['ratio']:.2f} ({times['least']:.2f} to {times['greatest']:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    if a.output:
        arguments = {name: value for name, value in vars(a).items() if name not in ("measure", "output", "model")}
        write(
            a.output,
            about(arguments=arguments, rows=rows),
            "\n".join(lines),
        )


if __name__ == "__main__":
    main()
