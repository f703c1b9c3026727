"""Captured decode steps give the loop's tokens; here without graphs (``tests/cuda``: with them)."""

from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import load
from test_rollout import SEED_KEY, TEXTS, ids, problems_of

from grpo.rollout import BuiltinEngine, SamplingParams, cuda_graphs
from grpo.rollout.cuda_graphs import CapturedSteps, CUDAGraphs

SAMPLING = SamplingParams(num_generations=8, max_completion_length=24)


def engines(random_model, warn=pytest.fail, **options) -> tuple[BuiltinEngine, BuiltinEngine]:
    """Two engines of equal policies: one decodes by plain steps, one by captured steps."""
    plain = BuiltinEngine(load(random_model, packed=True, **options))
    captured = BuiltinEngine(load(random_model, packed=True, **options))
    captured.graphs = CUDAGraphs(warn)
    return plain, captured


def answers(T):
    """Two tokens after each turn, while they leave room."""
    lengths = Counter()

    def reply(row, turn):
        lengths[row] += len(turn) + 2
        future = Future()
        future.set_result([5, 6] if lengths[row] < T else None)
        return future

    return reply


@pytest.mark.parametrize(
    ("turns", "changes"),
    [
        (False, {"temperature": 0.0, "max_completion_length": 2}),
        (False, {"top_p": 0.9, "top_k": 20, "stop": ("7", "(")}),
        (False, {"tokens_in_flight": 170, "num_generations": 2}),
        (True, {}),
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_steps(
    random_model, monkeypatch, new_memory_is_nan, turns, changes
):
    """Prompts of 1 to 40 tokens; rows leave, join and come back, and a step's width grows."""
    monkeypatch.setattr(cuda_graphs, "COMPLETION_BUCKET", 16)
    sampling = replace(SAMPLING, **changes)
    plain, captured = engines(random_model)
    problems = problems_of(plain.policy, *TEXTS, "7")
    rollouts = []
    for engine in (captured, plain):
        replies = answers(sampling.max_completion_length) if turns else None
        rollouts.append(engine.generate(problems, sampling, seed_key=SEED_KEY, replies=replies))
    found, expected = rollouts
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
            assert (a.text, a.finished, a.loss_mask) == (b.text, b.finished, b.loss_mask)
    assert captured.graphs.are_on


def test_a_step_is_captured_anew_when_a_quarter_of_the_rows_is_left(random_model, monkeypatch):
    _, engine = engines(random_model)
    sizes = []
    capture = CapturedSteps._capture

    def recorded(self):
        sizes.append(len(self.token_R))
        capture(self)

    monkeypatch.setattr(CapturedSteps, "_capture", recorded)
    engine.policy.eos_ids = tuple(range(0, 400, 8))  # about one row of eight ends at each token
    sampling = replace(SAMPLING, max_completion_length=40)
    engine.generate(problems_of(engine.policy, *TEXTS), sampling, seed_key=SEED_KEY)
    assert sizes[0] == 32
    assert len(sizes) > 2
    for before, size in pairwise(sizes):
        assert size <= max(before // 4, 1)


def raises(monkeypatch):
    def graph(self):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CapturedSteps, "_replay_of_step", graph)


def reads_another_token(monkeypatch):
    def replay_of_step(self):
        def replay():
            token_R = self.token_R
            self.token_R = token_R + 1
            self._step()
            self.token_R = token_R

        return replay

    monkeypatch.setattr(CapturedSteps, "_replay_of_step", replay_of_step)


@pytest.mark.parametrize(
    ("mistake", "precision", "reason"),
    [
        (raises, "fp32", "operation not permitted"),
        (reads_another_token, "fp32", "a replayed step gives other results"),
        (reads_another_token, "bf16", "a replayed step gives other results"),
    ],
)
def test_what_cannot_be_captured_or_is_wrong_is_decoded_by_plain_steps(
    random_model, monkeypatch, mistake, precision, reason
):
    said = []
    plain, engine = engines(random_model, said.append, precision=precision)
    problems = problems_of(engine.policy, *TEXTS)
    expected = plain.generate(problems, SAMPLING, seed_key=SEED_KEY)
    mistake(monkeypatch)
    for _ in range(2):
        assert ids(engine.generate(problems, SAMPLING, seed_key=SEED_KEY)) == ids(expected)
    assert len(said) == 1
    assert reason in said[0]
    assert not engine.graphs.are_on


def test_the_dry_run_captures_a_step_of_finite_numbers(random_model, new_memory_is_nan):
    _, engine = engines(random_model)
    engine.dry_run([(3, 4, 5)] * 4 + [(6, 7)] * 4, SAMPLING)
    assert engine.graphs.are_on
