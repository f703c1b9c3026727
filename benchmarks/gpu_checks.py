"""Checks of ``gpu.py`` without the trainer: device, model, attention, scoring, CUDA graphs; figures of sampling."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import SkipTest
from unittest.mock import patch

import common  # noqa: F401  # isort: skip  # puts the checkout on the path
import torch
import torch.nn.functional as F
import transformers
from random_model import save_random_model
from rollout import SHAPES, copy_bandwidth
from torch.nn.attention import SDPBackend

from grpo.algorithm.batch import Completion, Group, Problem, collate
from grpo.algorithm.logprobs import CompletionScorer, head_is_plain
from grpo.attention import enable_packing
from grpo.attention import fast_paths as parts
from grpo.model import Policy, load_policy, load_tokenizer
from grpo.rollout import BuiltinEngine, SamplingParams, check_sampling, split_into_waves
from grpo.rollout.cuda_graphs import CUDAGraphRunner
from grpo.rollout.llama_decoder import matches_model
from grpo.run.proofs import prove_update

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
# With tied embeddings, rows of a model of this width repeat one token.
SIZES = {"small": SMALL | dict(vocab_size=512, tie_word_embeddings=False)}
SIZES |= {name: shape | dict(vocab_size=151936, tie_word_embeddings=True) for name, shape in SHAPES.items()}


def forked(function: Callable[[], None], log: Path) -> multiprocessing.Process:
    """Start a fork of this process that calls a function; its output goes to the file ``log``, which is its name."""

    def run() -> None:
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        function()

    process = multiprocessing.get_context("fork").Process(target=run, name=str(log))
    process.start()
    return process


def named(name: str, about: str, function: Callable, **options) -> Callable:
    """A check or figure of its own: a function with some of its arguments."""
    result = partial(function, **options)
    result.__name__, result.__doc__ = name, about
    return result


@dataclass(frozen=True)
class Bench:
    """The device that is checked, and the random model on it: ``shape`` is a name in ``SIZES``."""

    device: torch.device
    shape: str
    scratch: Path

    @property
    def kind(self) -> str:
        """``emulated``: the device that ``tests/cuda`` emulates on a CPU build of PyTorch."""
        is_real = torch.version.cuda or torch.version.hip or self.device.type == "cpu"
        return self.device.type if is_real else "emulated"

    def need(self, *kinds: str) -> None:
        """SkipTest, which says why, unless the device is of one of these kinds."""
        if self.kind not in kinds:
            raise SkipTest(f"not on {self.kind}, only on {' and '.join(kinds)}")

    def problems(self, lengths: tuple[int, ...] | None = None) -> list[Problem]:
        """Prompts of random tokens; of uneven lengths, if none are given."""
        lengths = lengths or ((3, 12) if self.shape == "small" else (20, 70, 200, 270))
        shape, rng = (len(lengths), max(lengths)), torch.Generator().manual_seed(1)
        ids = torch.randint(2, SIZES[self.shape]["vocab_size"], shape, generator=rng).tolist()
        return [Problem(u, "", tuple(ids[u][:n])) for u, n in enumerate(lengths)]

    def policy(self, precision: str, *, packed: bool = True, device: torch.device | None = None) -> Policy:
        """The random model; no token ends a completion."""
        path = str(self.model_folder(self.shape))
        policy = load_policy(path, load_tokenizer(path), device=device or self.device, precision=precision)
        policy.eos_ids = ()
        if packed:
            assert (why := enable_packing(policy.model, policy.backbone)) is None, f"packing is refused: {why}"
        return policy

    def model_folder(self, shape: str) -> Path:
        """A Hugging Face folder with random weights; written at first use.

        By a process of its own: transformers may initialise CUDA meanwhile, and a run that is forked after that has
        none.
        """
        folder = self.scratch / f"model-{shape}"
        if not folder.exists():
            # With the usual initialization attention is almost an average: wrong positions or masks would hardly show.
            scale = 40.0 if shape == "small" else 4.0
            unfinished = self.scratch / "unfinished"
            write = partial(save_random_model, unfinished, query_scale=scale, **SIZES[shape])
            process = forked(write, self.scratch / f"model-{shape}.txt")
            process.join()
            assert process.exitcode == 0, Path(process.name).read_text(errors="replace")[-300:]
            unfinished.rename(folder)
        return folder


def versions(bench: Bench) -> dict:
    """torch >= 2.11, transformers >= 5.17; a GPU has bf16 (compute capability 8.0), and 60% of its nominal bandwidth"""
    found = {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda}
    for module, least in ((torch, [2, 11]), (transformers, [5, 17])):
        assert [int(n) for n in module.__version__.split(".")[:2]] >= least, f"{module.__name__} is too old"
    if bench.device.type == "cuda":
        device = torch.cuda.get_device_properties(bench.device)
        found |= {"device": device.name, "GiB": device.total_memory / 2**30}
        assert device.major >= 8, f"compute capability {device.major}.{device.minor}: no bf16"
    if bench.kind == "cuda":
        known = {"H200": 4800, "H100": 3350, "A100": 1550, "B200": 8000}
        nominal = next((rate for part, rate in known.items() if part in device.name), 100)
        found["GB/s"] = copy_bandwidth(bench.device) / 1e9
        assert found["GB/s"] >= 0.6 * nominal, f"{found['GB/s']:.0f} GB/s, nominal are {nominal}"
    return found


def model_checks(bench: Bench) -> dict:
    """the model passes its checks at start, and its sampled tokens have a mean log-prob of -1 to -0.3"""
    policy = bench.policy("bf16", packed=False)
    assert head_is_plain(policy.model), "the head is not recognised as plain"
    check_sampling(policy)
    assert (why := enable_packing(policy.model, policy.backbone)) is None, f"packing is refused: {why}"
    assert matches_model(policy.model), "the written-out decode step does not agree with the model's modules"
    check_sampling(policy)
    groups = BuiltinEngine(policy).generate(bench.problems(), SamplingParams(8, 32), seed_key=(0, "gpu", 0))
    mean = statistics.fmean(x for group in groups for c in group.completions for x in c.sampling_logprobs)
    assert -1 <= mean <= -0.3, f"mean log-prob {mean:.2f}"
    return {"mean log-prob": mean}


def tf32_checks(bench: Bench) -> dict:
    """fp32 products are IEEE by default, and the checks at start also pass with TF32 products"""
    bench.need("cuda", "emulated")
    (a, b), errors = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)), []
    for precision in (torch.get_float32_matmul_precision(), "high"):
        torch.set_float32_matmul_precision(precision)
        errors.append(float(((a.to(bench.device) @ b.to(bench.device)).cpu() - a.double() @ b.double()).abs().max()))
    assert errors[0] < 1e-3 < errors[1], f"products err by {errors[0]:.1e}, with TF32 by {errors[1]:.1e}"
    return {"error": errors[0], "error with TF32": errors[1]} | model_checks(bench)


def scored(policy: Policy, groups: list[Group], *, packed: bool = False, temperature: float = 1.0) -> torch.Tensor:
    """The log-probs of the tokens of all completions, one after the other, with gradients."""
    zeros_PG = torch.zeros(len(groups), len(groups[0].completions))
    batch = collate(groups, zeros_PG, pad_id=0, device=policy.device)
    scorer = CompletionScorer(policy.model, temperature)
    scorer.packed = packed
    return scorer(*batch.scorer_inputs)[0][batch.completion_mask_BT]


def random_groups(bench: Bench) -> list[Group]:
    problems = bench.problems()
    rows = tuple(Completion(problems[-1].prompt_ids[n :: n + 2], "", True) for n in range(3))
    return [Group(problem, rows) for problem in problems[:2]]


def sdpa(bench: Bench) -> dict:
    """SDPA takes no math or cuDNN kernel, and forward and backward are within 2% (bf16) or 1e-4 (fp32) of fp64"""
    attention, found = F.scaled_dot_product_attention, {}

    @torch.enable_grad()
    def compared(tensors, mask, options) -> tuple[str, float]:
        """The kernel, and the greatest error of output and gradients, each relative to its greatest element."""
        inputs = [x.detach().requires_grad_() for x in tensors]
        out = attention(*inputs, mask, **options)
        # The reference is PyTorch's formula without a fused kernel, in fp64 on the CPU.
        exact = [x.detach().cpu().double().requires_grad_() for x in tensors]
        bias = mask if mask is None else mask.cpu().double().log() if mask.dtype == torch.bool else mask.cpu().double()
        wanted, _ = torch.ops.aten._scaled_dot_product_attention_math(*exact, bias, **options)
        gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
        grads = torch.autograd.grad(out, inputs, gradient.to(out.device))
        pairs = zip((out, *grads), (wanted, *torch.autograd.grad(wanted, exact, gradient.double())), strict=True)
        errors = [(x.detach().cpu() - y.detach()).abs().max() / y.detach().abs().max() for x, y in pairs]
        return SDPBackend(torch._fused_sdp_choice(*inputs, mask, **options)).name, float(max(errors))

    def checked(query, key, value, attn_mask=None, dropout_p=0.0, **options):
        dtype = torch.bfloat16 if torch.is_autocast_enabled(bench.device.type) else query.dtype
        lengths = "S = Q" if key.shape[2] == query.shape[2] else "Q = 1" if query.shape[2] == 1 else "S > Q"
        mask = "causal" if options.get("is_causal") else f"mask {getattr(attn_mask, 'dtype', None)}"
        kind = f"{dtype}, {query.shape[1]} heads for {key.shape[1]}, {lengths}, {mask}".replace("torch.", "")
        if kind not in found and key.shape[2] > 4:  # the check of the head has two tokens
            mask = attn_mask
            if mask is not None and mask.dtype == torch.bool:  # a query that sees nothing (padding) has no exact result
                mask = mask | ~mask.any(dim=-1, keepdim=True)
            kernel, error = compared([x.to(dtype) for x in (query, key, value)], mask, options)
            found[kind] = words = f"{kernel} differs by {error:.1e} from fp64"
            assert bench.kind == "cpu" or kernel not in ("MATH", "CUDNN_ATTENTION"), f"{kind}: the kernel is {kernel}"
            assert error < (2e-2 if dtype == torch.bfloat16 else 1e-4), f"{kind}: {words}"
        return attention(query, key, value, attn_mask, dropout_p, **options)

    for precision, packed in (("bf16", True), ("bf16", False), ("fp32", True), ("fp32", False)):
        policy = bench.policy(precision, packed=packed)
        engine = BuiltinEngine(policy, fast_decode=False)
        with patch.object(F, "scaled_dot_product_attention", checked):
            engine.generate(bench.problems(), SamplingParams(2, 3), seed_key=(0, "gpu", 0))
            with policy.autocast():
                scored(policy, random_groups(bench), packed=packed)
    return found


def scoring(bench: Bench) -> dict:
    """log-probs and gradients, packed = padded = CPU: to 1e-3 in fp32; in bf16 packed errs at most 1.5 times as much"""
    exact, found, here = {}, {}, bench.device
    kinds = [("fp32", False, here), ("fp32", True, here), ("bf16", False, here), ("bf16", True, here)]
    for precision, packed, device in [("fp32", False, torch.device("cpu")), *kinds]:
        policy = bench.policy(precision, packed=packed, device=device)
        with policy.autocast():
            logprobs_N = scored(policy, random_groups(bench), packed=packed)
        (logprobs_N * torch.linspace(-1, 1, len(logprobs_N), device=device)).sum().backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in policy.model.parameters()])
        for what, values in (("log-probs", logprobs_N.detach().cpu()), ("gradient", gradient)):
            error = float((values - exact.setdefault(what, values)).norm() / exact[what].norm())
            most = 1e-3 if precision == "fp32" else 0.05 if what == "log-probs" else 0.5
            if precision == "bf16" and packed:
                most = 1.5 * found[f"bf16 padded, {what}"] + 1e-3
            name = f"{precision} {'packed' if packed else 'padded'}, {what}"
            found[name] = error
            assert error < most, f"{name}: differ by {error:.1e} from the CPU's in fp32, allowed are {most:.1e}"
    return found


def fast_paths(bench: Bench) -> dict:
    """every fast path is right and stays on; the time without each part, divided by the time with all"""
    bench.need("cuda", "emulated")
    policy = bench.policy("bf16")
    scorer, world = CompletionScorer(policy.model), SimpleNamespace(device=bench.device, all_true=bool)
    scorer.packed = True
    said = prove_update(world, policy, scorer, [], checkpointing=False)
    engine, is_real = BuiltinEngine(policy, warn=said.append), bench.kind == "cuda"
    sampling = SamplingParams(8, 64 if is_real else 8)
    groups = engine.generate(bench.problems(), sampling, seed_key=(0, "gpu", 0))
    batch = collate(groups, torch.zeros(len(groups), 8), pad_id=0, device=bench.device)

    def seconds(pass_: Callable, without: str) -> float:
        with parts.without(without):
            pass_()
            torch.cuda.synchronize()
            start = time.perf_counter()
            pass_()
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def update() -> None:
        with policy.autocast():
            scorer(*batch.scorer_inputs)[0].sum().backward()
        policy.model.zero_grad()

    def rollout() -> None:
        engine.generate(bench.problems(), sampling, seed_key=(0, "gpu", 1))

    found = {}
    for pass_, names in ((update, parts.UPDATE), (rollout, parts.DECODING)):
        for name in filter(parts.is_on, names if is_real else names[:1]):
            pairs = [(seconds(pass_, name), seconds(pass_, "none")) for _ in range(5 if is_real else 1)]
            found[name] = statistics.median(plain / fast for plain, fast in pairs)
    off = [line for line in said if is_real or "TORCHDYNAMO_DISABLE" not in line]  # it has no compiler
    assert not off, " ".join(off)
    return found


NOISE = {"fp32": 5e-3, "bf16": 1.0}  # in bf16 it was 0.55 on a CPU for random tokens, one percent of their log-probs
"""Most that the loop's log-probs may differ from exact ones on average, in nats; those of graphs: twice the loop's."""


class Sides:
    """The decode loop and CUDA graphs, with the same policy and the same random numbers."""

    def __init__(self, bench: Bench, precision: str, **changes):
        self.bench, self.policy, self.said = bench, bench.policy(precision), []
        self.sampling = replace(SamplingParams(4, 12) if bench.shape == "small" else SamplingParams(8, 48), **changes)
        self.loop = BuiltinEngine(self.policy)
        self.graphs = BuiltinEngine(self.policy, cuda_graphs=True, warn=self.said.append)
        rows = [completion.ids for completion in self.generate(self.loop)]
        # From now on some tokens end a completion, so that rows end at many lengths, but none of the first few tokens.
        ends = {ids[n * len(ids) // len(rows)] for n, ids in enumerate(rows) if not self.sampling.stop}
        self.policy.eos_ids = tuple(ends - {token for ids in rows for token in ids[: len(ids) // 4]})

    def generate(self, engine: BuiltinEngine, step: int = 0) -> list[Completion]:
        groups = engine.generate(self.bench.problems(), self.sampling, seed_key=(0, "gpu", step))
        return [completion for group in groups for completion in group.completions]

    def replayed(self, step: int = 0) -> tuple[list[Completion], dict[str, int]]:
        """Completions that graphs decoded alone; the numbers of waves and captures."""
        captures, capture = [], CUDAGraphRunner._captured

        def counted(runner, *step):
            captures.append(None)
            return capture(runner, *step)

        with patch.object(CUDAGraphRunner, "_captured", counted):
            rows = self.generate(self.graphs, step)
        assert not self.said, "; ".join(self.said)
        assert captures, "the loop decoded, without a word"
        prompts = [p.prompt_ids for p in self.bench.problems() for _ in range(self.sampling.num_generations)]
        return rows, {"waves": len(split_into_waves(prompts, self.sampling)), "captures": len(captures)}

    @torch.no_grad()
    def error(self, rows: list[Completion]) -> float:
        """The mean distance of the log-probs from those of a forward pass in fp32 without a cache."""
        G = self.sampling.num_generations
        groups = [Group(problem, tuple(rows[u * G : u * G + G])) for u, problem in enumerate(self.bench.problems())]
        exact_N = scored(self.policy, groups, temperature=self.sampling.temperature).cpu()
        return float((exact_N - torch.tensor([x for row in rows for x in row.sampling_logprobs])).abs().mean())


def equal_rows(rows: list[Completion], others: list[Completion]) -> float:
    """The share that has the same tokens and the same end."""
    pairs = zip(rows, others, strict=True)
    return statistics.fmean((a.ids, a.finished, a.text) == (b.ids, b.finished, b.text) for a, b in pairs)


def compare(bench: Bench, case: Callable[[bool], tuple[dict, dict]]) -> dict:
    """Two rollouts by graphs, with a change of the weights between them, against the decode loop."""
    bench.need("cuda", "emulated")
    (changes, least), found = case(bench.shape == "small"), {}
    for precision in ("fp32", "bf16"):
        sides = Sides(bench, precision, **changes)
        for step, name in enumerate((precision, f"{precision} after an update")):
            rows, counts = sides.replayed(step)
            loop = sides.generate(sides.loop, step)
            same = found[f"{name}, rows as the loop's"] = equal_rows(rows, loop)
            # Rounding may decide a row in fp32, and most rows in bf16.
            assert same >= 0.9 or precision == "bf16", f"{name}: only {same:.0%} of the rows are the loop's"
            if not sides.sampling.is_greedy:
                most, noise, error = NOISE[precision], sides.error(loop), sides.error(rows)
                found |= {f"{name}, loop - exact": noise, f"{name}, graphs - exact": error}
                assert noise < most, f"{name}: the loop's log-probs differ from exact ones by {noise:.1e}"
                words = f"log-probs of graphs differ from exact ones by {error:.1e}, the loop's by {noise:.1e}"
                assert error < max(most / 50, 2 * noise), f"{name}: {words}"
            counts["stops"] = sum(row.finished and any(s in row.text for s in sides.sampling.stop) for row in rows)
            assert step or all(counts[what] >= number for what, number in least.items()), f"{name}: only {counts}"
            found |= counts
            for p in sides.policy.model.parameters():  # more than by an update, so that stale weights show
                p.data.add_(torch.randn_like(p), alpha=0.05 * float(p.detach().std()))
    return found


CASES = {
    "sampled": lambda small: ({}, {}),
    "greedy": lambda small: (dict(temperature=0.0), {}),
    "filtered": lambda small: (dict(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01), {}),
    # Nearly every token is a number after a space, so that a string with a space lies in two tokens.
    "stops": lambda small: (dict(stop=("3 ", "5 ", "8 ") if small else ("3 ", "77")), {"stops": 1}),
    # Once for all rows, once for half of them, and once past a bucket of own tokens.
    "shrinking": lambda small: (dict(max_completion_length=60 if small else 288), {"captures": 2 if small else 3}),
    "waves": lambda small: (dict(tokens_in_flight=72 if small else 1908), {"waves": 3}),
}
"""By name: changes of the sampling settings, for the small shape or another, and what must happen at least so often."""
ABOUT = "graphs decode 90% of the loop's rows in fp32, log-probs err at most twice as much, also after an update: "
GRAPHS = [named(f"graphs_{name}", ABOUT + name, compare, case=case) for name, case in CASES.items()]


def failed_capture(bench: Bench) -> dict:
    """a capture that fails midway: the run says so, decodes by the loop, and memory and device are as before"""
    bench.need("cuda", "emulated")
    sides = Sides(bench, "bf16")

    def reads_when_captured(module, inputs, output):
        if torch.cuda.is_current_stream_capturing():
            output.sum().item()

    sides.policy.model.get_output_embeddings().register_forward_hook(reads_when_captured)
    rows = sides.generate(sides.graphs)
    assert sides.graphs.graphs is None and len(sides.said) == 1, f"graphs are on, or nothing was said: {sides.said}"
    same = equal_rows(rows, sides.generate(sides.loop))
    assert same >= 0.9, f"only {same:.0%} of the rows are those of the loop without a failure"
    if bench.kind == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.empty(2**28, dtype=torch.uint8, device=bench.device)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before, "memory allocated after the failure is not given back"
    return {"said": sides.said[0]}


def sampling(bench: Bench, side: str, rows: int) -> dict:
    bench.need("cuda")
    is_ours, problems = side in ("graphs", "loop"), bench.problems((256,) * (rows // 8))
    policy, said, captures, capture = bench.policy("bf16", packed=is_ours), [], [], CUDAGraphRunner._captured
    engine = BuiltinEngine(policy, cuda_graphs=side == "graphs", warn=said.append)
    if not is_ours:  # in bf16 weights, which is fastest for transformers, and which its static cache needs
        policy.model.bfloat16().generation_config.eos_token_id = None
    prompts_RL = torch.tensor([p.prompt_ids for p in problems], device=bench.device).repeat_interleave(8, dim=0)
    cache = "static" if side == "static" else None  # with the static one, transformers compiles the decode steps
    options = dict(do_sample=True, top_k=0, pad_token_id=0, cache_implementation=cache)

    @torch.no_grad()
    def seconds(tokens: int) -> float:
        """For so many tokens of each row, none of which ends before."""
        started = time.perf_counter()
        if is_ours:
            engine.generate(problems, SamplingParams(8, tokens), seed_key=(0, "gpu", 0))
        else:
            policy.model.generate(prompts_RL, max_new_tokens=tokens, **options)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    def timed(runner, *step):
        started = time.perf_counter()
        replay = capture(runner, *step)
        captures.append(time.perf_counter() - started)
        return replay

    number = 129 if side in ("graphs", "static") else 65
    for tokens in (1, number):  # the first time libraries are loaded and steps compiled
        seconds(tokens)
    with patch.object(CUDAGraphRunner, "_captured", timed):
        first, whole = seconds(1), seconds(number)
    found = {"ms/token": 1e3 * (whole - first) / (number - 1), "prefill ms": 1e3 * first}
    assert not said, "; ".join(said)
    return found | {"captures": len(captures), "seconds of capturing": sum(captures)}


FIGURES = [
    named(f"{side}_{rows}", f"{words}: {rows} rows in groups of 8, bf16", sampling, side=side, rows=rows)
    for side, words in (("graphs", "ours"), ("loop", "ours"), ("dynamic", "generate"), ("static", "generate, compiled"))
    for rows in (32, 256)
]
