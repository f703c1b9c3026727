"""Checks of ``gpu.py``: the device, the model's short checks at start, attention kernels, and scoring."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from bandwidth import copy_bandwidth
from gpu_common import Bench, Found, check, expect

from grpo.attention import enable_packing
from grpo.batch import Completion, Group, collate
from grpo.logprobs import CompletionScorer, head_is_plain
from grpo.model import without_cudnn_attention
from grpo.rollout import BuiltinEngine, SamplingParams, check_sampling
from grpo.rollout.llama_decoder import matches_model

KERNELS = ("math", "flash", "efficient", "cudnn", "override")
"""Names of the numbers that PyTorch gives the kernels of SDPA."""
NOMINAL = {"H200": 4.8e12, "H100": 3.35e12, "A100": 1.55e12, "B200": 8e12}
"""Bytes a second of the memory, by a part of the device's name."""


def product_error(device: torch.device) -> float:
    """The greatest error of an fp32 matrix product, relative to its greatest element."""
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=rng) for _ in range(2))
    exact = a.double() @ b.double()
    return float(((a.to(device) @ b.to(device)).cpu().double() - exact).abs().max() / exact.abs().max())


@contextmanager
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@check()
def versions(bench: Bench) -> Found:
    """torch >= 2.11, transformers >= 5.17, and a CUDA device with bf16 (compute capability 8.0)"""
    found = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    for name, module, least in (("torch", torch, (2, 11)), ("transformers", transformers, (5, 17))):
        numbers = tuple(int(part) for part in module.__version__.split("+")[0].split(".")[:2])
        expect(numbers >= least, f"{name} {module.__version__} is older than {least[0]}.{least[1]}")
    if bench.device.type == "cuda":
        expect(torch.cuda.is_available(), "PyTorch sees no CUDA device: is the driver too old for it?")
        capability = torch.cuda.get_device_capability(bench.device)
        found |= {"device": torch.cuda.get_device_name(bench.device), "capability": f"{capability[0]}.{capability[1]}"}
        found["GiB"] = torch.cuda.get_device_properties(bench.device).total_memory / 2**30
        expect(capability >= (8, 0), f"compute capability {capability}: no bf16")
    return found


@check()
def bandwidth(bench: Bench) -> Found:
    """a copy on the device moves at least 60% of its nominal bytes a second (100 GB/s on a device not known here)"""
    bench.need_real_gpu("memory of its own")
    found, name = copy_bandwidth(bench.device), torch.cuda.get_device_name(bench.device)
    nominal = next((rate for part, rate in NOMINAL.items() if part in name), 1e11 / 0.6)
    expect(found >= 0.6 * nominal, f"{found / 1e9:.0f} GB/s, nominal {nominal / 1e9:.0f}")
    return {"GB/s": found / 1e9, "nominal GB/s": nominal / 1e9}


@check(120)
def sampled_logprobs(bench: Bench) -> Found:
    """the mean log-prob of sampled tokens lies between -1 and -0.3, as of a trained model"""
    policy = bench.policy("fp32")
    groups = BuiltinEngine(policy).generate(bench.problems(), SamplingParams(8, 32), address=(0, "gpu", 0))
    mean = statistics.fmean(x for group in groups for c in group.completions for x in c.sampling_logprobs)
    expect(-1 <= mean <= -0.3, f"mean log-prob {mean:.2f}")
    return {"mean log-prob": mean}


def start_checks(bench: Bench) -> None:
    """The tests that every run makes of its model before the first step."""
    policy = bench.policy("bf16", packed=False)
    expect(head_is_plain(policy.model), "the head is not recognised as plain")
    check_sampling(policy)
    why = enable_packing(policy.model, policy.backbone)
    expect(why is None, f"packing is refused: {why}")
    expect(matches_model(policy.model), "the written-out decode step does not agree with the model's modules")
    check_sampling(policy)


@check()
def model_checks(bench: Bench) -> Found:
    """packing, the written-out decode step, the plain head and cached sampling all pass their checks at start"""
    start_checks(bench)
    return {}


