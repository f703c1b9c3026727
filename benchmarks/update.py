r"""Scoring and its backward pass, packed groups beside padded rows: tokens a second, peak memory.

    python benchmarks/update.py --model DIR
    python benchmarks/update.py --model DIR \
        --points "4:256:256 8:256:256 16:256:256 8:256:64 8:64:256"
    python benchmarks/update.py --model DIR --equal-groups 2
        of the 4 groups, 2 have advantage 0 and are skipped

A point is group:prompt:longest completion, in tokens. Each measurement has a fresh process, and the
two sides alternate. Tokens are completion tokens, the same number on both sides. Utilisation is
relative to a large matrix product on this machine with the same threads and precision. The counted
work is each prompt once, forward and backward. Peak memory is the growth of the process's peak RSS
during the pass.
"""

import argparse
import json
import resource
import statistics
import sys
import time

from common import about, in_turn, markdown, parser, ratios, run, shown, write

import torch  # isort: skip
from rollout import load

from grpo.algorithm.batch import (
    Completion,
    Group,
    Problem,
    collate,
    microbatches,
    skip_zero_advantage,
)
from grpo.algorithm.logprobs import CompletionScorer
from grpo.rollout import check_model

FORMATS = {
    "tokens_per_second": ".0f",
    "utilisation": ".0%",
    "peak_mib": ".0f",
}


def measure(a) -> dict[str, float]:
    """Tokens a second, peak memory and utilisation of one side at one point, in this process."""
    torch.set_num_threads(a.threads)
    device = torch.device("cpu")
    policy = load(a, device)
    scorer = CompletionScorer(policy.model)
    assert check_model(policy, scorer) is None
    scorer.is_packed = a.side == "packed"
    rng = torch.Generator().manual_seed(0)
    vocabulary = policy.model.config.vocab_size

    def ids(n: int) -> tuple[int, ...]:
        drawn = torch.randint(2, vocabulary, (n,), generator=rng)
        return tuple(drawn.tolist())

    shortest = max(a.completion // 4, 1)
    shape = (a.prompts, a.group)
    lengths_PG = torch.randint(shortest, a.completion + 1, shape, generator=rng)
    lengths = lengths_PG.tolist()
    groups = []
    for number, row in enumerate(lengths):
        problem = Problem(number, "", ids(a.prompt))
        completions = tuple(Completion(ids(n), "", True) for n in row)
        groups.append(Group(problem, completions))
    advantages_PG = torch.ones(a.prompts, a.group)
    advantages_PG[: a.equal_groups] = 0
    batch = collate(groups, advantages_PG, pad_id=0, device=device)
    batch = skip_zero_advantage(batch)

    def update() -> None:
        for micro, _ in microbatches(batch, a.tokens_per_microbatch, packed=scorer.is_packed):
            with policy.autocast():
                logprobs_BT, _ = scorer(*micro.scorer_inputs)
            logprobs_BT.sum().backward()
        policy.model.zero_grad(set_to_none=True)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    best = min(seconds[1:])
    work = flops(policy.model, a.prompt, lengths)
    return {
        "tokens_per_second": int(lengths_PG.sum()) / best,
        "peak_mib": peak,
        "utilisation": work / best / matmul_rate(device, a.precision),
    }


def flops(model, prompt: int, lengths: list[list[int]]) -> float:
    """FLOPs of a forward and backward pass: 6 per weight and token (head: completion tokens only),
    plus attention."""
    c = model.config
    head = model.get_output_embeddings().weight
    embedding = model.get_input_embeddings().weight
    body = 0
    for p in model.parameters():
        if p is not head and p is not embedding:
            body += p.numel()
    completion_tokens = 0
    pairs = 0.0
    for row in lengths:
        completion_tokens += sum(row)
        pairs += prompt**2 / 2
        pairs += sum(prompt * n + n**2 / 2 for n in row)
    tokens = prompt * len(lengths) + completion_tokens
    # Not every configuration names the width of a head.
    head_width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    width = c.num_attention_heads * head_width
    products = 6.0 * (body * tokens + head.numel() * completion_tokens)
    return products + 12.0 * c.num_hidden_layers * width * pairs


def matmul_rate(device, precision: str) -> float:
    """FLOPs a second of a product of two square matrices, the best of ten runs."""
    n = 8192 if device.type == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(n, n, device=device, dtype=dtype)
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
        precision="bf16",
        prompts=4,
        equal_groups=0,
        points="8:256:256",
        tokens_per_microbatch=16384,
        threads=2,
        repeats=3,
        output=None,
    )
    # Side and point, for the fresh process of one measurement.
    p.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.measure:
        a.side, point = a.measure
        a.group, a.prompt, a.completion = map(int, point.split(":"))
        print(json.dumps(measure(a)))
        return

    columns = ["group", "prompt", "completion", "tokens/s, packed", "padded", "times"]
    columns += ["utilisation, packed", "padded", "peak MiB, packed", "padded"]
    rows = []
    results = []
    for point in a.points.split():
        by_side = {"packed": [], "padded": []}
        for number in range(a.repeats):
            for side in in_turn(by_side, number):
                printed = run(sys.executable, __file__, *sys.argv[1:], "--measure", side, point)
                # The process may print warnings first.
                last_line = printed.splitlines()[-1]
                by_side[side].append(json.loads(last_line))
        results.append({"point": point, "found": by_side})
        cells = point.split(":")
        for name, form in FORMATS.items():
            values = []
            for measurements in by_side.values():
                numbers = [measurement[name] for measurement in measurements]
                values.append(numbers)
                cells.append(f"{statistics.median(numbers):{form}}")
            if name == "tokens_per_second":
                cells.append(shown(ratios(*values)))
        rows.append(cells)
    text = markdown(columns, rows)
    print(text)
    write(a.output, about(a, rows=results), text)


if __name__ == "__main__":
    main()
