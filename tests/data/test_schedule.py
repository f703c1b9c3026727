"""The problems of each step: the same for every world size, a pure function of the step; and their substitutes."""

from collections import Counter

import pytest
import torch

from grpo.algorithm.batch import Problem
from grpo.data import Schedule


def schedules(count: int, prompts_per_step: int, world_size: int, seed: int = 0) -> list[Schedule]:
    problems = [Problem(1000 + i, f"p{i}", (i,), {}) for i in range(count)]
    return [
        Schedule(problems, prompts_per_step=prompts_per_step, seed=seed, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


def global_batch(ranks: list[Schedule], step: int) -> list[int]:
    """Indices in dataset order: global row i lies on rank i % world_size, as ``World.gather_rows`` has it."""
    shares = [[problem.index for problem in rank.at(step)] for rank in ranks]
    return [share[place] for place in range(len(shares[0])) for share in shares]


@pytest.mark.parametrize("count", [12, 40, 43, 46])
def test_the_global_batch_is_the_same_for_every_world_size(count):
    by_world = {world: schedules(count, 6, world) for world in (1, 2, 3, 6)}
    for step in range(20):
        batches = {world: global_batch(ranks, step) for world, ranks in by_world.items()}
        assert all(batch == batches[1] for batch in batches.values())
        assert len(set(batches[1])) == 6


def test_an_epoch_has_every_problem_once_and_leaves_out_those_that_do_not_fill_a_step():
    (schedule,) = schedules(42, 6, 1)
    assert schedule.steps_per_epoch == 7
    for epoch in range(3):
        assert sorted(p.index for s in range(7) for p in schedule.at(7 * epoch + s)) == [1000 + i for i in range(42)]
    (schedule,) = schedules(45, 6, 1)
    epochs = [[p.index for s in range(7) for p in schedule.at(7 * e + s)] for e in range(20)]
    assert all(len(set(epoch)) == 42 for epoch in epochs)  # none twice
    left_out = [set(range(1000, 1045)) - set(epoch) for epoch in epochs]
    assert len(set.union(*left_out)) > 30  # and not the same ones each time


def test_epochs_and_seeds_differ():
    (schedule,), (other,) = schedules(42, 6, 1), schedules(42, 6, 1, seed=1)
    orders = [tuple(i for step in range(7) for i in global_batch([schedule], 7 * e + step)) for e in range(4)]
    orders.append(tuple(i for step in range(7) for i in global_batch([other], step)))
    assert len(set(orders)) == 5


def test_the_problems_of_a_step_do_not_depend_on_earlier_calls_or_the_global_generator():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    fresh = {step: global_batch(schedules(41, 6, 2), step) for step in range(15)}
    ranks = schedules(41, 6, 2)
    first = ranks[0].substitute(3, 1, 0).index
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    for step in (14, 0, 7, 7, 3, 13, 6, 1, 0, 14):
        ranks[0].substitute(step, 0, 0)
        assert global_batch(ranks, step) == fresh[step]
    assert ranks[0].substitute(3, 1, 0).index == first


@pytest.mark.parametrize("step", [0, 3, 9])
def test_substitutes_are_new_to_the_step_and_the_same_for_every_world_size(step):
    by_world = {}
    for world in (1, 2, 3):
        ranks = schedules(43, 6, world)
        batch = set(global_batch(ranks, step))
        found = {}
        for attempt in range(3):
            for rank, schedule in enumerate(ranks):
                for place in range(6 // world):
                    problem = schedule.substitute(step, place, attempt)
                    assert problem.index not in batch
                    found[attempt, place * world + rank] = problem.index
        assert max(Counter(found.values()).values()) == 1
        by_world[world] = found
    assert by_world[1] == by_world[2] == by_world[3]


def test_substitutes_run_out_and_every_problem_left_is_used():
    (schedule,) = schedules(16, 6, 1)  # 10 are not in the batch
    found = [schedule.substitute(0, place, attempt) for attempt in range(3) for place in range(6)]
    assert [p is None for p in found] == [False] * 10 + [True] * 8
    assert {p.index for p in found[:10]} | set(global_batch([schedule], 0)) == set(range(1000, 1016))
    elsewhere = [schedule.substitute(1, place, 0).index for place in range(6)]
    assert [p.index for p in found[:6]] != elsewhere  # another step, other substitutes


def test_fewer_problems_than_a_step():
    with pytest.raises(ValueError, match=r"5 training problems are fewer than rollout.prompts_per_step=6"):
        schedules(5, 6, 2)
    assert len(schedules(6, 6, 2)[0].at(0)) == 3
