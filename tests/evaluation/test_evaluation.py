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
from grpo.evaluation import CompletionResult, estimates, metric_names, pass_at_k
from grpo.evaluation.collect import eval_sampling, evaluate
from grpo.evaluation.estimate import mean_of, rate_of, wilson
from grpo.evaluation.grading import Grader
from grpo.rewards.runner import RewardSpec
from grpo.rollout import BuiltinEngine, SamplingParams

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


def problems_of(policy, count: int) -> list[Problem]:
    return [Problem(i, f"{i}", tuple(policy.tokenizer(f"{i}+{i}=")["input_ids"])) for i in range(count)]


def by_length(groups):
    """Correct if the completion has an odd number of tokens: as good a rule as any, and easily counted again."""

    def result(n: int, finished: bool) -> CompletionResult:
        return CompletionResult(n % 2 == 1, n > 2, n > 4, n, not finished)

    return [[result(len(c.ids), c.finished) for c in group.completions] for group in groups]


def evaluated(policy, count, grade, sampling, **options):
    return evaluate(BuiltinEngine(policy), problems_of(policy, count), grade, ALONE, sampling, seed=0, **options)


def test_counts_are_those_of_the_completions(policy):
    seen = []

    def grade(groups):
        seen.append(groups)
        return by_length(groups)

    evaluation = evaluated(policy, 11, grade, SamplingParams(4, 9, temperature=1.0))
    metrics = evaluation.metrics
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
        "eval/pass@3": pytest.approx(sum(pass_at_k(4, c, 3) for c in correct) / 11),
        "eval/pass@4": pytest.approx(sum(c > 0 for c in correct) / 11),
        "eval/format": sum(len(c.ids) > 2 for c in completions) / 44,
        "eval/lenient_accuracy": sum(len(c.ids) > 4 for c in completions) / 44,
        "eval/mean_length": sum(len(c.ids) for c in completions) / 44,
        "eval/truncated": sum(not c.finished for c in completions) / 44,
        "eval/greedy_format": sum(len(g.completions[0].ids) > 2 for g in greedy) / 11,
        "eval/greedy_lenient_accuracy": sum(len(g.completions[0].ids) > 4 for g in greedy) / 11,
        "eval/greedy_mean_length": sum(len(g.completions[0].ids) for g in greedy) / 11,
        "eval/greedy_truncated": sum(not g.completions[0].finished for g in greedy) / 11,
    }
    exact = evaluation.estimates["mean@4"]
    assert (exact.count, exact.of) == (sum(correct), 44)
    assert [p.problem.index for p in evaluation.problems] == list(range(11)), "in order, whatever was decoded first"
    assert len(evaluation.completions) == 11 * 5
    assert {result.text for result in evaluation.completions} == {None}, "texts are kept only with keep_texts"


def test_one_sample_with_the_settings_of_the_configuration(policy):
    """With top_k 1 the sample is the greedy completion, here of at most 5 tokens."""
    evaluation = {"temperature": 0.7, "top_k": 1, "max_completion_length": 5}
    config = make_config({"eval": evaluation, "rollout": {"max_completion_length": 9}})
    found = evaluated(policy, 7, by_length, eval_sampling(config), keep_texts=True)
    assert [len(p.samples) for p in found.problems] == [1] * 7
    assert [p.samples[0].length for p in found.problems] == [p.greedy.length for p in found.problems]
    assert max(p.greedy.length for p in found.problems) == 5
    assert [*evaluated(policy, 2, by_length, SamplingParams(1, 9, temperature=0.0)).metrics] == metric_names(0, [])
    assert found.metrics["eval/mean@1"] == found.metrics["eval/pass@1"] == found.metrics["eval/greedy_accuracy"]
    assert [*found.metrics] == metric_names(1, [])
    filters = {"top_p": 0.9, "top_k": 50, "min_p": 0.1, "num_samples": 8}
    config = make_config(config, {"eval": filters, "rollout": {"stop": ["\n"], "tokens_in_flight": 99}})
    assert eval_sampling(config) == SamplingParams(8, 5, 0.7, 0.9, 50, 0.1, ("\n",), 99)
    config = make_config({"eval": {"num_samples": 8, "temperature": 1}, "rollout": {"temperature": 0.5, "top_k": 3}})
    assert eval_sampling(config) == SamplingParams(8, 512, temperature=1.0), "the rollout's filters are not used"


def test_texts_are_kept_beside_their_results(policy):
    seen = []

    def grade(groups):
        seen.extend((g.problem.index, len(c.ids), c.text) for g in groups for c in g.completions)
        return Grader(EvalConfig(), Rewards(accuracy=1.0))(groups)

    sampling = SamplingParams(2, 9, temperature=1.0)
    problems = evaluated(policy, 5, grade, sampling, keep_texts=True).problems
    kept = [(p.problem.index, r.length, r.text) for p in problems for r in (p.greedy, *p.samples)]
    assert sorted(kept) == sorted(seen) and len(kept) == 15


