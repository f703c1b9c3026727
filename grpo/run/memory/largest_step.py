"""A dry run of the largest possible step before the first one, to find out-of-memory early, with a message that says what to set.

The dry run holds what a step holds at its peak: the heaviest wave of a rollout, with a last token decoded and all rows copied; then
forward and backward of the heaviest micro-batch; before both, a wave of the longest completions of an evaluation. All hold Adam's averages,
which the first update creates. It leaves out passes without gradient (smaller than the update).

The run does not change by a bit: global generators are restored, gradients reach neither ``.grad`` nor DDP, the optimizer does not step.
Only where a default (``optim.tokens_per_microbatch``, ``rollout.tokens_in_flight``) does not fit, a value that does is chosen instead, the
same on all ranks. It is saved in every checkpoint, so that a resumed run computes in the same parts.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from grpo.algorithm.batch import AllowedTokens, Batch, Completion, Group, Problem, collate, microbatch_rows
from grpo.checkpoint.saver import CHOSEN
from grpo.distributed import World, abandon_pass, gradient_sync
from grpo.evaluation.collect import ROWS_PER_CALL, eval_sampling
from grpo.rollout import SamplingParams, split_into_waves
from grpo.run.memory.estimate import GIB, graph_pool_bytes
from grpo.run.state import Run

DOES_NOT_FIT = "a largest step does not fit in memory: "


def dry_run(run: Run, problems: Sequence[Problem]) -> str:
    """Try the largest step that the run can make of these problems; returns a line for the summary.

    Sampling uses the plain decode loop; the memory pool of CUDA graphs is held meanwhile, and in the update.

    Raises:
        ValueError: on all ranks, if memory runs out on any with a value that the user set, with the key to lower and a value that fits.
    """
    world, seconds, is_cuda = run.world, {}, run.world.device.type == "cuda"
    longest_first = sorted(problems, key=lambda problem: -len(problem.prompt_ids))
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(world.device)
    with world.timed("memory dry run", seconds), torch.random.fork_rng(devices=[world.device] if is_cuda else []):
        # Under FSDP weights are gathered by all ranks together, before any of them may run out of memory.
        is_builtin = run.config.rollout.engine == "builtin"
        with run.sampling_weights() if run.is_sharded and is_builtin else contextlib.nullcontext():
            rows = _try_sampling(run, longest_first) if is_builtin else 0
            pool = _graph_pool(run, run.sampling, rows, len(longest_first[0].prompt_ids))
            if is_builtin:
                pool = max(pool, _try_evaluation(run))
        tokens = _try_update(run, longest_first, pool)
    tried = f"{rows} completions at once, " * is_builtin + f"{tokens} tokens forward and backward"
    if is_cuda:
        peak = float(world.max(torch.tensor(torch.cuda.max_memory_allocated(world.device) / GIB)))
        total = torch.cuda.get_device_properties(world.device).total_memory / GIB
        tried += f"; at most {peak:.1f} of {total:.1f} GiB"
    return f"memory    dry run of a largest step in {seconds['memory dry run']:.1f} s: {tried}"


def _try_sampling(run: Run, longest_first: Sequence[Problem]) -> int:
    """Sample the heaviest waves; returns the completions of the largest one."""
    r = run.config.rollout
    L, T = len(longest_first[0].prompt_ids), r.max_completion_length
    whole = r.prompts_per_step // run.world.size * r.num_generations * (L + T)
    wanted = run.sampling.tokens_in_flight
    bound = most = min(wanted or whole, whole)
    while True:
        heaviest = _heaviest_waves(run, longest_first, bound)
        if all(_fits(run.world, lambda prompts=prompts: _sample(run, prompts, run.sampling)) for prompts in heaviest):
            break
        if max(map(len, heaviest)) == 1:
            raise ValueError(
                f"{DOES_NOT_FIT}not even one completion of {T} tokens after a prompt of {L} can be sampled: "
                f"lower rollout.max_completion_length={T}, or take a smaller model"
            )
        bound //= 2
    if bound < most:
        _choose(run, "rollout.tokens_in_flight", wanted or f"null ({whole} tokens)", T, L, bound)
    return max(map(len, heaviest))


def _heaviest_waves(run: Run, longest_first: Sequence[Problem], bound: int) -> list[list[tuple[int, ...]]]:
    """The prompt of each row, for the one or two waves that need the most memory.

    The longest prompts need most during prefill. Under ``tokens_in_flight``, shorter prompts can need more while decoding: the bound
    counts a prompt once per row, but memory holds it once for all its rows, so a wave of more rows holds more tokens.
    """
    r = run.config.rollout
    P, G, T = r.prompts_per_step // run.world.size, r.num_generations, r.max_completion_length
    starts = {}  # prompt length -> where P problems of at most that length begin
    for start, problem in enumerate(longest_first[: len(longest_first) - P + 1]):
        starts.setdefault(len(problem.prompt_ids), start)

    def tokens_in_memory(length: int) -> int:
        rows = min(P * G, max(bound // (length + T), 1))
        return rows * T + math.ceil(rows / G) * length

    found, sampling = [], replace(run.sampling, tokens_in_flight=bound)
    for start in dict.fromkeys((0, starts[max(starts, key=tokens_in_memory)])):
        prompts = [problem.prompt_ids for problem in longest_first[start : start + P] for _ in range(G)]
        found.append(prompts[split_into_waves(prompts, sampling)[0]])
    return found


def _try_evaluation(run: Run) -> int:
    """Sample the completions of one call of an evaluation, greedy and sampled, after its longest prompts; returns the bytes of the pool of
    CUDA graphs.
    """
    pool = 0
    problems = sorted(run.eval_problems, key=lambda problem: -len(problem.prompt_ids))
    own = [problem.prompt_ids for problem in problems[: math.ceil(len(problems) / run.world.size)]]
    sampling = eval_sampling(run.config)
    kinds = [replace(sampling, num_generations=1, temperature=0.0)] + [sampling] * (not sampling.is_greedy)
    for kind in kinds if own else ():
        G, T, L = kind.num_generations, kind.max_completion_length, len(own[0])
        prompts = [ids for ids in own[: max(ROWS_PER_CALL // G, 1)] for _ in range(G)]
        wanted = run.sampling.tokens_in_flight
        bound = most = min(wanted or len(prompts) * (L + T), len(prompts) * (L + T))
        while True:
            wave = prompts[split_into_waves(prompts, replace(kind, tokens_in_flight=bound))[0]]
            if _fits(run.world, lambda wave=wave, kind=kind: _sample(run, wave, kind)):
                break
            if len(wave) == 1:
                key = f"{'rollout' if run.config.eval.max_completion_length is None else 'eval'}.max_completion_length"
                raise ValueError(
                    f"{DOES_NOT_FIT}not even one completion of {T} tokens after a prompt of {L} can be sampled in an evaluation: lower {key}={T}"
                )
            bound //= 2
        if bound < most:
            whole = f"null ({most} tokens in an evaluation)"
            _choose(run, "rollout.tokens_in_flight", wanted or whole, T, L, bound)
        pool = max(pool, _graph_pool(run, kind, len(wave), L))
    return pool


def _sample(run: Run, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> None:
    _averages = _adam_averages(run)  # held while sampling
    pool = _graph_pool(run, sampling, len(prompts), max(map(len, prompts)))
    _pool = torch.empty(pool, dtype=torch.uint8, device=run.world.device)
    run.engine.dry_run(prompts, sampling)


def _graph_pool(run: Run, sampling: SamplingParams, rows: int, longest_prompt: int) -> int:
    """Bytes of the memory pool of CUDA graphs that decode so many rows; 0 where nothing is captured."""
    config = run.policy.model.config.get_text_config()
    return graph_pool_bytes(config, sampling, rows, longest_prompt) if run.may_capture else 0


def _try_update(run: Run, longest_first: Sequence[Problem], pool: int) -> int:
    """Forward and backward of the heaviest micro-batches, beside the ``pool`` bytes of CUDA graphs; returns the most tokens of one."""
    config, world, r = run.config, run.world, run.config.rollout
    L, T = len(longest_first[0].prompt_ids), r.max_completion_length
    P = r.prompts_per_step // world.size // config.algorithm.num_minibatches
    batches = []
    for length in (
        {T, 1} if run.packed else {T}
    ):  # keys and values of prompts take most memory where completions are short
        completion = Completion(ids=(run.policy.pad_id,) * length, text="", finished=False, allowed=_kept(run, length))
        groups = [Group(problem, (completion,) * r.num_generations) for problem in longest_first[:P]]
        batches.append(collate(groups, torch.zeros(P, r.num_generations), pad_id=run.policy.pad_id))
    bound = run.tokens_per_microbatch
    while True:
        parts = [(b, microbatch_rows(b, bound, packed=run.packed)) for b in batches]
        micros = [max(map(b.select, rows), key=lambda part: _tokens(part, run.packed)) for b, rows in parts]
        tokens, several = max(_tokens(micro, run.packed) for micro in micros), any(len(rows) > 1 for _, rows in parts)
        if all(_fits(world, partial(_update, run, micro, pool, is_one_of_several=several)) for micro in micros):
            break
        if max(map(len, micros)) == 1:
            advice = "" if config.model.gradient_checkpointing else "set model.gradient_checkpointing=true, "
            raise ValueError(
                f"{DOES_NOT_FIT}not even one completion of {T} tokens after a prompt of {L} can be trained on: "
                f"lower rollout.max_completion_length={T}, {advice}or take a smaller model"
            )
        bound //= 2
        while bound >= tokens:  # such a bound would give the same micro-batch again
            bound //= 2
    if bound < run.tokens_per_microbatch:
        _choose(run, "optim.tokens_per_microbatch", run.tokens_per_microbatch, T, L, bound)
    return tokens


def _kept(run: Run, T: int) -> AllowedTokens | None:
    """As many ids as top-k keeps for T tokens. Without top-k there is no bound below the vocabulary: one each."""
    if not run.sampling.records_allowed:
        return None
    k = run.sampling.top_k or 1
    return AllowedTokens(torch.zeros(T * k, dtype=torch.int32), torch.full((T,), k, dtype=torch.int32))


def _tokens(part: Batch, packed: bool) -> int:
    """Tokens that a forward pass of these rows computes."""
    if not packed:
        return part.sequence_ids_BS.numel()
    prompts = dict(zip(part.group_B.tolist(), part.prompt_lengths_B.tolist(), strict=True))
    return sum(prompts.values()) + int(part.completion_mask_BT.sum())


def _update(run: Run, micro: Batch, pool: int, *, is_one_of_several: bool) -> None:
    """Forward and backward, holding as much other memory as a real update does, and ``pool`` bytes.

    From the second micro-batch on (and always under DDP) gradients are added to buffers that exist, one parameter at a time. Otherwise all
    gradients are newly allocated.
    """
    world = run.world
    if run.is_sharded:
        _update_divided(run, micro, pool, is_one_of_several=is_one_of_several)
        return
    parameters = [p for p in run.policy.model.parameters() if p.requires_grad]
    held = [*_adam_averages(run), torch.empty(pool, dtype=torch.uint8, device=world.device)]
    buffers_exist = is_one_of_several or not world.is_alone
    if buffers_exist and world.is_alone:  # DDP's buckets are in memory already
        held += [torch.empty_like(p) for p in parameters]
    hooks = [p.register_hook(_without_memory) for p in parameters] if buffers_exist else []
    try:
        with run.policy.autocast():
            logprobs_BT, _ = run.bare_scorer(*(tensor.to(world.device) for tensor in micro.scorer_inputs))
        held += torch.autograd.grad(logprobs_BT.sum(), parameters, allow_unused=True)
        del logprobs_BT
        # AdamW on CUDA, unless fused, takes the square root of all second averages at once.
        if world.device.type == "cuda" and not run.optimizer.defaults["fused"]:
            held += [torch.empty_like(p) for p in parameters]
    finally:
        for hook in hooks:
            hook.remove()


def _update_divided(run: Run, micro: Batch, pool: int, *, is_one_of_several: bool) -> None:
    """The same under FSDP, with real gradients, which are dropped. All ranks try rows of the same lengths, so each gathers equally often."""
    world, reduces_each = run.world, run.config.optim.reduce_each_microbatch
    _held = _adam_averages(run), torch.empty(pool, dtype=torch.uint8, device=world.device)
    inputs = [tensor.to(world.device) for tensor in micro.scorer_inputs]
    try:
        for is_last in (False, True) if is_one_of_several else (True,):
            with gradient_sync(run.scorer, enabled=is_last or reduces_each):
                with run.policy.autocast():
                    logprobs_BT, _ = run.scorer(*inputs)
                logprobs_BT.sum().backward()
    except Exception as error:
        if is_out_of_memory(error):
            abandon_pass(run.scorer)
        raise
    finally:
        run.optimizer.zero_grad(set_to_none=True)


def _without_memory(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient of the same shape that needs no memory."""
    return gradient.new_zeros(()).expand_as(gradient)


