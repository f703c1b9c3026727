"""Problems to each rank's share of a step: the deal, a pure function of the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import DistributedSampler

from grpo.batch import Problem
from grpo.seeding import derive_seed, generator


def check_enough(num_problems: int, prompts_per_step: int, *, unit: int = 1) -> None:
    """Refuse a training set that is smaller than one step.

    Args:
        unit: what ``prompts_per_step`` must be a multiple of (ranks, times minibatches).
    """
    if num_problems < prompts_per_step:
        fits = num_problems // unit * unit
        works = f"use prompts_per_step={fits}, or more data" if fits else f"at least {unit} are needed"
        raise ValueError(
            f"{num_problems} training problems are fewer than rollout.prompts_per_step={prompts_per_step}: {works}"
        )


class Schedule:
    """Which problems a rank works on at which step: a pure function of the step, so that a resumed run needs no state."""

    def __init__(
        self, problems: Sequence[Problem], *, prompts_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ):
        check_enough(len(problems), prompts_per_step, unit=world_size)
        self.problems, self.prompts_per_step, self.seed = problems, prompts_per_step, seed
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = len(problems) // prompts_per_step
        self._orders: dict[tuple[int, int, int], list[int]] = {}
        self._free: tuple[int, list[int]] = (-1, [])

    def at(self, step: int) -> list[Problem]:
        """This rank's ``prompts_per_step / world_size`` problems of a step.

        DistributedSampler deals out the epoch's permutation like cards, so that the global batch of a step is the same set
        for every world size: card ``i`` of it goes to rank ``i % world_size``.
        """
        return self._deal(step, self.rank, self.world_size)

    def substitute(self, step: int, place: int, attempt: int) -> Problem | None:
        """The problem that takes over place ``place`` of this rank's share at the given attempt (0, 1, ...), for dynamic sampling.

        Drawn from the problems that are not in the step's global batch, each at most once in a step, whatever the world size;
        None when they are used up.
        """
        if self._free[0] != step:
            taken = {problem.index for problem in self._deal(step, 0, 1)}
            order = torch.randperm(len(self.problems), generator=generator(self.seed, "substitutes", step)).tolist()
            self._free = (step, [i for i in order if self.problems[i].index not in taken])
        free = self._free[1]
        where = attempt * self.prompts_per_step + place * self.world_size + self.rank
        return self.problems[free[where]] if where < len(free) else None

    def _deal(self, step: int, rank: int, world_size: int) -> list[Problem]:
        epoch, position = divmod(step, self.steps_per_epoch)
        key = (epoch, rank, world_size)
        if key not in self._orders:
            sampler = DistributedSampler(
                self.problems,
                num_replicas=world_size,
                rank=rank,
                shuffle=True,
                seed=derive_seed(self.seed, "data order"),
                drop_last=True,
            )
            sampler.set_epoch(epoch)
            self._orders = {k: order for k, order in self._orders.items() if k[0] == epoch}  # one epoch is kept
            self._orders[key] = list(sampler)
        n = self.prompts_per_step // world_size
        return [self.problems[i] for i in self._orders[key][position * n : (position + 1) * n]]