def test_no_share_of_what_nothing_could_be_compared_with():
    def result(lenient):
        return CompletionResult(True, True, lenient, 3, False)

    found = estimates([result(None), result(None)], [])
    assert math.isnan(found["lenient_accuracy"].value) and found["lenient_accuracy"].count is None
    assert found["greedy_accuracy"].value == 1.0
    found = estimates([result(None), result(True), result(False)], [])
    assert (found["lenient_accuracy"].value, found["lenient_accuracy"].of) == (0.5, 2)


def test_the_grader_reads_correctness_format_and_the_last_number():
    def group(*texts, **columns):
        return Group(Problem(0, "q", (1,), columns), tuple(Completion((1, 2), text, True) for text in texts))

    rewards = Rewards(right=[1.0, None, -1.0], shape=[0.0, 0.5, None])
    grade = Grader(EvalConfig(correctness="right", format="shape"), rewards)
    (results,) = grade([group("so 7", "so 8", "7, no: 9", answer="7")])
    assert [r.correct for r in results] == [True, False, False]
    assert [r.formatted for r in results] == [False, True, False]
    assert [r.lenient for r in results] == [True, False, False]
    assert [r.scored for r in results] == [True, False, True]
    assert [r.rewards["right"] for r in results] == [1.0, None, -1.0]
    grade = Grader(EvalConfig(), Rewards(right=1.0))
    (results,) = grade([group("<think>a</think>\n<answer>7</answer>", "7")])
    assert [r.formatted for r in results] == [True, False]
    assert [r.lenient for r in results] == [None, None], "no answer to compare with"
    for answer, is_right in ((["9", "7"], True), (["9"], False), ({"answer": "7"}, False), (b"7", False)):
        (results,) = grade([group("7", answer=answer)])
        assert [r.lenient for r in results] == [is_right], answer
    tags, box, line = "<think>a</think> <answer>7</answer>", "so \\boxed{7}", "so\n#### 7"
    for mode, right_form in ((None, tags), ("lenient", tags), ("boxed", box), ("####", line)):
        (results,) = Grader(EvalConfig(), Rewards(accuracy=0.0, mode=mode))([group(tags, box, line, answer="7")])
        assert [r.formatted for r in results] == [right_form == text for text in (tags, box, line)], mode
        assert all(r.lenient for r in results)
    (results,) = Grader(EvalConfig(), Rewards(accuracy=1.0, format=0.0, mode="boxed"))([group(box)])
    assert not results[0].formatted, "the reward format decides where there is one"


def test_neither_the_order_of_problems_nor_a_bound_on_memory_changes_a_count(policy):
    sampling = SamplingParams(3, 9, temperature=1.0)
    found = evaluated(policy, 7, by_length, sampling).metrics
    bounded = replace(sampling, tokens_in_flight=40)
    backwards = problems_of(policy, 7)[::-1]
    same = evaluate(BuiltinEngine(policy), backwards, by_length, ALONE, bounded, seed=0).metrics
    assert found == pytest.approx(same, rel=1e-12)


def test_an_engine_says_how_many_completions_a_call_may_have(policy):
    """Environments are limited by the completions of a step, and so are the calls of an evaluation."""
    rows = []

    def grade(groups):
        rows.append(sum(len(group.completions) for group in groups))
        return by_length(groups)

    engine = BuiltinEngine(policy)
    engine.rows_per_call = 6
    sampling = SamplingParams(4, 9, temperature=1.0)
    few = evaluate(engine, problems_of(policy, 7), grade, ALONE, sampling, seed=0).metrics
    assert rows == [6, 1] + [4] * 7
    assert few == pytest.approx(evaluated(policy, 7, by_length, sampling).metrics, rel=1e-12)


def test_samples_of_a_problem_count_as_one_if_they_are_alike_and_as_more_if_they_differ():
    value, *interval = rate_of([1.0] * 3 + [0.0] * 7, 1)
    assert value == 0.3 and interval == pytest.approx(wilson(0.3, 10)), "one sample per problem: the plain interval"
    assert rate_of([1.0] * 3 + [0.0] * 7, 8) == pytest.approx((0.3, *wilson(0.3, 10))), "8 samples say what 1 says"
    assert rate_of([0.5] * 10, 8)[1:] == pytest.approx(wilson(0.5, 80)), "nothing varies between problems: all 80 count"
    half = rate_of([0.25] * 5 + [0.75] * 5, 8)  # variance of the mean 0.0625 / 10: effective 0.25 / 0.00625 = 40
    assert half[1:] == pytest.approx(wilson(0.5, 40))
    assert rate_of([0.0] * 10, 8)[1:] == pytest.approx(wilson(0.0, 10)), "all wrong: problems may all be alike"


