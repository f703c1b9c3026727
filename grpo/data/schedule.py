"""Assign problems to steps and ranks, as a pure function of the step: a resumed run needs no saved
state."""

import functools
from collections.abc import Sequence

import torch
from torch.utils.data import DistributedSampler

from grpo.algorithm.batch import Problem
from grpo.algorithm.seeding import derive_seed, generator


def check_enough(num_problems: int, prompts_per_step: int) -> None:
    """``ValueError`` if there are too few problems for one step."""
    if num_problems < prompts_per_step:
        raise ValueError(
            f"{num_problems} training problems are fewer than rollout.prompts_per_step={prompts_per_step}"
        )


class Schedule:
    """The problems of each step for one rank."""

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        prompts_per_step: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ):
        check_enough(len(problems), prompts_per_step)
        self.problems = problems
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.steps_per_epoch = len(problems) // prompts_per_step

    def at(self, step: int) -> list[Problem]:
        """This rank's ``prompts_per_step / world_size`` problems of a step.

        DistributedSampler assigns element ``i`` of an epoch's permutation to rank ``i %
        world_size``, so the global batch of a step has the same problems for every world size."""
        indices = self._indices(step, self.rank, self.world_size)
        return [self.problems[index] for index in indices]

    def substitute(self, step: int, position: int, attempt: int) -> Problem | None:
        """The problem that replaces the one at ``position`` of this rank's batch in dynamic
        sampling.

        ``attempt`` counts from 0. Substitutes are drawn from the problems outside the step's global
        batch, each at most once per step, and they are the same for every world size. None when no
        problem is left."""
        batch = tuple(self._indices(step, 0, 1))
        unused = _shuffled_without(batch, len(self.problems), self.seed, step)
        place = attempt * self.prompts_per_step + position * self.world_size + self.rank
        if place >= len(unused):
            return None
        return self.problems[unused[place]]

    def _indices(self, step: int, rank: int, world_size: int) -> list[int]:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = _epoch_order(len(self.problems), self.seed, epoch, rank, world_size)
        count = self.prompts_per_step // world_size
        start = step_in_epoch * count
        return order[start : start + count]


@functools.lru_cache(maxsize=2)
def _epoch_order(num_problems: int, seed: int, epoch: int, rank: int, world_size: int) -> list[int]:
    sampler = DistributedSampler(
        range(num_problems),
        world_size,
        rank,
        seed=derive_seed(seed, "data order"),
        drop_last=True,
    )
    sampler.set_epoch(epoch)
    return list(sampler)


@functools.lru_cache(maxsize=1)
def _shuffled_without(batch: tuple[int, ...], num_problems: int, seed: int, step: int) -> list[int]:
    """The indices of all problems that are not in ``batch``, in an order that depends on the
    step."""
    order = torch.randperm(num_problems, generator=generator(seed, "substitutes", step)).tolist()
    used = set(batch)
    return [index for index in order if index not in used]
