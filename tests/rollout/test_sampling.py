"""One token by inverting the CDF, and the filters before it. Shapes: ``R`` rows, ``V``
vocabulary."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo.rollout.draw import SamplingParams, draw_tokens, filter_probs, first_exceeding

torch.set_num_threads(1)

PLAIN = SamplingParams(num_generations=1, max_completion_length=1)
HIGHEST = 1 - 2**-24
"""The largest number ``torch.rand`` gives in fp32."""


def softmax(logits, temperature=1.0):
    exponentials = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [e / math.fsum(exponentials) for e in exponentials]


def filtered(probabilities, sampling):
    """The filters in plain Python, renormalised: token -> probability. Ties go to the lower token
    id."""
    order = sorted(range(len(probabilities)), key=lambda v: (-probabilities[v], v))
    kept = order[: sampling.top_k] if sampling.top_k > 0 else order
    if sampling.top_p < 1:
        mass, nucleus = math.fsum(probabilities[v] for v in kept), []
        for v in kept:  # the smallest set whose share reaches top_p
            nucleus.append(v)
            if math.fsum(probabilities[n] for n in nucleus) / mass >= sampling.top_p:
                break
        kept = nucleus
    kept = [v for v in kept if probabilities[v] >= sampling.min_p * probabilities[order[0]]]
    mass = math.fsum(probabilities[v] for v in kept)
    return {v: probabilities[v] / mass for v in kept}


# --- drawing


def test_inverting_the_cdf_by_hand():
    # Probabilities 1/2, 1/4, 0, 1/4: edges at .5, .75, .75, 1. An edge belongs to the token after
    # it.
    logits = torch.tensor([math.log(2), 0.0, -math.inf, 0.0])
    uniforms = [0.0, 0.25, 0.4999, 0.5, 0.6, 0.7499, 0.75, 0.9, HIGHEST]
    token_R, _ = draw_tokens(logits.expand(len(uniforms), -1), torch.tensor(uniforms), PLAIN)
    assert token_R.tolist() == [0, 0, 0, 1, 1, 1, 3, 3, 3]


FILTERED = [(3, 1.0, 0.0), (0, 0.6, 0.0), (0, 1.0, 0.3), (4, 0.8, 0.2), (0, 1.0, 0.0)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERED)
def test_frequencies_under_filters_are_the_renormalised_softmax(top_k, top_p, min_p):
    logits = [0.3, -1.0, 2.0, 0.1, 1.1, -3.0, 0.35, 1.9]
    sampling = replace(PLAIN, temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = filtered(softmax(logits, 0.9), sampling)
    assert len(expected) > 1
    n = 20_000  # uniforms on an even grid: the shares are exact to 1/n per edge of the CDF
    u_R = (torch.arange(n, dtype=torch.float64) + 0.5).div(n).float()
    token_R, _ = draw_tokens(torch.tensor(logits).expand(n, -1), u_R, sampling)
    shares = torch.bincount(token_R, minlength=len(logits)).div(n).tolist()
    assert shares == pytest.approx([expected.get(v, 0.0) for v in range(len(logits))], abs=1e-4)


def test_logprobs_are_at_the_temperature_and_before_the_filters():
    generator = torch.Generator().manual_seed(1)
    logits_RV = 3 * torch.randn(64, 50, generator=generator)
    u_R = torch.rand(64, generator=generator)
    for temperature in (1.0, 0.7):
        for changes in ({}, dict(top_k=2), dict(top_p=0.5), dict(min_p=0.5)):
            sampling = replace(PLAIN, temperature=temperature, **changes)
            token_R, logprob_R = draw_tokens(logits_RV, u_R, sampling)
            for row, token, logprob in zip(
                logits_RV.tolist(), token_R.tolist(), logprob_R.tolist(), strict=True
            ):
                assert logprob == pytest.approx(
                    math.log(softmax(row, temperature)[token]), abs=1e-5
                )


# --- filters


def test_filters_by_hand():
    probs = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625]])

    def kept(**changes):
        values = filter_probs(probs, replace(PLAIN, **changes))
        assert ((values == 0) | (values == probs)).all()  # kept as they are, not renormalised
        return (values[0] > 0).nonzero().flatten().tolist()

    assert kept() == kept(top_k=99) == [0, 1, 2, 3, 4]
    assert kept(top_k=3) == [0, 1, 3] and kept(top_k=4) == [0, 1, 2, 3, 4]  # a tie: both
    assert kept(top_p=0.5) == [1]
    assert kept(top_p=0.51) == [1, 3]
    assert kept(top_p=1e-9) == [1]
    assert kept(min_p=0.25) == [0, 1, 3]
    assert kept(min_p=0.26) == [1, 3]
    # After top_k=2 the shares are 2/3 and 1/3: one token reaches 0.6, two are needed for 0.7.
    assert kept(top_k=2, top_p=0.6) == [1]
    assert kept(top_k=2, top_p=0.7) == [1, 3]


def test_tokens_without_probability_are_never_drawn():
    """At both ends and between; numbers that round onto a boundary; tiny and denormal totals."""
    rng = torch.Generator().manual_seed(1)
    for scale in (1.0, 1e-20, 1e-44):
        for _ in range(20):
            probs_RV = torch.rand(16, 400, generator=rng) * scale
            probs_RV[torch.rand(probs_RV.shape, generator=rng) < 0.9] = 0.0
            probs_RV[:, :130] = 0.0
            probs_RV[:, 260:] = 0.0
            probs_RV[:, 200] = scale
            u_R = torch.tensor([0.0, 2**-24, 0.5, HIGHEST]).repeat(4)
            token_R, _ = first_exceeding(probs_RV, u_R)
            assert (probs_RV.gather(1, token_R[:, None]) > 0).all()
    boundary = torch.zeros(2, 500)
    boundary[:, [3, 256]] = torch.tensor([0.25, 0.75])
    just_below = float(np.nextafter(np.float32(0.25), np.float32(0)))
    token_R, _ = first_exceeding(boundary, torch.tensor([just_below, 0.25]))
    assert token_R.tolist() == [3, 256]
