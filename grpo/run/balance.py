"""Groups move between ranks after the rollout, so that all ranks have about equally many tokens to update with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo.algorithm.advantages import has_no_advantage
from grpo.algorithm.batch import Group
from grpo.distributed import World
from grpo.run.state import Run


def balance(run: Run, groups: Sequence[Group], values_PGF: Tensor) -> tuple[list[Group], Tensor]:
    """This rank's groups after the exchange, whole, and the values of the reward functions for them, ``[P, G, F]``.

    A group stays in its minibatch, and every rank has as many groups as before: the gradient is the same up to the
    order of additions. Groups whose rows will be skipped, for want of an advantage, count as one token.
    """
    algorithm, costs = run.config.algorithm, [_num_tokens(group) for group in groups]
    if algorithm.skips_zero_advantage:
        options = dict(baseline=algorithm.baseline, scale=algorithm.scale)
        is_skipped_P = has_no_advantage(run.scores(values_PGF).compared, **options)
        costs = [1 if skipped else cost for cost, skipped in zip(costs, is_skipped_P.tolist(), strict=True)]
    return exchange(run.world, groups, values_PGF, costs, algorithm.num_minibatches)


def exchange(
    world: World, groups: Sequence[Group], values_PGF: Tensor, costs: list[int], num_minibatches: int
) -> tuple[list[Group], Tensor]:
    """:func:`balance`, by the cost of each group. All ranks call it together."""
    n, rank = len(groups) // num_minibatches, world.rank
    if world.is_alone or n == 1:
        return list(groups), values_PGF
    all_costs = world.gather_objects(costs)
    places = []  # (rank, position) before the exchange of each group that this rank will have
    leaving: dict[tuple[int, int], tuple[Group, Tensor]] = {}
    for first in range(0, len(groups), n):
        shares = evened([of_rank[first : first + n] for of_rank in all_costs])
        places += [(r, first + p) for r, p in shares[rank]]
        sent = {(rank, first + p) for p in range(n)} - set(places)
        leaving |= {place: (groups[place[1]], values_PGF[place[1]]) for place in sent}
    arrived = {place: moved for of_rank in world.gather_objects(leaving) for place, moved in of_rank.items()}
    kept = {(rank, p): (group, values_PGF[p]) for p, group in enumerate(groups)}
    chosen = [(kept | arrived)[place] for place in places]
    return [group for group, _ in chosen], torch.stack([values_GF for _, values_GF in chosen])


def evened(costs_Wn: list[list[int]]) -> list[list[tuple[int, int]]]:
    """For each of W ranks the ``(rank, position)`` of the n groups that it takes, sorted.

    The costliest group goes to the rank with the smallest sum that has fewer than n, and so on. Nothing moves unless
    the largest sum falls.
    """
    W, n = len(costs_Wn), len(costs_Wn[0])
    taken: list[list[tuple[int, int]]] = [[] for _ in range(W)]
    sums = [0] * W
    for cost, r, p in sorted((-cost, r, p) for r, costs in enumerate(costs_Wn) for p, cost in enumerate(costs)):
        to = min((w for w in range(W) if len(taken[w]) < n), key=lambda w: (sums[w], w != r))
        taken[to].append((r, p))
        sums[to] -= cost
    if max(sums) >= max(map(sum, costs_Wn)):
        return [[(r, p) for p in range(n)] for r in range(W)]
    return [sorted(places) for places in taken]


def _num_tokens(group: Group) -> int:
    return len(group.problem.prompt_ids) + sum(len(completion.ids) for completion in group.completions)
