"""Evaluation: the estimator, the counting, and what counts as correct."""

import math
from dataclasses import replace
from itertools import combinations
from math import comb
from types import SimpleNamespace

import pytest
import torch

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.config import EvalConfig, make_config
from grpo.distributed import World
from grpo.evaluation import metric_names, pass_at_k
from grpo.evaluation.collect import eval_sampling, evaluate
from grpo.evaluation.estimate import (
    CompletionResult,
    estimate_metrics,
    mean_with_interval,
    rate_with_interval,
    wilson,
)
from grpo.evaluation.grading import Grader, correctness_note
from grpo.rewards.runner import RewardSpec
from grpo.rollout import BuiltinEngine, SamplingParams

SINGLE_PROCESS = World(0, 1, torch.device("cpu"))


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one():
    assert pass_at_k(4, 1, 2) == 0.5
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                hits = sum(any(i < c for i in subset) for subset in combinations(range(n), k))
                assert pass_at_k(n, c, k) == pytest.approx(hits / comb(n, k), abs=1e-15)
    with pytest.raises(ValueError, match="k=3 is not possible with num_samples=2"):
        pass_at_k(2, 1, 3)


def problems_of(policy, count: int) -> list[Problem]:
    encode = policy.tokenizer
    return [Problem(i, f"{i}", tuple(encode(f"{i}+{i}=")["input_ids"])) for i in range(count)]


def by_length(groups):
    """Correct if the completion has an odd number of tokens: as good a rule as any, and easily
    counted again."""

    def result(completion: Completion) -> CompletionResult:
        n = len(completion.ids)
        return CompletionResult(
            n % 2 == 1, n > 2, n > 4, n, not completion.finished, text=completion.text
        )

    return [list(map(result, group.completions)) for group in groups]


def evaluated(policy, count, grade, sampling, **options):
    engine = BuiltinEngine(policy)
    return evaluate(
        engine, problems_of(policy, count), grade, SINGLE_PROCESS, sampling, seed=0, **options
    )


def test_counts_are_those_of_the_completions(policy):
    seen = []

    def grade(groups):
        seen.extend(groups)
        return by_length(groups)

    evaluation = evaluated(policy, 11, grade, SamplingParams(4, 9, temperature=1.0))
    greedy = {
        group.problem.index: group.completions for group in seen if len(group.completions) == 1
    }
    sampled = {
        group.problem.index: group.completions for group in seen if len(group.completions) == 4
    }
    correct = [sum(len(c.ids) % 2 for c in row) for row in sampled.values()]
    assert 0 < sum(correct) < len(greedy) * 4 == 44
    exact = evaluation.estimates["eval/mean@4"]
    assert (exact.value, exact.count, exact.of) == (sum(correct) / 44, sum(correct), 44)
    assert evaluation.metrics["eval/pass@4"] == pytest.approx(sum(c > 0 for c in correct) / 11)
    for index, problem in enumerate(evaluation.problems):
        texts = [result.text for result in (problem.greedy, *problem.samples)]
        assert texts == [c.text for c in greedy[index] + sampled[index]], (
            "in order, whatever was decoded first"
        )


def test_one_sample_with_the_settings_of_the_configuration(policy):
    """With top_k 1 the sample is the greedy completion, here of at most 5 tokens."""
    evaluation = {"temperature": 0.7, "top_k": 1, "max_completion_length": 5}
    config = make_config({"eval": evaluation, "rollout": {"max_completion_length": 9}})
    found = evaluated(policy, 7, by_length, eval_sampling(config))
    assert [p.samples[0].length for p in found.problems] == [
        p.greedy.length for p in found.problems
    ]
    assert max(p.greedy.length for p in found.problems) == 5
    assert (
        found.metrics["eval/mean@1"]
        == found.metrics["eval/pass@1"]
        == found.metrics["eval/greedy_accuracy"]
    )
    assert [*found.metrics] == metric_names(1, [])
    greedy = evaluated(policy, 2, by_length, SamplingParams(1, 9, temperature=0.0))
    assert [*greedy.metrics] == metric_names(0, [])
    config = make_config(
        {"eval": {"num_samples": 8, "temperature": 1}, "rollout": {"temperature": 0.5, "top_k": 3}}
    )
    assert eval_sampling(config) == SamplingParams(8, 512, temperature=1.0), (
        "the rollout's filters are not used"
    )


