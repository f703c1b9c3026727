"""Checks of ``gpu.py``: captured decode steps (CUDA graphs) against the decode loop, which is given the same tokens."""

from __future__ import annotations

import statistics
import threading
from dataclasses import replace
from unittest.mock import patch

import torch
from gpu_common import (
    Bench,
    ForcedLoop,
    Found,
    change_weights,
    check,
    exact_logprobs,
    expect,
    mean_difference,
)

from grpo.batch import Group
from grpo.rollout import BuiltinEngine, SamplingParams, split_into_waves
from grpo.rollout.cuda_graphs import CUDAGraphRunner
from grpo.run import checkpoint

NOISE = {"fp32": 5e-3, "bf16": 1.0}
"""Most that the decode loop may differ from exact log-probs, in nats per token; graphs may differ from the loop by twice what it differs.
(The random model's logits are large: in bf16 the log-probs of random tokens were off by 0.55 on a CPU, one percent of their size.)"""
LEAST = {"fp32": 1e-4, "bf16": 1e-2}
"""A difference of graphs from the loop that is fine in any case."""


class Captured:
    """An engine with CUDA graphs, and what it says and captures."""

    def __init__(self, bench: Bench, precision: str):
        self.bench, self.said = bench, []
        self.policy = bench.policy(precision)
        self.engine = BuiltinEngine(self.policy, cuda_graphs=True, warn=self.said.append)

    def choose_ends(self, sampling: SamplingParams) -> None:
        """From now on some tokens end a completion, so that rows end at many lengths."""
        groups = BuiltinEngine(self.policy).generate(self.bench.problems(), sampling, address=(0, "gpu", 0))
        rows = [c.ids for group in groups for c in group.completions]
        self.policy.eos_ids = tuple({ids[number * len(ids) // len(rows)] for number, ids in enumerate(rows) if number})

    def generate(self, sampling: SamplingParams, step: int = 0) -> list[Group]:
        """Completions that graphs decoded, and nothing else."""
        replayed, decode = [], CUDAGraphRunner.decode

        def counted(runner, *arguments, **options):
            replayed.append(runner.capture)
            return decode(runner, *arguments, **options)

        problems = self.bench.problems()
        with patch.object(CUDAGraphRunner, "decode", counted):
            groups = self.engine.generate(problems, sampling, address=(0, "gpu", step))
        expect(not self.said, "; ".join(self.said))
        expect(bool(replayed) and all(replayed), "the loop decoded, without a word")
        return groups


def sampling_of(bench: Bench, **changes) -> SamplingParams:
    return replace(SamplingParams(4, 12) if bench.is_small else SamplingParams(8, 48), **changes)


def compare(
    bench: Bench, sampling: SamplingParams, *, updates: int = 0, rows_end: bool = True
) -> tuple[Found, list[Group]]:
    """Graphs against the loop, in both precisions, after each of so many changes of the weights."""
    found, groups = {}, []
    for precision in ("fp32", "bf16") if updates or not bench.is_small else ("fp32",):
        captured = Captured(bench, precision)
        if rows_end:
            captured.choose_ends(sampling)
        loop = ForcedLoop(captured.policy)
        for step in range(updates + 1):
            if step:
                change_weights(captured.policy.model)
            groups = captured.generate(sampling, step)
            forced, misfits = loop.force(groups, sampling, (0, "gpu", step))
            pairs = [
                (a, b)
                for x, y in zip(groups, forced, strict=True)
                for a, b in zip(x.completions, y.completions, strict=True)
            ]
            unequal = sum((a.ids, a.finished, a.text) != (b.ids, b.finished, b.text) for a, b in pairs)
            expect(not unequal, f"{precision}: {unequal} of {len(pairs)} rows end elsewhere than in the loop")
            exact = exact_logprobs(captured.policy, groups, 1.0 if sampling.is_greedy else sampling.temperature)
            noise = mean_difference([b.sampling_logprobs for _, b in pairs], exact)
            name = f"{precision}{f' after {step} updates' * bool(step)}"
            found[f"{name}: loop - exact"] = noise
            expect(
                noise < NOISE[precision],
                f"{name}: the loop's log-probs differ from a plain forward pass by {noise:.1e}",
            )
            found[f"{name}: misfit"] = statistics.fmean(misfits)
            most = max(LEAST[precision], 2 * noise)
            expect(
                found[f"{name}: misfit"] < most,
                f"{name}: tokens misfit the loop's probabilities by {found[f'{name}: misfit']:.1e}",
            )
            if not sampling.is_greedy:
                apart = mean_difference(
                    [a.sampling_logprobs for a, _ in pairs], [b.sampling_logprobs for _, b in pairs]
                )
                found[f"{name}: graphs - loop"] = apart
                expect(
                    apart < most,
                    f"{name}: log-probs of graphs differ from the loop's by {apart:.1e}, the loop's from exact ones by {noise:.1e}",
                )
        found["rows at once"] = sorted({key[0] for key in captured.engine.graphs._steps})
        lengths = [len(c.ids) for group in groups for c in group.completions]
        found["lengths"] = f"{min(lengths)} to {max(lengths)}"
        del captured, loop
    return found, groups


@check(90)
def graphs_sampled(bench: Bench) -> Found:
    """graphs draw the loop's tokens with its log-probs, across two changes of the weights"""
    bench.need_gpu()
    return compare(bench, sampling_of(bench), updates=2)[0]


@check(90)
def graphs_greedy(bench: Bench) -> Found:
    """graphs take the loop's best tokens"""
    bench.need_gpu()
    return compare(bench, sampling_of(bench, temperature=0.0))[0]


@check(90)
def graphs_filtered(bench: Bench) -> Found:
    """graphs draw the loop's tokens with temperature 0.8, top_p 0.9, top_k 20 and min_p 0.01"""
    bench.need_gpu()
    return compare(bench, sampling_of(bench, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01))[0]


@check(90)
def graphs_stops(bench: Bench) -> Found:
    """stop strings end rows where the loop ends them, and graphs stay on"""
    bench.need_gpu()
    sampling = sampling_of(bench)
    drawn = BuiltinEngine(bench.policy("fp32")).generate(bench.problems(), sampling, address=(0, "gpu", 0))
    # Three characters from the middle of some completions. A token is a number after a space, so some of these lie in two tokens.
    texts = [group.completions[0].text for group in drawn]
    stop = tuple(text[len(text) // 2 - 1 : len(text) // 2 + 2] for text in texts)
    found, groups = compare(bench, replace(sampling, stop=stop), rows_end=False)
    stopped = [c for group in groups for c in group.completions if c.finished]
    all_contain = all(any(string in c.text for string in stop) for c in stopped)
    expect(bool(stopped) and all_contain, f"{len(stopped)} rows ended by a stop string")
    return found | {"stopped": len(stopped)}


@check(120)
def graphs_shrinking(bench: Bench) -> Found:
    """rows that end leave the batch, which shrinks at least twice, past a bucket of own tokens, and tokens are the loop's"""
    bench.need_gpu()
    found, _ = compare(bench, sampling_of(bench, max_completion_length=24 if bench.is_small else 288))
    expect(len(found["rows at once"]) >= (2 if bench.is_small else 3), f"only {found['rows at once']} rows at once")
    return found


@check(90)
def graphs_waves(bench: Bench) -> Found:
    """under tokens_in_flight, in at least three waves, graphs draw the loop's tokens"""
    bench.need_gpu()
    sampling = sampling_of(bench)
    longest = max(len(p.prompt_ids) for p in bench.problems())
    sampling = replace(
        sampling, tokens_in_flight=sampling.num_generations * 3 // 4 * (longest + sampling.max_completion_length)
    )
    prompts = [p.prompt_ids for p in bench.problems() for _ in range(sampling.num_generations)]
    expect((waves := len(split_into_waves(prompts, sampling))) >= 3, f"{waves} waves")
    return compare(bench, sampling)[0] | {"waves": waves}


@check(60)
def failed_capture(bench: Bench) -> Found:
    """a capture that fails midway: the run says so, decodes by the loop, and memory and device are as before"""
    bench.need_gpu()
    captured, sampling = Captured(bench, "bf16"), sampling_of(bench)
    expected = BuiltinEngine(captured.policy).generate(bench.problems(), sampling, address=(0, "gpu", 0))
    capture, failures = CUDAGraphRunner._captured, []

    def broken(runner, step, slots):
        def synchronizes_when_captured():
            step()
            if torch.cuda.is_current_stream_capturing():
                failures.append(None)
                slots.next_1.item()

        return capture(runner, synchronizes_when_captured, slots)

    with patch.object(CUDAGraphRunner, "_captured", broken):
        groups = captured.engine.generate(bench.problems(), sampling, address=(0, "gpu", 0))
    expect(bool(failures), "no capture was begun")
    expect(
        captured.engine.graphs is None and len(captured.said) == 1,
        f"graphs are still on, or nothing was said: {captured.said}",
    )
    pairs = [
        (a.ids, b.ids)
        for x, y in zip(groups, expected, strict=True)
        for a, b in zip(x.completions, y.completions, strict=True)
    ]
    same = sum(a == b for a, b in pairs)  # rounding may decide one
    expect(same >= 0.9 * len(pairs), f"only {same} of {len(pairs)} rows are those of the loop without a failure")
    if not bench.is_emulated:
        expect(not torch.cuda.is_current_stream_capturing(), "the stream is still capturing")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            block = torch.empty(2**28, dtype=torch.uint8, device=bench.device)
            del block
            torch.cuda.empty_cache()
        after = torch.cuda.memory_reserved()
        expect(
            after <= before, f"memory allocated after the failure is not given back: {(after - before) / 2**20:.0f} MiB"
        )
    return {"said": captured.said[0]}


@check(150)
def save_during_captures(bench: Bench) -> Found:
    """a checkpoint that a thread writes while graphs are captured holds the weights of before, and the graphs are good"""
    bench.need_gpu()
    captured, sampling = Captured(bench, "bf16"), sampling_of(bench)
    model = captured.policy.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()
    trained = checkpoint.Trained(captured.policy, optimizer, {})
    before = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    tensors, ends = trained.on_host(), {}

    def save():
        try:
            ends["folder"] = checkpoint.save_checkpoint(bench.scratch / "saved", 1, trained=trained, tensors=tensors)
        except Exception as error:
            ends["error"] = error

    captures, capture, thread = [], CUDAGraphRunner._captured, threading.Thread(target=save)

    def counted(runner, step, slots):
        if not captures:
            thread.start()
        captures.append(thread.is_alive())
        return capture(runner, step, slots)

    with patch.object(CUDAGraphRunner, "_captured", counted):
        groups = captured.generate(sampling)
    change_weights(model)
    different = [name for name, value in before.items() if not torch.equal(tensors[0][name].cpu(), value)]
    expect(not different, f"{len(different)} weights of the copy on the host changed with the model")
    thread.join()
    expect("error" not in ends, f"the save failed: {ends.get('error')}")
    checkpoint.verify(ends["folder"])
    expect(any(captures[1:]) or len(captures) == 1, "the save ended before the captures")
    saved = type(model).from_pretrained(ends["folder"], dtype=torch.float32)
    different = [name for name, p in saved.named_parameters() if not torch.equal(p, before[name])]
    expect(not different, f"{len(different)} weights are saved otherwise than they were")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    forced, _ = ForcedLoop(captured.policy).force(groups, sampling, (0, "gpu", 0))
    rows = [[c.sampling_logprobs for group in side for c in group.completions] for side in (groups, forced)]
    apart = (
        mean_difference(*rows)
        if [c.ids for g in groups for c in g.completions] == [c.ids for g in forced for c in g.completions]
        else 1.0
    )
    expect(apart < NOISE["bf16"], f"log-probs of graphs captured meanwhile differ from the loop's by {apart:.1e}")
    return {"captures during the save": sum(captures), "graphs - loop": apart}
