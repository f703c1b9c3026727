"""Evaluation: the estimator, the counting, and what counts as correct."""

from itertools import combinations
from math import comb

import pytest
import torch

from grpo.batch import Completion, Group, Problem
from grpo.distributed import World
from grpo.evaluation import Verdict, evaluate, make_judge, pass_at_k

ALONE = World(0, 1, 0, torch.device("cpu"))


def test_pass_at_k_by_hand():
    assert pass_at_k(8, 0, 4) == 0.0
    assert pass_at_k(8, 8, 1) == 1.0
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(5, 2, 4) == 1.0, "any four of five contain one of two"


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one():
    for n in range(1, 8):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = sum(any(i < c for i in subset) for subset in combinations(range(n), k))
                assert pass_at_k(n, c, k) == pytest.approx(hits / comb(n, k), abs=1e-15)


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses(arguments):
    with pytest.raises(ValueError):
        pass_at_k(*arguments)


def problems_of(policy, count: int) -> list[Problem]:
    return [Problem(i, f"{i}", tuple(policy.tokenizer(f"{i}+{i}=")["input_ids"])) for i in range(count)]


def by_length(groups):
    """Correct if the completion has an odd number of tokens: as good a rule as any, and easily counted again."""
    return [[Verdict(len(c.ids) % 2 == 1, len(c.ids) > 2, len(c.ids) > 4, len(c.ids), not c.finished) for c in g.completions] for g in groups]  # fmt: skip


def test_counts_are_those_of_the_completions(policy):
    seen = []

    def judge(groups):
        seen.append(groups)
        return by_length(groups)

    metrics = evaluate(
        policy, problems_of(policy, 11), judge, ALONE, num_samples=4, temperature=1.0, max_completion_length=9, seed=0
    )
    groups = [group for part in seen for group in part]
    greedy = [g for g in groups if len(g.completions) == 1]
    sampled = [g for g in groups if len(g.completions) == 4]
    assert len(greedy) == len(sampled) == 11
    correct = [sum(len(c.ids) % 2 for c in g.completions) for g in sampled]
    assert 0 < sum(correct) < 44
    completions = [c for g in sampled for c in g.completions]
    assert metrics == {
        "eval/greedy_accuracy": sum(len(g.completions[0].ids) % 2 for g in greedy) / 11,
        "eval/mean@4": sum(correct) / 44,
        "eval/pass@1": pytest.approx(sum(correct) / 44),
        "eval/pass@2": pytest.approx(sum(pass_at_k(4, c, 2) for c in correct) / 11),
        "eval/pass@4": pytest.approx(sum(c > 0 for c in correct) / 11),
        "eval/format": sum(len(c.ids) > 2 for c in completions) / 44,
        "eval/lenient_accuracy": sum(len(c.ids) > 4 for c in completions) / 44,
        "eval/mean_length": sum(len(c.ids) for c in completions) / 44,
        "eval/truncated": sum(not c.finished for c in completions) / 44,
    }


def test_one_sample_means_greedy_only(policy):
    metrics = evaluate(
        policy,
        problems_of(policy, 5),
        by_length,
        ALONE,
        num_samples=1,
        temperature=0.0,
        max_completion_length=9,
        seed=0,
    )
    assert set(metrics) == {
        "eval/greedy_accuracy", "eval/format", "eval/lenient_accuracy", "eval/mean_length", "eval/truncated",
    }  # fmt: skip
    assert metrics["eval/mean_length"] > 0


def test_order_of_problems_does_not_matter(policy):
    settings = {"num_samples": 2, "temperature": 1.0, "max_completion_length": 9, "seed": 0}
    problems = problems_of(policy, 7)
    assert evaluate(policy, problems, by_length, ALONE, **settings) == evaluate(
        policy, problems[::-1], by_length, ALONE, **settings
    )


def test_a_failing_judge_is_raised(policy):
    def judge(groups):
        raise ZeroDivisionError("in a reward")

    with pytest.raises(ZeroDivisionError):
        evaluate(
            policy, problems_of(policy, 2), judge, ALONE, num_samples=1, temperature=0, max_completion_length=4, seed=0
        )


def test_judge_reads_correctness_format_and_the_last_number():
    def group(*texts, **columns):
        return Group(Problem(0, "q", (1,), columns), tuple(Completion((1, 2), text, True) for text in texts))

    values = iter([{"right": 1.0, "shape": 0.0}, {"right": None, "shape": 0.5}, {"right": -1.0, "shape": None}])
    judge = make_judge(lambda groups: [next(values) for g in groups for _ in g.completions], "right", "shape")
    (rows,) = judge([group("so 7", "so 8", "7, no: 9", answer="7")])
    assert [v.correct for v in rows] == [True, False, False]
    assert [v.formatted for v in rows] == [False, True, False]
    assert [v.lenient for v in rows] == [True, False, False]
    judge = make_judge(lambda groups: [{"right": 1.0}] * 2, "right", None)
    (rows,) = judge([group("<think>a</think>\n<answer>7</answer>", "7")])
    assert [v.formatted for v in rows] == [True, False]
    assert [v.lenient for v in rows] == [False, False], "no answer to compare with"


def test_greedy_and_samples_are_counted_apart(policy):
    """Greedy completions are all right and badly formatted, samples all wrong and well formatted."""

    def judge(groups):
        greedy = [len(g.completions) == 1 for g in groups]
        return [
            [Verdict(is_greedy, not is_greedy, is_greedy, len(c.ids), not c.finished) for c in g.completions]
            for is_greedy, g in zip(greedy, groups, strict=True)
        ]

    metrics = evaluate(
        policy, problems_of(policy, 3), judge, ALONE, num_samples=3, temperature=1.0, max_completion_length=5, seed=0
    )
    assert (metrics["eval/greedy_accuracy"], metrics["eval/mean@3"], metrics["eval/pass@3"]) == (1.0, 0.0, 0.0)
    assert (metrics["eval/format"], metrics["eval/lenient_accuracy"]) == (1.0, 0.0)
    assert {name for name in metrics if "pass@" in name} == {"eval/pass@1", "eval/pass@2", "eval/pass@3"}


def test_a_bound_on_memory_changes_no_count(policy):
    settings = {"num_samples": 3, "temperature": 1.0, "max_completion_length": 9, "seed": 0}
    problems = problems_of(policy, 6)
    assert evaluate(policy, problems, by_length, ALONE, **settings) == evaluate(
        policy, problems, by_length, ALONE, **settings, tokens_in_flight=40
    )