def test_one_problem_says_nothing_about_the_others():
    """The interval of a rate is that of one observation, however many samples; that of a mean is unknown."""
    assert rate_of([0.5], 8)[1:] == pytest.approx(wilson(0.5, 1))
    for rows in ([[16.0]], [[1.0, 2.0]], [[1.0], [], []]):
        estimate = mean_of(rows)
        assert math.isfinite(estimate.value) and math.isnan(estimate.low) and math.isnan(estimate.high)


def test_the_mean_of_unlike_numbers_of_completions():
    """(1+2+3+4+5) / 5 = 3; problem sums less 3 x their counts: -3, 3, 0; scaled by 3/5; se = sqrt(6.48 / 2 / 3)."""
    estimate = mean_of([[1.0, 2.0], [4.0, 5.0], [3.0]])
    assert estimate.value == 3.0
    half = 1.959964 * (6.48 / 2 / 3) ** 0.5
    assert (estimate.low, estimate.high) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert mean_of([[], []]).of == 0


@pytest.mark.parametrize(("problems", "samples"), [(40, 1), (40, 8), (200, 8)])
def test_the_interval_holds_the_truth_about_95_times_in_100(problems, samples):
    """Problems of very different difficulty: each is solved with its own probability, drawn from 0, 0.1, 0.5, 1."""
    rng = torch.Generator().manual_seed(0)
    difficulty = torch.tensor([0.0, 0.1, 0.5, 1.0])
    truth, hits, naive = difficulty.mean().item(), 0, 0
    for _ in range(1000):
        p = difficulty[torch.randint(4, (problems,), generator=rng)]
        correct = (torch.rand(problems, samples, generator=rng) < p[:, None]).double().mean(dim=1).tolist()
        value, low, high = rate_of(correct, samples)
        hits += low <= truth <= high
        low, high = wilson(value, problems * samples)
        naive += low <= truth <= high
    assert 925 <= hits <= 975
    if samples == 8:
        assert naive < 700, "as if all samples were independent: far too narrow"


def test_every_metric_of_two_problems_by_hand():
    def result(correct, reward, **changes):
        return CompletionResult(correct, True, False, 4, False, {"r": reward}, **changes)

    samples = [[result(True, 1.0), result(False, 0.0)], [result(False, None, scored=False), result(False, 0.5)]]
    found = estimates([result(True, 1.0), result(False, 0.0)], samples)
    values = {name: estimate.value for name, estimate in found.items()}
    assert values == {
        "greedy_accuracy": 0.5, "mean@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "format": 1.0, "lenient_accuracy": 0.0,
        "mean_length": 4.0, "truncated": 0.0, "rewards/r": 0.5, "greedy_format": 1.0, "greedy_lenient_accuracy": 0.0,
        "greedy_mean_length": 4.0, "greedy_truncated": 0.0,
    }  # fmt: skip
    assert (found["mean@2"].count, found["mean@2"].of, found["rewards/r"].of) == (1, 4, 3)
    assert all(e.low <= e.value <= e.high for e in found.values())


class Rewards:
    """In place of a RewardRunner: fixed values by name, one for all completions or a list with one per completion."""

    def __init__(self, mode=None, **values):
        self.names, self.columns = list(values), list(values.values())
        self.specs = [RewardSpec(name, args={"mode": mode} if mode else {}) for name in values]

    def score(self, prompts, completions, **_):
        columns = [c if isinstance(c, list) else [c] * len(completions) for c in self.columns]
        return SimpleNamespace(values=[list(row) for row in zip(*columns, strict=True)])


@pytest.mark.parametrize(
    ("rewards", "settings", "correct", "formatted"),
    [
        ({"format": 1.0, "accuracy": 0.0}, {}, False, True),
        ({"length": 0.3, "other": 0.0}, {}, True, False),
        ({"accuracy": 0.0, "mine": 0.4}, {"correctness": "mine"}, True, False),
        ({"accuracy": 0.0, "mine": 0.4}, {"correctness": "mine", "correct_above": 0.99}, False, False),
        ({"accuracy": 1.0, "tag_groups": 0.5}, {"format": "tag_groups"}, True, True),
        ({"accuracy": None}, {}, False, False),
    ],
)
def test_the_configuration_says_which_reward_decides(rewards, settings, correct, formatted):
    grade = Grader(EvalConfig(**settings), Rewards(**rewards))
    ((result,),) = grade([Group(Problem(0, "q", (1,)), (Completion((1,), "text", True),))])
    assert (result.correct, result.formatted) == (correct, formatted)
    assert result.scored is (rewards.get("accuracy", 0) is not None)
