"""Figures of ``gpu.py``: the machine, log-probs and gradients against fp64, a whole GRPO step.

The docstring of a figure's function says what is measured, and when the figure fails. Each figure
has a process of its own, and so may replace functions for good.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

import common  # noqa: F401  # isort: skip  # puts the checkout on the path

import torch
from random_model import SIZES, save_random_model
from rollout import EOS, ForcedLengths, forced_draw
from torch import Tensor
from torch.nn.functional import cross_entropy
from update import flops, matmul_rate

from grpo.algorithm.batch import Batch, Group, Problem, collate, microbatches
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import policy_loss
from grpo.model import Policy, load_policy, load_tokenizer
from grpo.rollout import BuiltinEngine, SamplingParams, check_model, decode_loop

GROUP = 8
TOKENS_PER_MICROBATCH = 16384
PEAK_FLOPS = 989e12
"""Of an H100 SXM or H200 in bf16, by its data sheet."""


def forked(function: Callable[[], None], log: Path) -> multiprocessing.Process:
    """Start a fork of this process that calls a function; its output goes to ``log``, its name."""

    def run() -> None:
        with log.open("w") as file:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
        function()

    process = multiprocessing.get_context("fork").Process(
        target=run,
        name=str(log),
    )
    process.start()
    return process


@dataclass(frozen=True)
class Bench:
    """The device, and the shape of the random model on it, a name in ``SIZES``."""

    device: torch.device
    shape: str
    scratch: Path

    def need_gpu(self) -> None:
        if self.device.type != "cuda":
            raise SkipTest("needs a GPU")

    def policy(self, precision: str) -> Policy:
        """The random model; no token ends a completion."""
        path = str(self.scratch / self.shape)
        policy = load_policy(
            path,
            load_tokenizer(path),
            device=self.device,
            precision=precision,
        )
        policy.eos_ids = ()
        return policy

    def problems(self, *lengths: int) -> list[Problem]:
        """Prompts of random tokens."""
        rng = torch.Generator().manual_seed(1)
        problems = []
        for number, length in enumerate(lengths):
            ids = torch.randint(2, 500, (length,), generator=rng)
            problems.append(Problem(number, "", tuple(ids.tolist())))
        return problems


def machine(bench: Bench) -> dict:
    """speed of a matrix product; writes the random models of all other parts"""
    found = {"TFLOP/s of a product": matmul_rate(bench.device, "bf16") / 1e12}
    if bench.device.type == "cuda":
        found["GPU"] = torch.cuda.get_device_name(bench.device)
    for shape in {"small", bench.shape}:
        # With weights of the usual size attention is almost an average, and wrong positions or
        # masks would hardly show.
        scale = 40.0 if shape == "small" else 4.0
        save_random_model(bench.scratch / shape, query_scale=scale, **SIZES[shape])
    return found


def batch_of(policy: Policy, groups: list[Group]) -> Batch:
    """A batch with advantages from -1 to 1 in each group."""
    size = len(groups[0].completions)
    advantages_PG = torch.linspace(-1, 1, size).expand(len(groups), -1)
    return collate(groups, advantages_PG, pad_id=0, device=policy.device)


def packed(bench: Bench) -> tuple[Policy, CompletionScorer]:
    """The model, and its scorer of packed rows."""
    policy = bench.policy("bf16")
    scorer = CompletionScorer(policy.model)
    reason = check_model(policy, scorer)
    assert reason is None, reason
    return policy, scorer


def taken_gradient(policy: Policy) -> Tensor:
    """The gradient as one vector in fp32; it is zeroed after that."""
    parameters = policy.model.parameters()
    gradient = torch.cat([p.grad.float().flatten() for p in parameters])
    policy.model.zero_grad()
    return gradient


def reference(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs ``[N]`` of all completion tokens, and gradient, by the model alone in fp64."""
    model = policy.model.double()
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    found = []
    for b, advantage in enumerate(batch.advantages_B):
        prompt = batch.prompt_lengths_B[b]
        length = batch.completion_mask_BT[b].sum()
        ids_S = batch.sequence_ids_BS[b, : prompt + length]
        logits_SV = model(input_ids=ids_S[None], use_cache=False).logits[0]
        losses_n = cross_entropy(
            logits_SV[prompt - 1 : -1],
            ids_S[prompt:],
            reduction="none",
        )
        (advantage * -losses_n.sum()).backward()
        found.append(-losses_n.detach())
    gradient = taken_gradient(policy)
    model.float()
    model.set_attn_implementation(implementation)
    return torch.cat(found), gradient