def test_neither_the_order_of_problems_nor_the_size_of_a_call_changes_a_count(policy):
    """Nor a bound on memory. Environments are limited by the completions of a step, and so are the
    calls."""
    sampling = SamplingParams(4, 9, temperature=1.0)
    found = evaluated(policy, 7, by_length, sampling).metrics
    rows = []

    def grade(groups):
        rows.append(sum(len(group.completions) for group in groups))
        return by_length(groups)

    engine = BuiltinEngine(policy)
    engine.rows_per_call = 6
    backwards = problems_of(policy, 7)[::-1]
    bounded = replace(sampling, tokens_in_flight=40)
    same = evaluate(engine, backwards, grade, SINGLE_PROCESS, bounded, seed=0).metrics
    assert rows == [6, 1] + [4] * 7
    assert found == pytest.approx(same, rel=1e-12)


def test_every_metric_of_two_problems_by_hand():
    def result(correct, reward, lenient=False, **changes):
        return CompletionResult(correct, True, lenient, 4, False, {"r": reward}, **changes)

    samples = [
        [result(True, 1.0), result(False, 0.0)],
        [result(False, None, scored=False), result(False, 0.5)],
    ]
    found = estimate_metrics([result(True, 1.0), result(False, 0.0)], samples)
    values = {name.removeprefix("eval/"): estimate.value for name, estimate in found.items()}
    assert values == {
        "greedy_accuracy": 0.5, "mean@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "format": 1.0, "lenient_accuracy": 0.0,
        "mean_length": 4.0, "truncated": 0.0, "rewards/r": 0.5, "greedy_format": 1.0, "greedy_lenient_accuracy": 0.0,
        "greedy_mean_length": 4.0, "greedy_truncated": 0.0,
    }  # fmt: skip
    assert (found["eval/mean@2"].count, found["eval/mean@2"].of) == (1, 4)
    # No share of what nothing could be compared with.
    found = estimate_metrics(
        [result(True, 1.0, None), result(False, 1.0, True), result(False, 1.0)], [[], [], []]
    )
    assert (found["eval/lenient_accuracy"].value, found["eval/lenient_accuracy"].of) == (0.5, 2)
    assert math.isnan(
        estimate_metrics([result(True, 1.0, None)], [[]])["eval/lenient_accuracy"].value
    )


def test_wilsons_interval():
    # 8 of 10: (0.8 + 3.8415 / 20 +- 1.96 sqrt(0.016 + 3.8415 / 400)) / (1 + 3.8415 / 10)
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(1.0, 100) == pytest.approx((1 - 0.03699, 1.0), abs=1e-4)


@pytest.mark.parametrize(
    ("values", "samples", "observations"),
    [
        ([1.0] * 3 + [0.0] * 7, 1, 10),  # one sample per problem: the plain interval
        ([1.0] * 3 + [0.0] * 7, 8, 10),  # 8 samples say what 1 says
        ([0.5] * 10, 8, 80),  # nothing varies between problems: all 80 count
        # variance of the mean 0.0625 / 10: effective 0.25 / 0.00625 = 40
        (
            [0.25] * 5 + [0.75] * 5,
            8,
            40,
        ),
        ([0.0] * 10, 8, 10),  # all wrong: problems may all be alike
        ([0.5], 8, 1),  # one problem says nothing about the others
    ],
)
def test_samples_of_a_problem_count_as_one_if_they_are_alike_and_as_more_if_they_differ(
    values, samples, observations
):
    rate = sum(values) / len(values)
    assert rate_with_interval(values, samples) == pytest.approx((rate, *wilson(rate, observations)))


def test_the_mean_of_unlike_numbers_of_completions():
    """(1+2+3+4+5) / 5 = 3; problem sums less 3 x their counts: -3, 3, 0; scaled by 3/5; se =
    sqrt(6.48 / 2 / 3)."""
    estimate = mean_with_interval([[1.0, 2.0], [4.0, 5.0], [3.0]])
    half = 1.959964 * (6.48 / 2 / 3) ** 0.5
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx(
        (3, 3 - half, 3 + half), abs=1e-5
    )
    for rows in ([[16.0]], [[1.0, 2.0]], [[1.0], [], []]):
        estimate = mean_with_interval(rows)
        assert (
            math.isfinite(estimate.value) and math.isnan(estimate.low) and math.isnan(estimate.high)
        )


