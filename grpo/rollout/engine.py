"""Problems to groups of sampled completions.

Each prompt is prefilled once, its cache forked G times; a token is drawn by inverting the CDF at a uniform number that was
fixed ahead by the row's own address; finished rows leave the batch instead of being decoded to the end of the longest, and rows that
had to wait take their places.

Shapes: ``R`` rows in flight, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from grpo.attention.packed import ATTENTION
from grpo.batch import Completion, Group, Problem
from grpo.rollout.cuda_graphs import LOOK_EVERY
from grpo.rollout.draw import Sampling, draw
from grpo.rollout.prefill import Cached, Forked, prefill
from grpo.seeding import generator

SPARE = 8
"""Where rows join others, each has room for one token in so many more than it can have: the cache is copied less often."""


def generate(
    policy,
    problems: Sequence[Problem],
    sampling: Sampling,
    *,
    address: tuple[int, str, int],
    on_tokens: Callable[[int], None] | None = None,
) -> list[Group]:
    """Sample ``num_generations`` completions of each problem.

    Args:
        policy: a ``grpo.model.Policy``; its bare model is used (never a DDP wrapper), in eval mode.
        problems: this rank's problems.
        sampling: how to draw.
        address: ``(seed, purpose, step)``; row g of a problem draws its uniforms from
            ``derive_seed(seed, purpose, step, problem.index, g)``, so that its tokens depend neither on the other rows nor on
            the world size.
        on_tokens: called with the number of tokens drawn since the last call, for progress bars.

    Returns:
        One group per problem, in order.
    """
    seed, purpose, step = address
    G, T = sampling.num_generations, sampling.max_completion_length
    rows = [(p, g) for p in range(len(problems)) for g in range(G)]
    completions: dict[tuple[int, int], Completion] = {}
    with policy.sampling():
        # Captured steps have fixed rows; elsewhere rows that wait take the places of those that end.
        captured = policy.graphs is not None and not sampling.stop
        parts = waves(rows, problems, sampling) if captured else [rows] * bool(rows)
        for part in parts:
            uniforms_RT = None
            if sampling.temperature > 0:
                uniforms_RT = torch.stack(
                    [torch.rand(T, generator=generator(seed, purpose, step, problems[p].index, g)) for p, g in part]
                )
            prompts = [problems[p].prompt_ids for p, _ in part]
            drawn = _decode_rows(policy, prompts, uniforms_RT, sampling, on_tokens)
            completions.update(zip(part, drawn, strict=True))
    return [Group(problem, tuple(completions[p, g] for g in range(G))) for p, problem in enumerate(problems)]


def waves(rows: list[tuple[int, int]], problems: Sequence[Problem], sampling: Sampling) -> list[list[tuple[int, int]]]:
    """Cut the rows so that no wave holds more than ``tokens_in_flight`` tokens of KV cache at its fullest."""
    if sampling.tokens_in_flight is None or not rows:
        return [rows] if rows else []
    waves: list[list[tuple[int, int]]] = [[]]
    longest = 0
    for row in rows:
        longest = max(longest, len(problems[row[0]].prompt_ids))
        if waves[-1] and (len(waves[-1]) + 1) * (longest + sampling.max_completion_length) > sampling.tokens_in_flight:
            waves.append([])
            longest = len(problems[row[0]].prompt_ids)
        waves[-1].append(row)
    return waves


def _decode_rows(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> list[Completion]:
    uniforms_RT = None if uniforms_RT is None else uniforms_RT.to(policy.device)
    drawn = None
    if policy.graphs is not None and not sampling.stop:  # whether a text has come is not for the device to see
        drawn = _decode_captured(policy, prompts, uniforms_RT, sampling, on_tokens)
    tokens_RT, logprobs_RT, lengths, finished = drawn or _decode(policy, prompts, uniforms_RT, sampling, on_tokens)
    texts = policy.tokenizer.batch_decode(
        [tokens_RT[r, :n].tolist() for r, n in enumerate(lengths)], skip_special_tokens=True
    )
    return [
        Completion(
            ids=tuple(tokens_RT[r, : lengths[r]].tolist()),
            text=texts[r],
            finished=finished[r],
            sampling_logprobs=tuple(logprobs_RT[r, : lengths[r]].tolist()) if uniforms_RT is not None else (),
        )
        for r in range(len(prompts))
    ]


Drawn = tuple[torch.Tensor, torch.Tensor, list[int], list[bool]]
"""Tokens and log-probs ``[R, T]`` on the CPU, how many tokens each row has, and whether it ended by itself."""


def _decode(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> Drawn:
    """Prefill the distinct prompts, fork, decode until every row has ended; as many rows at once as the bound allows.

    Rows that wait begin as soon as those that have ended leave room for a whole group (continuous batching), where rows may be
    of different ages (:class:`Forked`), and not when all others have ended, as with other models: a quarter of 128 rows at once, 7% more
    tokens a second (6 to 18; ``benchmarks/rollout.py --waves``).
    """
    device, T, R = policy.device, sampling.max_completion_length, len(prompts)
    tokens_RT = torch.zeros(R, T + 1, dtype=torch.long)  # one place more, for what rows draw after their last token
    logprobs_RT = torch.zeros(R, T + 1)
    lengths, finished = [T] * R, [False] * R
    eos = torch.tensor(policy.eos_ids, device=device)
    joins = policy.model.config._attn_implementation == ATTENTION
    # Where rows join, places of rows that are gone pile up until the next copy of the cache.
    room = T + (T // SPARE + 1) * (joins and _how_many(prompts, [], 0, sampling, T) < R)
    begun, rows_B, num_live = 0, [], 0  # rows that are or were in the batch; the row at each place of it
    t_B = torch.zeros(0, dtype=torch.long)  # the number of its next token
    live_B = torch.ones(0, dtype=torch.bool, device=device)  # whether it has not ended
    look = True  # whether there may be room for rows that wait
    decoder: Forked | Cached | None = None
    logits_BV = torch.zeros(0, 0, device=device)
    while True:
        if look and begun < R and (joins or num_live == 0):
            keep = live_B.nonzero().flatten()
            still = [rows_B[b] for b in keep.tolist()]
            if count := _how_many(prompts, still, begun, sampling, room):
                fresh, logits_of_fresh = prefill(policy, prompts[begun : begun + count], room)
                if still:
                    decoder.keep(keep)
                    decoder.join(fresh)
                    logits_BV = torch.cat([logits_BV[keep], logits_of_fresh])
                else:
                    decoder, logits_BV = fresh, logits_of_fresh
                t_B = torch.cat([t_B[keep.cpu()], torch.zeros(count, dtype=torch.long)])
                rows_B, num_live = [*still, *range(begun, begun + count)], len(still) + count
                live_B = torch.ones(num_live, dtype=torch.bool, device=device)
                begun += count
        u_B = None if uniforms_RT is None else uniforms_RT[rows_B, t_B.clamp(max=T - 1)]
        token_B, logprob_B = draw(logits_BV, u_B, sampling)
        tokens_RT[rows_B, t_B] = token_B.cpu()
        logprobs_RT[rows_B, t_B] = logprob_B.cpu()
        ended_B = torch.isin(token_B, eos) & live_B
        if sampling.stop:
            so_far = zip(rows_B, t_B.tolist(), strict=True)
            hit = [_hits_stop(policy.tokenizer, tokens_RT[row, : t + 1], sampling.stop) for row, t in so_far]
            ended_B |= torch.tensor(hit, device=device) & live_B
        for b in ended_B.nonzero().flatten().tolist():
            lengths[rows_B[b]], finished[rows_B[b]] = int(t_B[b]) + 1, True
        live_B = live_B & ~ended_B
        is_last_B = t_B == T - 1
        if bool(is_last_B.any()):
            live_B = live_B & ~is_last_B.to(device)
        if on_tokens is not None:
            on_tokens(num_live)
        num_live, before = int(live_B.sum()), num_live
        look = num_live < before
        if num_live == 0 and begun == R:
            break
        if num_live == 0:
            continue
        # Leaving costs a copy of the cache, staying a share of every later step; an eighth of the rows is worth it.
        if len(rows_B) - num_live >= max(len(rows_B) // 8, 1) or decoder.is_full:
            keep = live_B.nonzero().flatten()
            rows_B = [rows_B[b] for b in keep.tolist()]
            decoder.keep(keep)
            token_B, live_B, t_B = token_B[keep], live_B[keep], t_B[keep.cpu()]
        logits_BV = decoder.step(token_B)
        t_B = (t_B + 1).clamp(max=T)
    return tokens_RT[:, :T], logprobs_RT[:, :T], lengths, finished


def _how_many(prompts, in_flight: list[int], begun: int, sampling: Sampling, room: int) -> int:
    """Rows that may begin beside those in flight: whole groups, or, where none of a group's rows is and it is too large, as many as fit.

    No more than ``tokens_in_flight`` tokens are held then, each row with its own prompt and ``room`` for its own tokens.
    """
    R, bound = len(prompts), sampling.tokens_in_flight
    if bound is None:
        return R - begun
    longest, end = max((len(prompts[row]) for row in in_flight), default=0), begun
    while end < R and (len(in_flight) + end + 1 - begun) * (max(longest, len(prompts[end])) + room) <= bound:
        longest = max(longest, len(prompts[end]))
        end += 1
    whole = end
    while begun < whole < R and prompts[whole] == prompts[whole - 1]:
        whole -= 1
    if whole > begun or in_flight:
        return whole - begun
    return max(end - begun, 1)


def _decode_captured(policy, prompts, uniforms_RT, sampling: Sampling, on_tokens) -> Drawn | None:
    """The same by :mod:`grpo.rollout.cuda_graphs`; None where that fails, or, looked at in the first wave, gives something else."""
    reason = None
    try:
        decoder, logits_RV = prefill(policy, prompts, room=sampling.max_completion_length)
        drawn = policy.graphs.decode(decoder.cache, decoder.positions_R, logits_RV, uniforms_RT, sampling, on_tokens)
        if not policy.graphs.checked and len(prompts) >= 4:
            few = replace(sampling, max_completion_length=min(2 * LOOK_EVERY + 1, sampling.max_completion_length))
            expected = _decode(policy, prompts, uniforms_RT, few, None)
            if _are_alike(drawn, expected, 0.05 if policy.precision == "bf16" else 1e-3):
                policy.graphs.checked = True
            else:
                reason = "they give other tokens than the same steps without"
    except (
        Exception
    ) as error:  # a kernel that cannot be captured, an operation that looks at a value, no memory left for graphs
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if reason is None:
        return drawn
    policy.without_graphs(reason)
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()  # the loop needs what the graphs had
    return None


def _are_alike(drawn: Drawn, expected: Drawn, tolerance: float) -> bool:
    """Whether half of the rows at least begin with the same tokens, and all of them with log-probs that are off by rounding on average.

    A row parts where its number lies within rounding of a boundary; in bf16 that is no rarity.
    """
    T = expected[0].shape[1]
    same_RT = (drawn[0][:, :T] == expected[0]).cumprod(dim=1).bool()
    written_RT = torch.arange(T) < torch.tensor(expected[2])[:, None]
    parted_R = (~same_RT & written_RT).any(dim=1)
    off = (drawn[1][:, :T] - expected[1]).abs()[same_RT & written_RT]
    return float(parted_R.float().mean()) <= 0.5 and float(off.mean()) < tolerance


def _hits_stop(tokenizer, ids_t: torch.Tensor, stop: tuple[str, ...]) -> bool:
    # A stop string of n characters spans at most 4n byte-level tokens; decoding more would make long completions quadratic.
    tail = ids_t[-4 * max(len(s) for s in stop) - 4 :].tolist()
    text = tokenizer.decode(tail, skip_special_tokens=True)
    return any(s in text for s in stop)
