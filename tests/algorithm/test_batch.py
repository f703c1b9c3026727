"""The rows of a step on their way from groups to micro-batches.

Shapes: ``P`` problems, ``G`` completions each, ``B = P*G`` rows, ``S`` tokens with the prompt,
``T`` completion tokens."""

from dataclasses import replace

import pytest
import torch

from grpo.algorithm.batch import (
    Completion,
    Group,
    Problem,
    collate,
    microbatch_rows,
    microbatches,
    minibatches,
    skip_zero_advantage,
)

PAD = EOS = 7
"""One id, so that a mask by value would show."""


# --- groups to a batch


def completion(ids, finished=True):
    """Sampling log-probs that say which token they belong to."""
    return Completion(tuple(ids), "", finished, sampling_logprobs=tuple(-i / 10 for i in ids))


def two_groups():
    one = Group(
        Problem(0, "", (1, 2)),
        (completion([11, 12, EOS]), completion([13, 14, 15, 16], finished=False)),
    )
    two = Group(Problem(1, "", (3, 4, 5)), (completion([EOS]), completion([17, EOS])))
    return [one, two]


def test_collate_by_hand():
    batch = collate(two_groups(), torch.tensor([[0.5, -0.5], [1.5, -1.5]]), pad_id=PAD)
    assert batch.sequence_ids_BS.tolist() == [
        [1, 2, 11, 12, EOS, PAD],
        [1, 2, 13, 14, 15, 16],
        [3, 4, 5, EOS, PAD, PAD],
        [3, 4, 5, 17, EOS, PAD],
    ]
    assert batch.prompt_lengths_B.tolist() == [2, 2, 3, 3]
    assert batch.completion_mask_BT.int().tolist() == [
        [1, 1, 1, 0],
        [1, 1, 1, 1],
        [1, 0, 0, 0],
        [1, 1, 0, 0],
    ]
    assert torch.equal(batch.loss_mask_BT, batch.completion_mask_BT)
    masked = collate(two_groups(), torch.zeros(2, 2), pad_id=PAD, mask_truncated=True)
    assert masked.loss_mask_BT.sum(dim=1).tolist() == [3, 0, 1, 2], (
        "a truncated completion is not trained on"
    )
    assert torch.equal(masked.completion_mask_BT, batch.completion_mask_BT), "but scored"
    assert batch.advantages_B.tolist() == [0.5, -0.5, 1.5, -1.5]
    expected = [
        [-1.1, -1.2, -0.7, 0],
        [-1.3, -1.4, -1.5, -1.6],
        [-0.7, 0, 0, 0],
        [-1.7, -0.7, 0, 0],
    ]
    torch.testing.assert_close(batch.sampling_logprobs_BT, torch.tensor(expected))
    assert batch.lengths_B.tolist() == [5, 6, 4, 5]
    assert len(batch) == 4 and batch.old_logprobs_BT is None and batch.ref_logprobs_BT is None


# --- rows, minibatches, microbatches


