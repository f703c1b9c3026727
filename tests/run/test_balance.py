"""Which groups move between ranks after a rollout; ``tests/distributed/test_ranks.py`` runs it."""

import random

from grpo.run.balance import evened


def test_by_hand():
    # 9 + 8 and 2 + 1 tokens: the costliest goes to the rank with the least, until a rank has its two groups.
    assert evened([[9, 8], [2, 1]]) == [[(0, 0), (1, 1)], [(0, 1), (1, 0)]]  # 10 and 10
    assert evened([[5, 5], [5, 5]]) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]  # nothing to gain: nothing moves
    assert evened([[7, 1], [1, 7]]) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]
    assert evened([[9, 1], [2, 2], [3, 3]]) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)], [(2, 0), (2, 1)]]


def test_every_group_has_one_place_and_the_longest_rank_is_shorter():
    rng = random.Random(0)
    for _ in range(50):
        W, n = rng.randint(2, 8), rng.randint(2, 9)
        costs = [[rng.randint(1, 1000) for _ in range(n)] for _ in range(W)]
        taken = evened(costs)
        assert sorted(place for places in taken for place in places) == [(r, p) for r in range(W) for p in range(n)]
        assert all(len(places) == n for places in taken)
        assert max(sum(costs[r][p] for r, p in places) for places in taken) <= max(map(sum, costs))
