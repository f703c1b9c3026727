"""The largest possible step, tried before the first one, so that out of memory shows early and says what to set.

It holds what a step holds at its peak: the rows of a rollout and of an evaluation, then forward and backward passes of
the heaviest micro-batch; in both, Adam's averages, which the first update creates. Random generators and weights do not
change. Where a default (``optim.tokens_per_microbatch``, ``rollout.tokens_in_flight``) does not fit, one that does is
chosen, the same on all ranks, and saved in every checkpoint, so that a resumed run computes in the same parts.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from grpo.algorithm.batch import (
    AllowedTokens,
    Batch,
    Completion,
    Group,
    Problem,
    collate,
    completion_lengths,
    microbatch_rows,
)
from grpo.checkpoint.saver import CHOSEN
from grpo.distributed import abandon_pass, gradient_sync
from grpo.evaluation.collect import eval_sampling
from grpo.rollout import SamplingParams, engine_with_weights, split_into_waves
from grpo.run.records import Run

DOES_NOT_FIT = "the largest possible step does not fit in memory: "
Prompts = list[tuple[int, ...]]


def try_largest_step(run: Run, problems: Sequence[Problem]) -> str:
    """Try the largest step that the run can make of these problems; returns a line for the summary.

    Raises:
        ValueError: on all ranks, if memory runs out on any with a value that the user set; with one that fits.
    """
    world, seconds, is_cuda = run.world, {}, run.world.device.type == "cuda"
    longest_first = sorted(problems, key=lambda problem: -len(problem.prompt_ids))
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    samples = run.config.rollout.engine == "builtin"
    with world.timed("largest step", seconds), torch.random.fork_rng(devices=[world.device] if is_cuda else []):
        pool = 0  # bytes that CUDA graphs hold after a rollout
        # Under FSDP weights are gathered by all ranks together, before any of them may run out of memory.
        gathers = samples and run.learner.is_sharded
        with engine_with_weights(run.sampler.engine, world) if gathers else contextlib.nullcontext():
            for kind in _kinds_of_sampling(run, longest_first) if samples else ():
                pool = max(pool, _try_sampling(run, *kind))
        tokens = _try_update(run, longest_first, pool)
    line = f"memory    the largest possible step was tried in {seconds['largest step']:.1f} s: {tokens} tokens at once"
    if is_cuda:
        peak = float(world.max(torch.tensor(torch.cuda.max_memory_allocated(world.device)))) / 2**30
        line += f"; at most {peak:.1f} of {torch.cuda.get_device_properties(world.device).total_memory / 2**30:.1f} GiB"
    return line


def _kinds_of_sampling(run: Run, longest_first: Sequence[Problem]) -> list[tuple[SamplingParams, Prompts, str]]:
    """``(sampling, prompt of each row, section of the settings)`` of rollouts and evaluations.

    Under ``tokens_in_flight`` shorter prompts can need more memory than the longest: the bound counts a prompt once per
    row, but memory holds it once per group, so that more rows are sampled at once.
    """
    r, G, T = run.config.rollout, run.config.rollout.num_generations, run.config.rollout.max_completion_length
    P = r.prompts_per_step // run.world.size

    def tokens_in_memory(start: int) -> int:
        L = len(longest_first[start].prompt_ids)
        rows = (
            min(P * G, max(run.sampler.sampling.tokens_in_flight // (L + T), 1))
            if run.sampler.sampling.tokens_in_flight
            else P * G
        )
        return rows * T + math.ceil(rows / G) * L

    kinds = []
    for start in {0, max(range(len(longest_first) - P + 1), key=tokens_in_memory)}:
        of_rank = longest_first[start : start + P]
        kinds.append((run.sampler.sampling, [problem.prompt_ids for problem in of_rank for _ in range(G)], "rollout"))
    longest = sorted((problem.prompt_ids for problem in run.tasks.eval_problems), key=len, reverse=True)
    own, sampled = longest[: math.ceil(len(longest) / run.world.size)], eval_sampling(run.config)
    for kind in [replace(sampled, num_generations=1, temperature=0.0)] + [sampled] * (not sampled.is_greedy):
        G = kind.num_generations
        kinds.append(
            (kind, [ids for ids in own[: max(run.sampler.engine.rows_per_call // G, 1)] for _ in range(G)], "eval")
        )
    return [kind for kind in kinds if kind[1]]


def _try_sampling(run: Run, sampling: SamplingParams, rows: Prompts, section: str) -> int:
    """Sample the first rows that are in memory at once; returns the bytes that CUDA graphs of them hold."""
    L, T, wanted = len(rows[0]), sampling.max_completion_length, run.sampler.sampling.tokens_in_flight
    bound = most = min(wanted or len(rows) * (L + T), len(rows) * (L + T))
    while True:
        wave = rows[split_into_waves(rows, replace(sampling, tokens_in_flight=bound))[0]]
        pool = _graph_pool(run, sampling, len(wave), L)
        if _fits(run, partial(run.sampler.engine.dry_run, wave, sampling), pool):
            break
        if len(wave) == 1:
            key = f"{section}.max_completion_length"
            raise ValueError(f"{DOES_NOT_FIT}not even one completion of {T} tokens after a prompt of {L}: lower {key}")
        bound //= 2
    if bound < most:
        _choose(run, "rollout.tokens_in_flight", wanted or "null", T, L, bound)
    return pool


def _graph_pool(run: Run, sampling: SamplingParams, num_rows: int, longest_prompt: int) -> int:
    """About the bytes of a graph's tensors: those of vocabulary size in drawing a token, or attention scores."""
    if not getattr(run.sampler.engine, "may_capture", False):
        return 0
    config = run.learner.policy.model.config.get_text_config()
    drawing = config.vocab_size * (46 if sampling.is_filtered else 20)
    attention = 14 * config.num_attention_heads * (longest_prompt + sampling.max_completion_length)
    return num_rows * max(drawing, attention)