def many_rows(seed=0, P=6, G=4):
    """Groups of uneven lengths; every row's number is in its advantage and log-probs, and its
    tokens are its own."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for p in range(P):
        prompt = tuple(range(100, 100 + int(torch.randint(1, 9, (), generator=generator))))
        completions = []
        for g, n in enumerate(torch.randint(1, 13, (G,), generator=generator).tolist()):
            start = 1000 * (p * G + g)
            completions.append(completion(range(start, start + n), finished=n < 12))
        groups.append(Group(Problem(p, "", prompt), tuple(completions)))
    batch = collate(
        groups, torch.arange(P * G, dtype=torch.float32).view(P, G), pad_id=PAD, mask_truncated=True
    )
    number_B1 = torch.arange(P * G, dtype=torch.float32)[:, None]
    return replace(
        batch,
        old_logprobs_BT=(number_B1 + 0.25) * batch.completion_mask_BT,
        ref_logprobs_BT=(number_B1 + 0.5) * batch.completion_mask_BT,
        policy_mask_BT=batch.completion_mask_BT & (number_B1 % 2 == 0),
    )


def assert_same_rows(part, batch):
    """Every row of ``part`` is the row of ``batch`` that its advantage names, trimmed to the
    longest of the part."""
    numbers = part.advantages_B.long().tolist()
    S = int(batch.lengths_B[numbers].max())
    T = int(batch.completion_mask_BT[numbers].sum(dim=1).max())
    assert part.sequence_ids_BS.shape == (len(numbers), S)
    for name, tensor in vars(part).items():
        if isinstance(tensor, torch.Tensor):
            expected = getattr(batch, name)[numbers]
            if name[-1] in "ST":
                expected = expected[:, : {"S": S, "T": T}[name[-1]]]
            assert torch.equal(tensor, expected), name
    for b, number in enumerate(numbers):  # prompt + t is where token t lies
        start, n = int(part.prompt_lengths_B[b]), int(part.completion_mask_BT[b].sum())
        assert part.sequence_ids_BS[b, start : start + n].tolist() == list(
            range(1000 * number, 1000 * number + n)
        )
    return numbers


def test_rows_by_slice_by_index_and_by_minibatch():
    batch = many_rows()
    assert assert_same_rows(batch.select(slice(4, 9)), batch) == [4, 5, 6, 7, 8]
    assert assert_same_rows(batch.select(torch.tensor([20, 3, 11])), batch) == [20, 3, 11]
    for count, n in ((1, 24), (2, 12), (6, 4)):
        numbers = [assert_same_rows(part, batch) for part in minibatches(batch, count)]
        assert numbers == [list(range(m * n, (m + 1) * n)) for m in range(count)], (
            "consecutive groups"
        )
    plain = replace(batch, ref_logprobs_BT=None).select(slice(0, 2))
    assert plain.ref_logprobs_BT is None


def test_microbatches_hold_every_row_once_within_the_budget():
    batch = many_rows()
    for tokens, num_parts in ((1, 24), (13, None), (20, None), (33, None), (100, None), (1000, 1)):
        seen = []
        lasts = []
        for part, is_last in microbatches(batch, tokens):
            seen += assert_same_rows(part, batch)
            lasts.append(is_last)
            # padding counted; alone only if it must be
            assert part.sequence_ids_BS.numel() <= tokens or len(part) == 1
        assert sorted(seen) == list(range(24))
        assert lasts == [False] * (len(lasts) - 1) + [True]  # the one that synchronises
        assert num_parts in (None, len(lasts))


def test_microbatch_rows_by_hand():
    # Lengths 5, 6, 4, 5; ascending: row 2 (4), rows 0 and 3 (5), row 1 (6).
    batch = collate(two_groups(), torch.zeros(2, 2), pad_id=PAD)
    for tokens, expected in (
        (24, [[2, 0, 3, 1]]),  # 4 rows x 6
        (23, [[2, 0, 3], [1]]),  # 3 rows x 5 = 15, a fourth would make 4 x 6 = 24
        (10, [[2, 0], [3], [1]]),  # 2 rows x 5 = 10; then 2 x 6 = 12 would be too many
        (4, [[2], [0], [3], [1]]),  # longer than the budget: alone
    ):
        assert [rows.tolist() for rows in microbatch_rows(batch, tokens, packed=False)] == expected


def test_many_short_completions_of_a_long_prompt_are_divided():
    """The rows of a micro-batch attend to at most 8 prompt tokens for each token of its budget."""
    completion = Completion((5,), "", True)
    for prompt_length, tokens, expected in (
        (4, 20, [16]),
        (4, 7, [3, 3, 3, 3, 3, 1]),  # 4 + 3 tokens
        (40, 60, [12, 4]),  # 12 x 40 = 8 x 60
    ):
        group = Group(Problem(0, "", (3,) * prompt_length), (completion,) * 16)
        batch = collate([group], torch.zeros(1, 16), pad_id=PAD)
        assert [len(rows) for rows in microbatch_rows(batch, tokens, packed=True)] == expected


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_advantage_0_are_in_no_microbatch(packed):
    """Of 2 minibatches of 12 rows the first has 5 advantages, the second none, so that its shortest
    row stays."""
    batch = many_rows()
    advantages_B = torch.zeros(24)
    advantages_B[[0, 1, 6, 10, 11]] = torch.tensor([1.0, -1, 2, -2, 0.5])
    batch = skip_zero_advantage(replace(batch, advantages_B=advantages_B), num_minibatches=2)
    first, second = minibatches(batch, 2)
    shortest = 12 + int(batch.lengths_B[12:].argmin())
    for part, expected in ((first, [0, 1, 6, 10, 11]), (second, [shortest])):
        assert len(part) == 12, "the denominators count all rows"
        for tokens in (1, 30, 1000):
            found = []
            for micro, _ in microbatches(part, tokens, packed=packed):
                found += micro.row_B.tolist()
            assert sorted(found) == expected
    # The row that stays counts in no metric.
    spare, _ = next(microbatches(second, 1000, packed=packed))
    assert (
        not spare.loss_mask_BT.any()
        and not spare.is_counted_BT.any()
        and spare.completion_mask_BT.any()
    )
