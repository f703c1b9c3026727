"""``rollout.keep_sampling_mask``: sampling records the allowed tokens, and the loss takes the softmax over these."""

from dataclasses import replace

import pytest
import torch
from test_rollout import SAMPLING, SEED_KEY, TEXTS, generate, ids, problems_of
from test_sampling import filtered, softmax

from grpo.algorithm.batch import AllowedTokens, collate
from grpo.algorithm.logprobs import CompletionScorer, keep_only_, score_logits
from grpo.rollout.draw import SamplingParams, draw_and_record

FILTERS = [dict(top_p=0.8), dict(top_k=5), dict(min_p=0.1), dict(top_k=20, top_p=0.9, min_p=0.01)]


def test_what_is_recorded_is_what_plain_python_allows():
    generator = torch.Generator().manual_seed(0)
    logits_RV, u_R = 3 * torch.randn(40, 30, generator=generator), torch.rand(40, generator=generator)
    for filters in FILTERS:
        sampling = SamplingParams(1, 1, temperature=0.8, keep_sampling_mask=True, **filters)
        token_R, logprob_R, allowed_RV = draw_and_record(logits_RV, u_R, sampling)
        for logits_V, token, logprob, allowed_V in zip(logits_RV, token_R.tolist(), logprob_R, allowed_RV, strict=True):
            expected = filtered(softmax(logits_V.tolist(), 0.8), sampling)
            assert allowed_V.nonzero().flatten().tolist() == sorted(expected)
            assert logprob.exp().item() == pytest.approx(expected[token], rel=1e-5)


def test_the_loss_scores_what_the_sampler_reports(policy):
    """The same tokens as without the mask, each with the log-prob of the scorer; rows wait, end and leave."""
    problems = problems_of(policy, *TEXTS)
    sampling = replace(SAMPLING, keep_sampling_mask=True, tokens_in_flight=300, stop=("7",), **FILTERS[3])
    groups = generate(policy, problems, sampling, seed_key=SEED_KEY)
    plain = generate(policy, problems, replace(sampling, keep_sampling_mask=False), seed_key=SEED_KEY)
    assert ids(groups) == ids(plain)
    assert all(c.allowed is None for group in plain for c in group.completions)
    for completion in (c for group in groups for c in group.completions):
        of_tokens = completion.allowed.ids_K.split(completion.allowed.counts.tolist())
        assert all(token in allowed for token, allowed in zip(completion.ids, of_tokens, strict=True))
        assert int(completion.allowed.counts.max()) <= (sampling.top_k or policy.model.config.vocab_size)
    batch = collate(groups, torch.zeros(4, 3), pad_id=policy.pad_id)
    scorer = CompletionScorer(policy.model, temperature=0.9)
    with torch.no_grad():
        scored_BT, _ = scorer(*batch.scorer_inputs)
        whole_BT, _ = scorer(*batch.scorer_inputs[:4])
    torch.testing.assert_close(scored_BT, batch.sampling_logprobs_BT, rtol=0, atol=1e-5)
    assert (whole_BT - scored_BT).abs().max() > 0.05


@pytest.mark.parametrize("filters", [dict(top_p=0.6), dict(top_k=3), dict(min_p=0.3)], ids=str)
def test_the_gradient_estimate_is_unbiased(filters):
    """One token and 8 logits: the mean of reward x gradient of the log-prob, and the exact gradient."""
    logits_V = torch.tensor([0.3, -1.0, 2.0, 0.1, 1.1, -3.0, 0.35, 1.9], requires_grad=True)
    rewards_V, n = torch.tensor([1.0, 0.0, 0.2, 0.9, 0.0, 1.0, 0.5, 0.7]), 40_000
    sampling = SamplingParams(1, 1, keep_sampling_mask=True, **filters)
    u_R = (torch.arange(n, dtype=torch.float64) + 0.5).div(n).float()  # an even grid: no noise of sampling
    logits_RV = logits_V.expand(n, -1)
    token_R, _, allowed_RV = draw_and_record(logits_RV.detach(), u_R, sampling)
    allowed = AllowedTokens(allowed_RV.nonzero()[:, 1].int(), allowed_RV.sum(dim=1).int())

    allowed_V = allowed_RV[0]
    truncated_V = logits_V.double().masked_fill(~allowed_V, -torch.inf).softmax(dim=0)
    (exact_V,) = torch.autograd.grad((truncated_V * rewards_V).sum(), logits_V)

    def estimate(allowed):
        logprob_R, _ = score_logits(keep_only_(logits_RV.clone(), allowed, 1.0), token_R, 1.0)
        return torch.autograd.grad((logprob_R * rewards_V[token_R]).mean(), logits_V)[0]

    assert 1 < int(allowed_V.sum()) < 8
    torch.testing.assert_close(estimate(allowed), exact_V, rtol=0, atol=1e-4)
    assert (estimate(None) - exact_V).abs().max() > 0.02