def test_the_interval_holds_the_truth_about_95_times_in_100():
    """40 problems of very different difficulty: each is solved with its own probability, drawn from
    0, 0.1, 0.5, 1."""
    rng = torch.Generator().manual_seed(0)
    difficulty = torch.tensor([0.0, 0.1, 0.5, 1.0])
    truth = difficulty.mean().item()
    hits = 0
    naive = 0
    for _ in range(1000):
        p = difficulty[torch.randint(4, (40,), generator=rng)]
        correct = (torch.rand(40, 8, generator=rng) < p[:, None]).double().mean(dim=1)
        value, low, high = rate_with_interval(correct.tolist(), 8)
        hits += low <= truth <= high
        low, high = wilson(value, 40 * 8)
        naive += low <= truth <= high
    assert 925 <= hits <= 975
    assert naive < 700, "as if all samples were independent: far too narrow"


class Rewards:
    """In place of a RewardRunner: fixed values by name, one for all completions or a list with one
    per completion."""

    def __init__(self, mode=None, **values):
        self.names = list(values)
        self.columns = list(values.values())
        self.specs = [RewardSpec(name, args={"mode": mode} if mode else {}) for name in values]

    def score(self, prompts, completions, **_):
        columns = [c if isinstance(c, list) else [c] * len(completions) for c in self.columns]
        values = [list(row) for row in zip(*columns, strict=True)]
        return SimpleNamespace(values=values, first_errors={})


def graded(rewards, *texts, config=None, **columns):
    completions = tuple(Completion((1, 2), text, True) for text in texts)
    (results,) = Grader(config or EvalConfig(), rewards)(
        [Group(Problem(0, "q", (1,), columns), completions)]
    )
    return results


def test_the_grader_keeps_the_errors_of_environments():
    """An evaluation without any score quotes them."""
    failed, works, none = (
        Completion((1,), "x", True, environment=row, environment_failure=failure)
        for row, failure in ((0, "reset: KeyError: 'bed'"), (1, ""), (None, None))
    )
    grade = Grader(EvalConfig(), Rewards(right=None))
    grade([Group(Problem(0, "q", (1,)), (works, none))])
    assert grade.errors == {}
    grade([Group(Problem(0, "q", (1,)), (failed, works, none))])
    assert grade.errors == {"environment": "reset: KeyError: 'bed'"}


def test_the_grader_reads_correctness_format_and_the_last_number():
    rewards = Rewards(right=[1.0, None, -1.0], shape=[0.0, 0.5, None])
    config = EvalConfig(correctness="right", format="shape")
    results = graded(rewards, "so 7", "so 8", "7, no: 9", config=config, answer="7")
    assert [r.correct for r in results] == [True, False, False]
    assert [r.formatted for r in results] == [False, True, False]
    assert [r.lenient for r in results] == [True, False, False]
    assert [r.scored for r in results] == [True, False, True]
    for answer, lenient in ((None, None), (["9", "7"], True), (b"7", False)):
        (result,) = graded(Rewards(right=1.0), "7", answer=answer)
        assert result.lenient is lenient, answer
    texts = ("<think>a</think> <answer>7</answer>", "so \\boxed{7}", "so\n#### 7")
    for mode, right_form in ((None, 0), ("lenient", 0), ("boxed", 1), ("####", 2)):
        results = graded(Rewards(accuracy=0.0, mode=mode), *texts, answer="7")
        assert [r.formatted for r in results] == [right_form == i for i in range(3)], mode
    (result,) = graded(Rewards(accuracy=1.0, format=0.0, mode="boxed"), texts[1])
    assert not result.formatted, "the reward format decides where there is one"


@pytest.mark.parametrize(
    ("rewards", "settings", "correct"),
    [
        ({"format": 1.0, "accuracy": 0.0}, {}, False),
        ({"length": 0.3, "other": 0.0}, {}, True),
        ({"accuracy": 0.0, "mine": 0.4}, {"correctness": "mine"}, True),
        ({"accuracy": 0.0, "mine": 0.4}, {"correctness": "mine", "correct_above": 0.99}, False),
    ],
)
def test_the_configuration_says_which_reward_decides(rewards, settings, correct):
    (result,) = graded(Rewards(**rewards), "text", config=EvalConfig(**settings))
    assert result.correct is correct


def test_who_chose_the_bar_is_not_told_of_it():
    note = correctness_note(EvalConfig(), ["mine", "other"])
    assert "count a completion as correct if mine > 0; eval.correct_above=NUMBER" in note
    for settings in ({"correct_above": 0.9}, {"correct_above": 0}):
        assert correctness_note(EvalConfig(**settings), ["mine"]) is None
        assert "if mine > " in correctness_note(EvalConfig(**settings), ["mine", "other"])
    assert correctness_note(EvalConfig(correctness="other"), ["mine", "other"]) is None
    assert correctness_note(EvalConfig(), ["mine", "accuracy"]) is None
