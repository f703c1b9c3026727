"""Bound of a step on this machine: its FLOPs over the rate of matrix products of the same shapes.

    python benchmarks/step_bound.py --run runs/smollm2_135m --threads 2

``--run`` is the output folder of a run of all weights on one rank. A forward pass takes 2 FLOPs per
weight and token, an update 6. Prompts count once per group, and what all prompts begin with once
per rollout and micro-batch. The prefill has no head, the other phases have it at completion tokens,
and at beta 0 groups of equal rewards are not in the update.
Attention, norms, draws and the optimizer are not counted. Products have the mean number of rows of
their phase (at most 512 are measured), and run through all layers, so weights come from memory.
"""

import time
from math import ceil
from pathlib import Path
from statistics import mean

from common import markdown, parser  # isort: skip  # puts the checkout on the path

import grpo  # noqa: F401  # isort: skip  # before torch, for which it sets environment variables

import torch
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.attention.layout import MIN_SHARED
from grpo.config import load_config
from grpo.data import load_rows, make_problems
from grpo.model import load_tokenizer, resolve_model
from grpo.telemetry.records import read_lines


def flops_a_second(weights: list[torch.Tensor], num_rows: float) -> float:
    """Rate of the products of rows with each weight in turn, the best of three passes."""
    rows = min(round(num_rows), 512)
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights}
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)
        seconds.append(time.perf_counter() - started)
    return 2.0 * rows * sum(weight.numel() for weight in weights) / min(seconds)


def main() -> None:
    a = parser(__doc__, run=None, threads=2).parse_args()
    torch.set_num_threads(a.threads)
    config = load_config(["--config", str(Path(a.run, "config.yaml"))])
    lines = [line for line in read_lines(Path(a.run, "metrics.jsonl")) if "step_time" in line]
    means = {}
    for name in ("completions/mean_length", "completions/max_length", "frac_reward_zero_std"):
        means[name] = mean(line[name] for line in lines)

    groups = config.rollout.prompts_per_step
    rows = groups * config.rollout.num_generations
    # num_tokens is of all steps, and counts a prompt for each of its completions.
    tokens = lines[-1]["num_tokens"] / len(lines)
    completion_tokens = rows * means["completions/mean_length"]
    prompt_length = (tokens - completion_tokens) / rows

    path = resolve_model(config.model.name_or_path, config.data.dataset)
    data_rows = load_rows(config.data, train=True, seed=config.seed)
    problems = make_problems(data_rows, config.data, load_tokenizer(path)).problems
    shared = 0
    for of_prompts in zip(*(problem.prompt_ids for problem in problems), strict=False):
        if len(set(of_prompts)) > 1:
            break
        shared += 1
    shared = shared if shared >= MIN_SHARED else 0
    own_length = prompt_length - shared
    prompt_tokens = shared + groups * own_length

    is_skipping = config.algorithm.skips_zero_advantage
    updated = 1 - means["frac_reward_zero_std"] if is_skipping else 1.0
    # Micro-batches are cut by tokens in which a prompt counts once per group. Each computes what
    # its prompts begin with.
    counted_tokens = updated * (groups * prompt_length + completion_tokens)
    microbatches = max(ceil(counted_tokens / config.optim.tokens_per_microbatch), 1)
    updated_tokens = counted_tokens - (updated * groups - microbatches) * shared
    update_rows = updated_tokens / microbatches

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    head = model.get_output_embeddings().weight
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    body = [module.weight for module in linears if module.weight is not head]
    size = sum(weight.numel() for weight in body)
    head_size = head.numel()
    update_flops = 6 * updated * completion_tokens * head_size + 6 * updated_tokens * size
    # A completion's first token comes from the prefill, and its row leaves when it ends.
    decode_flops = 2 * (completion_tokens - rows) * size + 2 * completion_tokens * head_size
    decode_rows = completion_tokens / means["completions/max_length"]
    update_flops *= config.algorithm.num_iterations
    phases = [
        # phase, its time in a run, FLOPs, rows of a product, weights
        ("prefill", "rollout", 2 * prompt_tokens * size, prompt_tokens, body),
        ("decode", "rollout", decode_flops, decode_rows, [*body, head]),
        ("update", "update", update_flops, update_rows, [*body, head]),
    ]
    table = []
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        real = {w: torch.randn(w.shape, dtype=dtype) for w in [*body, head]}
        bound = {"rollout": 0.0, "update": 0.0}
        for phase, part, flops, num_rows, weights in phases:
            speed = flops_a_second([real[w] for w in weights], num_rows)
            bound[part] += flops / speed
            figures = [f"{num_rows:.0f}", f"{flops / 1e9:.0f}", f"{speed / 1e9:.0f}"]
            table.append([precision, phase, *figures, f"{flops / speed:.2f}", "-", "-"])
        for part, seconds in bound.items():
            measured = mean(line[f"time/{part}"] for line in lines)
            is_of_run = precision == config.runtime.precision
            of_run = [f"{measured:.2f}", f"{seconds / measured:.0%}"] if is_of_run else ["-", "-"]
            table.append([precision, f"**{part}**", "-", "-", "-", f"{seconds:.2f}", *of_run])
    columns = ["precision", "phase", "rows", "GFLOPs", "GFLOP/s", "at least, s", "run, s", "share"]
    print(markdown(columns, table))


if __name__ == "__main__":
    main()