@check()
def tf32_checks(bench: Bench) -> Found:
    """fp32 products are IEEE by default, and the checks at start also pass with TF32 products"""
    bench.need_gpu()
    is_forced = os.environ.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE") == "1"
    found = {"error": product_error(bench.device), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": is_forced}
    expect(is_forced or found["error"] < 1e-5, f"fp32 products err by {found['error']:.1e} of their greatest element")
    with tf32():
        found["error with TF32"] = product_error(bench.device)
        expect(found["error with TF32"] > 1e-5, "TF32 was switched on and changed nothing")
        start_checks(bench)
    return found


# --- attention kernels


def random_groups(bench: Bench, prompts: tuple[int, ...], lengths: tuple[int, ...]) -> list[Group]:
    rng = torch.Generator().manual_seed(2)

    def completion(n: int) -> Completion:
        return Completion(tuple(torch.randint(2, bench.vocabulary, (n,), generator=rng).tolist()), "", True)

    return [Group(problem, tuple(map(completion, lengths))) for problem in bench.problems(prompts)]


def scoring_groups(bench: Bench) -> list[Group]:
    return random_groups(bench, (9, 21), (3, 17, 8)) if bench.is_small else random_groups(bench, (60, 130), (9, 64, 33))


def attention_calls(bench: Bench, precision: str) -> dict[str, tuple]:
    """By their kind: the arguments of one SDPA call of each kind that scoring (packed, padded) and sampling (packed, not) make."""
    calls, original = {}, F.scaled_dot_product_attention

    def record(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        tensors = [x.detach().clone() for x in (query, key, value)]
        if torch.is_autocast_enabled(bench.device.type):
            tensors = [x.to(torch.bfloat16) for x in tensors]
        H, K, Q, S = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
        masks = "causal" if is_causal else "no mask" if attn_mask is None else f"{str(attn_mask.dtype)[6:]} mask"
        keys = "as many keys as queries" if S == Q else "one query" if Q == 1 else "other keys than queries"
        kind = f"{str(tensors[0].dtype)[6:]}, {masks}, {H} heads for {K}, {keys}"
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:  # a query that sees nothing (padding) has no exact result
            mask = mask | ~mask.any(dim=-1, keepdim=True)
        calls.setdefault(kind, (*tensors, mask, is_causal, scale, enable_gqa))
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    for packed in (True, False):
        policy = bench.policy(precision, packed=packed)
        batch = collate(scoring_groups(bench), torch.zeros(2, 3), pad_id=0, device=bench.device)
        scorer = CompletionScorer(policy.model)
        scorer.packed, _ = packed, scorer.plain_head
        with patch.object(F, "scaled_dot_product_attention", record):
            with policy.autocast():
                scorer(*batch.scorer_inputs)
            BuiltinEngine(policy, fast_decode=False).generate(
                bench.problems(), SamplingParams(2, 3), address=(0, "gpu", 0)
            )
    return calls


def exact_attention(q, k, v, mask, is_causal, scale) -> torch.Tensor:
    """In fp64, on the device of the tensors."""
    g, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(g, dim=1) if g > 1 else x for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(ones.triu(1), -torch.inf)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    return scores.softmax(dim=-1) @ v


def chosen_kernel(q, k, v, **options) -> str:
    return KERNELS[torch._fused_sdp_choice(q, k, v, **options)]


@check(90)
def sdpa(bench: Bench) -> Found:
    """SDPA takes neither its math kernel nor cuDNN's, and forward and backward are within 2% (bf16) or 1e-4 (fp32) of fp64"""
    found = {}
    without_cudnn_attention(bench.device)
    for precision, tolerance in (("bf16", 2e-2), ("fp32", 1e-4)):
        for kind, (*tensors, mask, is_causal, scale, gqa) in attention_calls(bench, precision).items():
            rounded = [x.requires_grad_() for x in tensors]
            options = dict(attn_mask=mask, dropout_p=0.0, is_causal=is_causal, scale=scale, enable_gqa=gqa)
            kernel = chosen_kernel(*rounded, **options)
            out = F.scaled_dot_product_attention(*rounded, **options)
            exact = [x.detach().cpu().double().requires_grad_() for x in tensors]
            wanted = exact_attention(*exact, None if mask is None else mask.detach().cpu(), is_causal, scale)
            gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
            grads = torch.autograd.grad(out, rounded, gradient.to(out.device, out.dtype))
            wanted_grads = torch.autograd.grad(wanted, exact, gradient.to(out.dtype).double())
            errors = [
                float((x.detach().cpu().double() - y).abs().max() / y.abs().max())
                for x, y in zip((out, *grads), (wanted.detach(), *wanted_grads), strict=True)
            ]
            found[kind] = f"{kernel} {max(errors):.1e}"
            expect(
                bench.device.type == "cpu" or kernel not in ("math", "cudnn"), f"{kind}: the {kernel} kernel is chosen"
            )
            expect(max(errors) < tolerance, f"{kind}: {kernel} differs by {max(errors):.1e} from fp64")
    return found


# --- scoring


def scored(bench: Bench, precision: str, *, packed: bool, device=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens, and the gradient of all weights, one after the other, on the CPU."""
    policy = bench.policy(precision, packed=packed, device=device)
    batch = collate(scoring_groups(bench), torch.zeros(2, 3), pad_id=0, device=policy.device)
    scorer = CompletionScorer(policy.model)
    scorer.packed = packed
    with policy.autocast():
        logprobs_BT, _ = scorer(*batch.scorer_inputs)
    weights_B = torch.linspace(-1, 1, len(batch)).to(policy.device)
    (logprobs_BT * weights_B[:, None]).sum().backward()
    gradient = torch.cat([p.grad.flatten().cpu() for p in policy.model.parameters()])
    return logprobs_BT.detach().cpu()[batch.completion_mask_BT.cpu()], gradient


@check(150)
def scoring(bench: Bench) -> Found:
    """packed = padded = CPU, log-probs and gradients, relative to their norms: in fp32 to 1e-3; in bf16 packed errs at most 1.5 times as much as padded"""
    exact_N, exact = scored(bench, "fp32", packed=False, device="cpu")
    found = {}
    for precision in ("fp32", "bf16"):
        for packed in (False, True):
            logprobs_N, gradient = scored(bench, precision, packed=packed)
            name = f"{precision} {'packed' if packed else 'padded'}"
            found[f"{name}, log-probs"] = float((logprobs_N - exact_N).norm() / exact_N.norm())
            found[f"{name}, gradient"] = float((gradient - exact).norm() / exact.norm())
    for what, most in (("log-probs", 0.05), ("gradient", 0.5)):
        for name in ("fp32 padded", "fp32 packed"):
            differs = found[f"{name}, {what}"]
            expect(differs < 1e-3, f"{name}: {what} differ from the CPU's by {differs:.1e}")
        padded, packed = (found[f"bf16 {name}, {what}"] for name in ("padded", "packed"))
        expect(padded < most, f"bf16 padded: {what} differ from the CPU's fp32 by {padded:.1e}")
        expect(packed < 1.5 * padded + 1e-3, f"bf16 packed: {what} differ by {packed:.1e}, padded by {padded:.1e}")
    return found
