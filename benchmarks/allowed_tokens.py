"""Time and memory of ``rollout.keep_sampling_mask``: a rollout, then scoring with its backward pass, with and without.

    python benchmarks/allowed_tokens.py --config configs/gsm8k_cpu.yaml model.name_or_path=DIR data.dataset=FILE

Arguments are those of ``train_grpo.py``. The sides alternate; times are seconds of the CPU (of the clock on a GPU), the
medians of the rounds.
"""

import sys
import time
from dataclasses import replace
from statistics import median

import common  # noqa: F401  # isort: skip  # puts the checkout on the path
import grpo  # noqa: F401  # isort: skip  # before torch, for which it sets environment variables

import torch

from grpo.algorithm.batch import collate, microbatches
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import load_config
from grpo.data import load_rows, make_problems
from grpo.model import load_policy, load_tokenizer
from grpo.rollout import BuiltinEngine, SamplingParams, check_model

SIDES = {
    "no filter": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.9, mask": {"top_p": 0.9, "keep_sampling_mask": True},
    "top_p 0.9, top_k 50": {"top_p": 0.9, "top_k": 50},
    "top_p 0.9, top_k 50, mask": {"top_p": 0.9, "top_k": 50, "keep_sampling_mask": True},
}
ROUNDS = 5


def main() -> None:
    config = load_config(sys.argv[1:])
    torch.set_num_threads(config.runtime.threads_per_rank or 1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    tokenizer = load_tokenizer(config.model.name_or_path)
    policy = load_policy(config.model.name_or_path, tokenizer, device=device, precision=config.runtime.precision)
    problems = make_problems(
        load_rows(config.data, train=True, seed=0),
        config.data,
        tokenizer,
    ).problems
    problems = problems[: config.rollout.prompts_per_step]
    scorer = CompletionScorer(policy.model)
    engine = BuiltinEngine(policy)
    check_model(policy, scorer)
    plain = SamplingParams(config.rollout.num_generations, config.rollout.max_completion_length)
    seconds = {side: ([], []) for side in SIDES}
    for _ in range(ROUNDS):
        for side, changes in SIDES.items():
            start = clock()
            groups = engine.generate(
                problems,
                replace(plain, **changes),
                seed_key=(0, "rollout", 0),
            )
            sampled = clock()
            advantages_PG = torch.zeros(len(groups), plain.num_generations)
            batch = collate(groups, advantages_PG, pad_id=policy.pad_id, device=device)
            for micro, _ in microbatches(batch, config.optim.tokens_per_microbatch, packed=scorer.packed):
                with policy.autocast():
                    logprobs_BT, _ = scorer(*micro.scorer_inputs)
                logprobs_BT.sum().backward()
            policy.model.zero_grad(set_to_none=True)
            num_tokens = int(batch.completion_mask_BT.sum())
            kept = 0 if batch.allowed is None else len(batch.allowed.ids_K) / num_tokens
            for times, value in zip(
                seconds[side],
                (sampled - start, clock() - sampled),
                strict=True,
            ):
                times.append(1e6 * value / num_tokens)
            facts = f"{num_tokens} tokens, kept {kept:.2f} ids a token: {4 * kept + 4 * bool(kept):.1f} bytes"
            rollout, update = (median(times) for times in seconds[side])
            print(f"{side:26} us a token: rollout {rollout:5.0f}, scoring and backward {update:5.0f}; {facts}")


if __name__ == "__main__":
    main()
