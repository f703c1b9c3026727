"""Assign problems to steps and ranks.

The assignment is a pure function of seed and step. A resumed run therefore needs no saved position
in the data, and neither repeats nor skips a problem.
"""

import functools
from collections.abc import Sequence

import torch
from torch.utils.data import DistributedSampler

from grpo.algorithm.batch import Problem
from grpo.algorithm.seeding import derive_seed, generator


def check_enough(num_problems: int, prompts_per_step: int) -> None:
    """Raise ``ValueError`` if there are too few problems for one step."""
    if num_problems < prompts_per_step:
        raise ValueError(
            f"{num_problems} training problems are fewer than "
            f"rollout.prompts_per_step={prompts_per_step}"
        )


class Schedule:
    """Schedule of the problems of one rank at each step."""

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
        # Problems at the end of an epoch that do not fill a step are left out of that epoch. The
        # next epoch has another order, and leaves out other problems.
        self.steps_per_epoch = len(problems) // prompts_per_step

    def problems_of_step(self, step: int) -> list[Problem]:
        """Return this rank's ``prompts_per_step / world_size`` problems of a step.

        The global batch of a step has the same problems for every world size. As in
        ``DistributedSampler``, problem ``i`` in the order of an epoch belongs to rank ``i %
        world_size``.
        """
        indices = self._batch_indices(step, self.rank, self.world_size)
        return [self.problems[index] for index in indices]

    def substitute(self, step: int, position: int, attempt: int) -> Problem | None:
        """Return the problem that replaces, in dynamic sampling, the problem at ``position`` of
        this rank's batch; None if no problem is left.

        Such substitutes are drawn from the problems outside the step's global batch. Each is drawn
        at most once per step.

        Args:
            attempt: number of earlier attempts to replace the problem in this step.
        """
        global_batch = frozenset(self._batch_indices(step, 0, 1))
        unused = _shuffled_without(global_batch, len(self.problems), self.seed, step)
        # Position p of rank r is row p * world_size + r of the global batch. This row determines
        # the place of the substitute in the shuffled list, so substitutes are the same for every
        # world size, and ranks need not tell one another which problems they took.
        row = position * self.world_size + self.rank
        place = attempt * self.prompts_per_step + row
        if place >= len(unused):
            return None
        return self.problems[unused[place]]

    def _batch_indices(self, step: int, rank: int, world_size: int) -> list[int]:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = _epoch_order(len(self.problems), self.seed, epoch, rank, world_size)
        count = self.prompts_per_step // world_size
        start = step_in_epoch * count
        return order[start : start + count]


# The cache holds the two orders in use: the order of this rank and, with dynamic sampling, the
# order of the global batches.
@functools.lru_cache(maxsize=2)
def _epoch_order(
    num_problems: int,
    seed: int,
    epoch: int,
    rank: int,
    world_size: int,
) -> list[int]:
    """Return the indices of a rank's problems in the order of an epoch."""
    sampler = DistributedSampler(
        range(num_problems),
        world_size,
        rank,
        seed=derive_seed(seed, "data order"),
        # By default the sampler would repeat problems to give every rank the same number.
        drop_last=True,
    )
    sampler.set_epoch(epoch)
    return list(sampler)


# The cache holds one list, from which all substitutes of a step are taken.
@functools.lru_cache(maxsize=1)
def _shuffled_without(
    batch: frozenset[int],
    num_problems: int,
    seed: int,
    step: int,
) -> list[int]:
    """Return the indices of all problems that are not in ``batch``, in a random order that depends
    on ``seed`` and ``step``."""
    rng = generator(seed, "substitutes", step)
    order = torch.randperm(num_problems, generator=rng).tolist()
    return [index for index in order if index not in batch]