def _adam_averages(run: Run) -> list[torch.Tensor]:
    """Tensors of the size of Adam's two averages; none if the optimizer has its averages already."""
    if run.optimizer.state:
        return []
    return [torch.empty_like(p) for p in run.policy.model.parameters() if p.requires_grad for _ in range(2)]


def _fits(world: World, attempt: Callable[[], None]) -> bool:
    """True if the attempt runs on all ranks without running out of memory; the same answer on all. Its memory is free afterwards."""
    ran_out = False
    with world.fail_together():
        try:
            attempt()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return world.all_true(not ran_out)


def is_out_of_memory(error: Exception) -> bool:
    """True if memory ran out. PyTorch has an exception for CUDA alone; oneDNN, cuBLAS and the CPU allocator are recognised by message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        "DefaultCPUAllocator", "bad_alloc", "could not create a primitive", "STATUS_ALLOC_FAILED",
        "STATUS_NOT_INITIALIZED", "CUDA error: out of memory",
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _choose(run: Run, key: str, wanted: int | str, T: int, L: int, fits: int) -> None:
    """Use the value that fits instead of one that the user did not set; refuse one that the user did set."""
    section, _, leaf = key.partition(".")
    problem = f"{key}={wanted} is too much for completions of {T} tokens after prompts of {L}"
    settings = getattr(run.config, section)
    if leaf in settings.model_fields_set and getattr(settings, leaf) is not None:
        raise ValueError(f"{DOES_NOT_FIT}{problem}; {fits} fits")
    setattr(run.progress, CHOSEN[key], fits)
    run.reporter.print(f"note      {problem}; using {key}={fits}, with the same results up to rounding")