def _try_update(run: Run, longest_first: Sequence[Problem], pool: int) -> int:
    """Forward and backward of the heaviest micro-batches; returns the tokens of the largest."""
    config, r, packed = run.config, run.config.rollout, run.learner.bare_scorer.packed
    L, T = len(longest_first[0].prompt_ids), r.max_completion_length
    P = r.prompts_per_step // run.world.size // config.algorithm.num_minibatches
    batches = []
    for length in {T, 1} if packed else {T}:  # keys and values of prompts need most where completions are short
        ids = (run.learner.policy.pad_id,) * length
        completion = Completion(ids, text="", finished=False, allowed=_allowed(run, length))
        groups = [Group(problem, (completion,) * r.num_generations) for problem in longest_first[:P]]
        batches.append(collate(groups, torch.zeros(P, r.num_generations), pad_id=run.learner.policy.pad_id))
    bound = run.learner.tokens_per_microbatch
    while True:
        parts = [(batch, microbatch_rows(batch, bound, packed=packed)) for batch in batches]
        heaviest = [max(map(batch.select, rows), key=lambda micro: _tokens(micro, packed)) for batch, rows in parts]
        several, tokens = any(len(rows) > 1 for _, rows in parts), max(_tokens(micro, packed) for micro in heaviest)
        if all(_fits(run, partial(_update, run, micro, several), pool) for micro in heaviest):
            break
        if max(map(len, heaviest)) == 1:
            raise ValueError(
                f"{DOES_NOT_FIT}not even one completion of {T} tokens after a prompt of {L} can be trained on: lower "
                "rollout.max_completion_length, set model.gradient_checkpointing=true, or take a smaller model"
            )
        bound //= 2
        while bound >= tokens:  # a larger bound would give the same micro-batch again
            bound //= 2
    if bound < run.learner.tokens_per_microbatch:
        _choose(run, "optim.tokens_per_microbatch", run.learner.tokens_per_microbatch, T, L, bound)
    return tokens


