"""Assign problems to steps and ranks, as a pure function of the step."""

from collections.abc import Sequence

import torch
from torch.utils.data import DistributedSampler

from grpo.algorithm.batch import Problem
from grpo.algorithm.seeding import derive_seed, generator


def check_enough(num_problems: int, prompts_per_step: int, *, unit: int = 1) -> None:
    """Raise ``ValueError`` if there are too few training problems for one step; the message names a ``prompts_per_step`` that works.

    ``prompts_per_step`` must be a multiple of ``unit`` (ranks times minibatches).
    """
    if num_problems < prompts_per_step:
        fits = num_problems // unit * unit
        works = f"use prompts_per_step={fits}, or more data" if fits else f"at least {unit} are needed"
        wanted = f"rollout.prompts_per_step={prompts_per_step}"
        raise ValueError(f"{num_problems} training problems are fewer than {wanted}: {works}")


class Schedule:
    """The problems of each step for one rank. They depend on the step alone, so a resumed run needs no saved state."""

    def __init__(
        self, problems: Sequence[Problem], *, prompts_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ):
        check_enough(len(problems), prompts_per_step, unit=world_size)
        self.problems, self.prompts_per_step, self.seed = problems, prompts_per_step, seed
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = len(problems) // prompts_per_step
        self._orders: dict[tuple[int, int, int], list[int]] = {}
        """(epoch, rank, world size) -> the indices that a DistributedSampler gives, for one epoch."""
        self._unused: tuple[int, list[int]] = (-1, [])
        """A step, and the indices of the problems that are not in its global batch, shuffled."""

    def at(self, step: int) -> list[Problem]:
        """This rank's ``prompts_per_step / world_size`` problems of a step.

        DistributedSampler gives element ``i`` of an epoch's permutation to rank ``i % world_size``, so the global batch of a step
        contains the same problems for every world size.
        """
        return self._problems_at(step, self.rank, self.world_size)

    def substitute(self, step: int, position: int, attempt: int) -> Problem | None:
        """The problem that replaces the one at ``position`` of this rank's batch in dynamic sampling, at attempt 0, 1, ... .

        Substitutes are drawn from the problems outside the step's global batch. Each is used at most once per step, and they are the
        same for every world size. None when no problem is left.
        """
        if self._unused[0] != step:
            used = {problem.index for problem in self._problems_at(step, 0, 1)}
            order = torch.randperm(len(self.problems), generator=generator(self.seed, "substitutes", step)).tolist()
            self._unused = (step, [i for i in order if self.problems[i].index not in used])
        unused = self._unused[1]
        index = attempt * self.prompts_per_step + position * self.world_size + self.rank
        return self.problems[unused[index]] if index < len(unused) else None

    def _problems_at(self, step: int, rank: int, world_size: int) -> list[Problem]:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        key = (epoch, rank, world_size)
        if key not in self._orders:
            seed = derive_seed(self.seed, "data order")
            sampler = DistributedSampler(self.problems, world_size, rank, shuffle=True, seed=seed, drop_last=True)
            sampler.set_epoch(epoch)
            self._orders = {k: order for k, order in self._orders.items() if k[0] == epoch}  # forget other epochs
            self._orders[key] = list(sampler)
        n = self.prompts_per_step // world_size
        return [self.problems[i] for i in self._orders[key][step_in_epoch * n : (step_in_epoch + 1) * n]]