def exact(bench: Bench) -> dict:
    """mean error of log-probs (nats) and relative error of gradients, by fp64: at most 1e-3 in fp32
    and 0.6 in bf16, and for packed rows at most 1.5 times the error for padded ones"""
    policy, scorer = packed(bench)
    # Rows end at many lengths.
    policy.eos_ids = tuple(range(2, policy.model.config.vocab_size, 100))
    groups = BuiltinEngine(policy, cuda_graphs=True).generate(
        bench.problems(100, 200),
        SamplingParams(GROUP, 128),
        seed_key=(0, "gpu", 0),
    )
    batch = batch_of(policy, groups)
    exact_N, exact_gradient = reference(policy, batch)
    found = {}
    wrong = []
    for precision, limit in (("fp32", 1e-3), ("bf16", 0.6)):
        policy.precision = precision
        for side in ("padded", "packed"):
            scorer.is_packed = side == "packed"
            with policy.autocast():
                logprobs_BT, _ = scorer(*batch.scorer_inputs)
            weighted_B = logprobs_BT.sum(dim=1) * batch.advantages_B
            weighted_B.sum().backward()
            distance_N = logprobs_BT.detach()[batch.completion_mask_BT] - exact_N
            difference = taken_gradient(policy) - exact_gradient
            errors = [
                float(distance_N.abs().mean()),
                float(difference.norm() / exact_gradient.norm()),
            ]
            found[f"{precision} {side}"] = errors
            for error, padded in zip(errors, found[f"{precision} padded"], strict=True):
                if not error < min(limit, 1.5 * padded + 1e-3):
                    wrong.append(f"{precision} {side}: {errors}")
    found["wrong"] = "; ".join(wrong)
    return found


def step(bench: Bench) -> dict:
    """seconds, tokens, memory and MFU"""
    # Completions have given lengths.
    decode_loop.draw_tokens = forced_draw
    is_small = bench.shape == "small"
    P = 2 if is_small else 8
    prompt = 16 if is_small else 256
    T = 2 * prompt
    problems = bench.problems(*[prompt] * P)
    policy, scorer = packed(bench)
    policy.eos_ids = (EOS,)
    # Weights do not move, so that every step is the same. AdamW computes all the same.
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.0, fused=True)
    said = []
    engine = ForcedLengths(policy, cuda_graphs=True, warn=said.append)
    rng = torch.Generator().manual_seed(0)
    shape = (P, GROUP)
    engine.lengths_UG = torch.randint(T // 4, T + 1, shape, generator=rng)

    def update(groups: list[Group]):
        """One update, as in ``train_grpo.update``."""
        batch = batch_of(policy, groups)
        for micro, _ in microbatches(batch, TOKENS_PER_MICROBATCH, packed=True):
            with policy.autocast():
                new_BT, _ = scorer(*micro.scorer_inputs)
            loss_sum, _ = policy_loss(
                new_BT,
                new_BT.detach(),
                micro.advantages_B,
                micro.loss_mask_BT,
            )
            (loss_sum / batch.loss_mask_BT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if bench.device.type == "cuda":
            torch.cuda.synchronize()

    sampling = []
    updates = []
    for number in range(4):
        started = time.perf_counter()
        groups = engine.generate(
            problems,
            SamplingParams(GROUP, T),
            seed_key=(0, "gpu", number),
        )
        sampled = time.perf_counter()
        update(groups)
        sampling.append(sampled - started)
        updates.append(time.perf_counter() - sampled)

    # The first step is warm-up.
    sampling_s = statistics.median(sampling[1:])
    update_s = statistics.median(updates[1:])
    tokens = int(engine.lengths_UG.sum())
    work = flops(policy.model, prompt, engine.lengths_UG.tolist())
    return {
        "tokens": tokens,
        "first step s": sampling[0] + updates[0],
        "step s": sampling_s + update_s,
        "sampled tokens/s": tokens / sampling_s,
        "updated tokens/s": tokens / update_s,
        "MFU of the update": work / update_s / PEAK_FLOPS,
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
        "wrong": "; ".join(said),
    }