def _allowed(run: Run, T: int) -> AllowedTokens | None:
    """As many ids as top-k allows for T tokens. Without top-k there is no bound below the vocabulary: one each."""
    if not run.sampler.sampling.records_allowed:
        return None
    k = run.sampler.sampling.top_k or 1
    return AllowedTokens(torch.zeros(T * k, dtype=torch.int32), torch.full((T,), k, dtype=torch.int32))


def _tokens(micro: Batch, packed: bool) -> int:
    """Tokens that a forward pass of these rows computes."""
    if not packed:
        return micro.sequence_ids_BS.numel()
    prompts = dict(zip(micro.group_B.tolist(), micro.prompt_lengths_B.tolist(), strict=True))
    return sum(prompts.values()) + int(completion_lengths(micro.completion_mask_BT).sum())


def _update(run: Run, micro: Batch, is_one_of_several: bool) -> None:
    """Forward and backward as in an update: from the second micro-batch on, gradients are added to those in memory."""
    world, scorer = (
        run.world,
        run.learner.scorer if run.learner.is_sharded else run.learner.bare_scorer,
    )  # DDP would reduce the gradients
    inputs = [tensor.to(world.device) for tensor in micro.scorer_inputs]
    try:
        for is_last in (False, True) if is_one_of_several else (True,):
            reduces = run.learner.is_sharded and (is_last or run.config.optim.reduce_each_microbatch)
            with gradient_sync(run.learner.scorer, enabled=reduces):
                with run.learner.policy.autocast():
                    logprobs_BT, _ = scorer(*inputs)
                logprobs_BT.sum().backward()
        if world.device.type == "cuda" and not run.learner.optimizer.defaults["fused"]:
            # AdamW, unless fused, takes the square roots of all its second averages at once.
            _roots = [torch.empty_like(p) for group in run.learner.optimizer.param_groups for p in group["params"]]
    except Exception as error:
        if run.learner.is_sharded and is_out_of_memory(error):
            abandon_pass(run.learner.scorer)
        raise
    finally:
        run.learner.optimizer.zero_grad(set_to_none=world.is_alone or run.learner.is_sharded)


def _fits(run: Run, attempt: Callable[[], None], pool: int) -> bool:
    """True if the attempt, beside Adam's averages and ``pool`` bytes, runs on all ranks; the same on all."""
    ran_out, averages, world = False, [], run.world
    with world.fail_together():
        try:
            trained = (
                []
                if run.learner.optimizer.state
                else [p for p in run.learner.policy.model.parameters() if p.requires_grad]
            )
            averages += [torch.empty_like(p) for p in trained for _ in range(2)]
            averages.append(torch.empty(pool, dtype=torch.uint8, device=world.device))
            attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
        averages.clear()
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return world.all_true(not ran_out)


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception for CUDA alone; cuBLAS, oneDNN and the CPU's allocator are recognised by message."""
    signs = "DefaultCPUAllocator", "could not create a primitive", "STATUS_ALLOC_FAILED", "STATUS_NOT_INITIALIZED"
    is_runtime = isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    return is_runtime or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _choose(run: Run, key: str, wanted: int | str, T: int, L: int, fits: int) -> None:
    """Use the value that fits instead of one that the user did not set; refuse one that the user did set."""
    section, _, leaf = key.partition(".")
    problem = f"{key}={wanted} is too much for completions of {T} tokens after prompts of {L}"
    settings = getattr(run.config, section)
    if leaf in settings.model_fields_set and getattr(settings, leaf) is not None:
        raise ValueError(f"{DOES_NOT_FIT}{problem}; {fits} fits")
    setattr(run.progress, CHOSEN[key], fits)
    run.log.reporter.print(f"note      {problem}; using {key}={fits}, with the same results up to rounding")
