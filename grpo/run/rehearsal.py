"""A largest step before the first one: memory runs out in the first minute, with a line that says what to set, or never.

What is tried is what a step holds at its fullest: the heaviest wave of a rollout, with a token decoded late and all rows copied once;
forward and backward of the heaviest micro-batch; beside both what an update leaves behind, Adam's averages. Not tried: evaluations
(at most 256 completions at once), and passes without gradient (less than the update).

The run stays as it was, to the bit: global generators are put back, gradients reach neither ``.grad`` nor DDP, no optimizer steps.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from grpo.batch import Batch, Completion, Group, Problem, collate, cut
from grpo.distributed import World
from grpo.rollout import split_into_waves
from grpo.run.memory import GIB

DOES_NOT_FIT = "a largest step does not fit in memory: "


def rehearse(run: Any, problems: Sequence[Problem]) -> str:
    """Try the largest step that a run (``grpo.run.state.Run``) can make of these problems; sampling by the plain loop, not by captured steps.

    Returns:
        A line for the summary.

    Raises:
        ValueError: on all ranks if memory runs out on any, naming the key to lower and a value that fits.
    """
    world, seconds = run.world, {}
    longest_first = sorted(problems, key=lambda problem: -len(problem.prompt_ids))
    is_cuda = world.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    with world.timed("rehearsal", seconds), torch.random.fork_rng(devices=[world.device] if is_cuda else []):
        rows = _rehearse_sampling(run, longest_first)
        tokens = _rehearse_update(run, longest_first)
    line = f"rehearsed a largest step in {seconds['rehearsal']:.1f} s: {rows} completions at once, {tokens} tokens forward and backward"
    if is_cuda:
        peak = float(world.max(torch.tensor(torch.cuda.max_memory_allocated(world.device) / GIB)))
        line += f"; at most {peak:.1f} of {torch.cuda.get_device_properties(world.device).total_memory / GIB:.1f} GiB"
    return line


def _rehearse_sampling(run: Any, longest_first: Sequence[Problem]) -> int:
    """Completions of the largest wave."""
    r = run.config.rollout
    L, T = len(longest_first[0].prompt_ids), r.max_completion_length
    whole = r.prompts_per_step // run.world.size * r.num_generations * (L + T)
    bound = min(r.tokens_in_flight or whole, whole)
    while True:
        heaviest = _heaviest_waves(run, longest_first, bound)
        if all(_fits(run.world, lambda prompts=prompts: _sample(run, prompts)) for prompts in heaviest):
            break
        if max(map(len, heaviest)) == 1:
            raise ValueError(
                f"{DOES_NOT_FIT}not even one completion of {T} tokens after a prompt of {L} can be sampled: "
                f"lower rollout.max_completion_length={T}, or take a smaller model"
            )
        bound //= 2
    if bound < min(r.tokens_in_flight or whole, whole):
        value = r.tokens_in_flight or f"null ({whole} tokens)"
        raise ValueError(_too_much("rollout.tokens_in_flight", value, T, L, bound))
    return max(map(len, heaviest))


def _heaviest_waves(run: Any, longest_first: Sequence[Problem], bound: int) -> list[list[tuple[int, ...]]]:
    """Prompts of each row, of one wave or two that take the most memory.

    The longest prompts take most while they are computed. Under a bound, shorter ones can take more after that: the bound counts a
    prompt once per row, but in memory it lies once for all of them, so that more rows are more tokens.
    """
    r = run.config.rollout
    P, G, T = r.prompts_per_step // run.world.size, r.num_generations, r.max_completion_length
    starts = {}  # of P problems each, the longest of this length
    for start, problem in enumerate(longest_first[: len(longest_first) - P + 1]):
        starts.setdefault(len(problem.prompt_ids), start)

    def tokens_in_memory(length: int) -> int:
        rows = min(P * G, max(bound // (length + T), 1))
        return rows * T + math.ceil(rows / G) * length

    found = []
    for start in dict.fromkeys((0, starts[max(starts, key=tokens_in_memory)])):
        chosen = longest_first[start : start + P]
        prompts = [problem.prompt_ids for problem in chosen for _ in range(G)]
        wave = split_into_waves(prompts, replace(run.sampling, tokens_in_flight=bound))[0]
        found.append(prompts[wave])
    return found


def _sample(run: Any, prompts: Sequence[tuple[int, ...]]) -> None:
    averages = _averages(run)
    run.engine.dry_run(prompts, run.sampling)
    del averages


def _rehearse_update(run: Any, longest_first: Sequence[Problem]) -> int:
    """Tokens of the largest micro-batch."""
    config, world, r = run.config, run.world, run.config.rollout
    L, T = len(longest_first[0].prompt_ids), r.max_completion_length
    P = r.prompts_per_step // world.size // config.algorithm.num_minibatches
    completion = Completion(ids=(run.policy.pad_id,) * T, text="", finished=False)
    groups = [Group(problem, (completion,) * r.num_generations) for problem in longest_first[:P]]
    batch = collate(groups, torch.zeros(P, r.num_generations), pad_id=run.policy.pad_id)
    bound = config.optim.tokens_per_microbatch
    while True:
        parts = cut(batch, bound, packed=run.packed)
        micro = max((batch.rows(rows) for rows in parts), key=lambda part: _tokens(part, run.packed))
        tokens = _tokens(micro, run.packed)
        if _fits(world, lambda micro=micro, parts=parts: _update(run, micro, is_one_of_several=len(parts) > 1)):
            break
        if len(micro) == 1:
            raise ValueError(
                f"{DOES_NOT_FIT}not even one completion of {T} tokens after a prompt of {L} can be trained on: "
                f"lower rollout.max_completion_length={T}, "
                + "set model.gradient_checkpointing=true, " * (not config.model.gradient_checkpointing)
                + "or take a smaller model"
            )
        bound //= 2
        while bound >= tokens:  # that would be the same micro-batch again
            bound //= 2
    if bound < config.optim.tokens_per_microbatch:
        value = config.optim.tokens_per_microbatch
        raise ValueError(_too_much("optim.tokens_per_microbatch", value, T, L, bound))
    return tokens


def _tokens(part: Batch, packed: bool) -> int:
    """What a forward pass of these rows computes."""
    if not packed:
        return part.sequence_ids_BS.numel()
    prompts = dict(zip(part.group_B.tolist(), part.prompt_lengths_B.tolist(), strict=True))
    return sum(prompts.values()) + int(part.completion_mask_BT.sum())


def _update(run: Any, micro: Batch, *, is_one_of_several: bool) -> None:
    """Forward and backward, with as much beside them as in a real update.

    Gradients are there from the first micro-batch on, under DDP always: then they have their place, and new ones are added to it
    one by one. Else all are new.
    """
    world = run.world
    parameters = [p for p in run.policy.model.parameters() if p.requires_grad]
    held = _averages(run)
    held.append(torch.empty(run.engine.kept_bytes(run.sampling), dtype=torch.uint8, device=world.device))
    have_a_place = is_one_of_several or world.size > 1
    if have_a_place and world.size == 1:
        held += [torch.empty_like(p) for p in parameters]
    hooks = [p.register_hook(_let_go) for p in parameters] if have_a_place else []
    try:
        with run.policy.autocast():
            logprobs_BT, _ = run.bare_scorer(*(tensor.to(world.device) for tensor in micro.to_score))
        held += torch.autograd.grad(logprobs_BT.sum(), parameters, allow_unused=True)
        del logprobs_BT
        if world.device.type == "cuda":  # where AdamW takes a root of all second averages at once
            held += [torch.empty_like(p) for p in parameters]
    finally:
        for hook in hooks:
            hook.remove()


def _let_go(gradient: torch.Tensor) -> torch.Tensor:
    """The same shape without the memory."""
    return gradient.new_zeros(()).expand_as(gradient)


def _averages(run: Any) -> list[torch.Tensor]:
    """As much as Adam's two averages take, if they are not there yet."""
    if run.optimizer.state:
        return []
    return [torch.empty_like(p) for p in run.policy.model.parameters() if p.requires_grad for _ in range(2)]


def _fits(world: World, attempt: Callable[[], None]) -> bool:
    """Whether it runs on all ranks within their memory; the same answer on all. What it held is free again."""
    ran_out, error = False, None
    try:
        attempt()
    except Exception as caught:  # voted on
        ran_out = is_out_of_memory(caught)
        error = None if ran_out else caught
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    world.raise_together(error)
    return world.all_true(not ran_out)


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception for it on CUDA alone; oneDNN and cuBLAS have their own words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in (
            "DefaultCPUAllocator",
            "bad_alloc",
            "could not create a primitive",
            "STATUS_ALLOC_FAILED",
            "STATUS_NOT_INITIALIZED",
            "CUDA error: out of memory",
        )
    )


def _too_much(key: str, value: Any, T: int, L: int, fits: int) -> str:
    return f"{DOES_NOT_FIT}{key}={value} is too much for completions of {T} tokens after prompts of {L}; {fits} fits"
