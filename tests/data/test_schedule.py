"""The problems of each step: the same for every world size, a pure function of the step; and their
substitutes."""

import pytest
import torch

from grpo.algorithm.batch import Problem
from grpo.data import Schedule


def schedules(count: int, world_size: int, seed: int = 0) -> list[Schedule]:
    """The schedule of each rank, with 6 problems a step."""
    problems = [Problem(1000 + i, f"p{i}", (i,), {}) for i in range(count)]
    ranks = []
    for rank in range(world_size):
        ranks.append(
            Schedule(problems, prompts_per_step=6, seed=seed, rank=rank, world_size=world_size)
        )
    return ranks


def global_batch(ranks: list[Schedule], step: int) -> list[int]:
    """Indices in dataset order: global row i lies on rank i % world_size, as ``World.gather_rows``
    has it."""
    shares = [rank.problems_of_step(step) for rank in ranks]
    return [problem.index for place in zip(*shares, strict=True) for problem in place]


@pytest.mark.parametrize("count", [12, 43])
def test_the_global_batch_is_the_same_for_every_world_size(count):
    for step in range(20):
        batch = global_batch(schedules(count, 1), step)
        assert len(set(batch)) == 6
        for world_size in (2, 3, 6):
            assert global_batch(schedules(count, world_size), step) == batch


@pytest.mark.parametrize("count", [42, 45])
def test_an_epoch_has_every_problem_once_and_leaves_out_those_that_do_not_fill_a_step(count):
    ranks = schedules(count, 1)
    assert ranks[0].steps_per_epoch == 7
    left_out = set()
    orders = set()
    for epoch in range(20):
        order = []
        for step in range(7 * epoch, 7 * epoch + 7):
            order += global_batch(ranks, step)
        assert len(set(order)) == 42, "none twice"
        left_out |= set(range(1000, 1000 + count)) - set(order)
        orders.add(tuple(order))
    assert len(orders) == 20
    assert len(left_out) > 30 if count == 45 else not left_out, "not the same ones each time"
    assert global_batch(schedules(count, 1, seed=1), 0) != global_batch(ranks, 0)


def test_the_problems_of_a_step_do_not_depend_on_earlier_calls_or_the_global_generator():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    fresh = {step: global_batch(schedules(41, 2), step) for step in range(15)}
    ranks = schedules(41, 2)
    first = ranks[0].substitute(3, 1, 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    for step in (14, 0, 7, 7, 3, 13, 6, 1, 0, 14):
        ranks[0].substitute(step, 0, 0)
        assert global_batch(ranks, step) == fresh[step]
    assert ranks[0].substitute(3, 1, 0) == first


def substitutes(count: int, world_size: int, step: int) -> list:
    """The substitutes of three attempts, in the order of the global batch."""
    ranks = schedules(count, world_size)
    found = []
    for attempt in range(3):
        for place in range(6 // world_size):
            found += [rank.substitute(step, place, attempt) for rank in ranks]
    return [problem and problem.index for problem in found]


@pytest.mark.parametrize("step", [0, 9])
def test_substitutes_are_new_to_the_step_and_the_same_for_every_world_size(step):
    found = substitutes(43, 1, step)
    assert len(set(found)) == 18
    assert not set(found) & set(global_batch(schedules(43, 1), step))
    for world_size in (2, 3):
        assert substitutes(43, world_size, step) == found


def test_substitutes_run_out_and_every_problem_left_is_used():
    found = substitutes(16, 1, 0)  # 10 are not in the batch
    assert found[10:] == [None] * 8
    assert {*found[:10], *global_batch(schedules(16, 1), 0)} == set(range(1000, 1016))
    assert found[:6] != substitutes(16, 1, 1)[:6], "another step, other substitutes"


def test_fewer_problems_than_a_step():
    with pytest.raises(
        ValueError, match=r"5 training problems are fewer than rollout.prompts_per_step=6"
    ):
        schedules(5, 2)
