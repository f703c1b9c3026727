"""Shifted cross-entropy against numbers worked by hand and against full logits in float64.

Shapes: ``B`` rows, ``S`` prompt + completion tokens, ``T`` completion tokens, ``V`` vocabulary.
"""

import math

import pytest
import torch
from architectures import GPT2, SIZES, V, build, checked

import grpo.algorithm.logprobs
from grpo.algorithm.batch import completion_mask
from grpo.algorithm.logprobs import (
    CompletionScorer,
    _ScoreLogits,
    logprobs_from_logits,
    score_logits,
)

torch.set_num_threads(1)

PROMPTS, COMPLETIONS = (3, 7, 1, 5), (4, 2, 6, 0)


def tiny_qwen2():
    return build("qwen2", SIZES)


def tiny_gemma2(cap):
    return build("gemma2", SIZES | dict(head_dim=8, final_logit_softcapping=cap), attention="eager")


def uneven_rows():
    """Right-padded sequences, prompt lengths and completion mask of four rows, one without a
    completion."""
    ids_BS = torch.randint(3, V, (4, 9), generator=torch.Generator().manual_seed(1))
    for b in range(4):
        ids_BS[b, PROMPTS[b] + COMPLETIONS[b] :] = 0
    mask_BT = completion_mask(torch.zeros(4, max(COMPLETIONS)), torch.tensor(COMPLETIONS))
    return ids_BS, torch.tensor(PROMPTS), mask_BT


def reference(model, temperature, ids_BS):
    """Log-probs and entropies from all the logits, row by row and token by token, in the model's
    dtype."""
    logprobs_BT = torch.zeros(4, max(COMPLETIONS), dtype=model.dtype)
    entropies_BT = torch.zeros_like(logprobs_BT)
    for b, (p, c) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids_S = ids_BS[b, : p + c]  # no padding at all
        logits_SV = model(input_ids=ids_S[None]).logits[0] / temperature
        for t in range(c):
            distribution = logits_SV[p + t - 1].log_softmax(dim=0)
            logprobs_BT[b, t] = distribution[ids_S[p + t]]
            entropies_BT[b, t] = -(distribution.exp() * distribution).sum()
    return logprobs_BT, entropies_BT


def gradients_of(model, logprobs_BT):
    weights_BT = torch.linspace(-1, 2, logprobs_BT.numel()).view_as(logprobs_BT)
    model.zero_grad()
    (logprobs_BT * weights_BT).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# --- logits to log-probs


def test_log_probs_by_hand():
    # Logits are logs of weights, so that a probability is weight / sum of weights; at temperature
    # 1/2 they are squared.
    weights = torch.tensor([[1, 2, 3, 4], [8, 4, 2, 2], [6, 2, 1, 1]], dtype=torch.float64)
    labels = torch.tensor([2, 0, -100])
    logprobs = logprobs_from_logits(weights.log(), labels)
    assert (
        logprobs.exp().tolist() == pytest.approx([3 / 10, 1 / 2, 1.0])
        and logprobs.dtype == torch.float64
    )
    logprobs = logprobs_from_logits(weights.log(), labels, temperature=0.5)
    assert logprobs.exp().tolist() == pytest.approx([9 / 30, 64 / 88, 1.0])


def test_entropy_is_not_negative_at_a_low_temperature():
    generator = torch.Generator().manual_seed(0)
    logits = 30 + torch.randn(50, 200, generator=generator) * 1e-2
    labels = torch.zeros(50, dtype=torch.long)
    _, entropies = _ScoreLogits.apply(logits, labels, 1e-3)
    probabilities = (logits.double() / 1e-3).softmax(dim=-1)
    expected = torch.special.entr(probabilities).sum(dim=-1)
    assert (entropies >= 0).all()
    torch.testing.assert_close(entropies.double(), expected, rtol=0, atol=2e-2)


def test_entropy_by_hand():
    # Probabilities 1/2, 1/4, 1/8, 1/8: 1/2 ln 2 + 1/4 ln 4 + 2/8 ln 8 = 7/4 ln 2. Uniform over 4:
    # ln 4. Sure: 0.
    logits = (
        torch.tensor([[4.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
        .log()
        .requires_grad_()
    )
    _, entropies = score_logits(logits, torch.tensor([0, 0, 0]), 1.0)
    torch.testing.assert_close(
        entropies, torch.tensor([1.75, 2.0, 0.0]) * math.log(2), rtol=1e-6, atol=1e-7
    )
    assert not entropies.requires_grad


# --- whole models


def assert_agrees_with_float64(build_model, temperature, chunks):
    """Log-probs, entropies and all gradients, with each number of tokens per chunk."""
    inputs = uneven_rows()
    exact_model = build_model().double()
    model = build_model()
    expected_BT, expected_entropies_BT = reference(exact_model, temperature, inputs[0])
    expected = gradients_of(exact_model, expected_BT)
    for tokens_per_chunk in chunks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpo.algorithm.logprobs, "LOGITS_PER_CHUNK", tokens_per_chunk * V)
            scorer = CompletionScorer(model, temperature)
            scorer.detect_plain_head(inputs[0])
            logprobs_BT, entropies_BT = scorer(*inputs)
            gradients = gradients_of(model, logprobs_BT)
        assert (
            logprobs_BT.dtype == entropies_BT.dtype == torch.float32
            and not entropies_BT.requires_grad
        )
        torch.testing.assert_close(logprobs_BT.double(), expected_BT, rtol=0, atol=1e-5)
        torch.testing.assert_close(entropies_BT.double(), expected_entropies_BT, rtol=0, atol=1e-5)
        assert not logprobs_BT[~inputs[2]].any() and not entropies_BT[~inputs[2]].any()
        for name, gradient in expected.items():
            torch.testing.assert_close(
                gradients[name].double(), gradient, rtol=1e-4, atol=1e-5, msg=name
            )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scorer_agrees_with_the_full_logits_in_float64(temperature):
    assert_agrees_with_float64(tiny_qwen2, temperature, chunks=(1, 5, 1000))


def test_chunks_bound_the_logits(monkeypatch):
    model, rows_of_logits = tiny_qwen2(), []
    scorer, _ = checked(model)
    scaled = grpo.algorithm.logprobs._divide_by_temperature
    counted = lambda logits, *rest: rows_of_logits.append(len(logits)) or scaled(logits, *rest)  # noqa: E731
    monkeypatch.setattr(grpo.algorithm.logprobs, "_divide_by_temperature", counted)
    monkeypatch.setattr(grpo.algorithm.logprobs, "LOGITS_PER_CHUNK", 5 * V)
    logprobs_BT, _ = scorer(*uneven_rows())
    # 4 + 2 + 6 + 0 completion tokens; prompts and padding never meet the head
    assert rows_of_logits == [
        5,
        5,
        2,
    ]
    gradients_of(model, logprobs_BT)
    assert rows_of_logits == [5, 5, 2] * 2  # and once more in the backward pass


def test_chunks_add_up_their_gradients_in_the_weights_precision():
    """600 chunks of one token under bf16 autocast: each is rounded to bf16, their sum is not."""
    generator = torch.Generator().manual_seed(0)
    # Exact in bf16, so that the gradient's own rounding is all there is.
    hidden_NH = torch.randn(600, 8, generator=generator).bfloat16().float().requires_grad_()
    head = torch.nn.Linear(8, V).bfloat16().float()
    inputs = [hidden_NH, *head.parameters()]
    labels_N = torch.randint(V, (600,), generator=generator)
    weights_N = torch.rand(600, generator=generator)

    def gradients(n, dtype):
        score = grpo.algorithm.logprobs._ScoreHiddenInChunks.apply
        logprobs_N, _ = score(*inputs, labels_N, 0.7, n, dtype)
        return torch.autograd.grad((logprobs_N * weights_N).sum(), inputs)

    for exact, found in zip(
        gradients(600, torch.float32), gradients(1, torch.bfloat16), strict=True
    ):
        assert found.dtype == torch.float32
        assert float((found - exact).norm() / exact.norm()) < 5e-3


@pytest.mark.parametrize(
    "build_model", [tiny_qwen2, lambda: tiny_gemma2(cap=1.0)], ids=["plain head", "capped"]
)
def test_nothing_to_score_still_has_a_graph(build_model):
    model = build_model()
    ids_BS, lengths_B, mask_BT = uneven_rows()
    scorer, _ = checked(model)
    logprobs_BT, entropies_BT = scorer(ids_BS, lengths_B, mask_BT & False)
    assert not logprobs_BT.any() and not entropies_BT.any()
    assert all(not gradient.any() for gradient in gradients_of(model, logprobs_BT).values())


@pytest.mark.parametrize(
    ("model_type", "settings", "is_plain"),
    [
        # Cohere multiplies its logits by 1/16.
        ("cohere", SIZES, False),
        ("gpt2", GPT2, True),
    ],
)
def test_logits_that_are_scaled_are_scored_right(model_type, settings, is_plain):
    assert_agrees_with_float64(lambda: build(model_type, settings), 0.7, chunks=[5])
    scorer, _ = checked(build(model_type, settings))
    assert scorer.has_plain_head == is_plain


def test_a_cap_is_seen_while_the_logits_are_still_small():
    """Gemma 2's own cap of 30 does not show on logits of 0.3, but does once training has made them
    large."""
    model = tiny_gemma2(cap=30.0)
    scorer, _ = checked(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(200.0)
    expected_BT, _ = reference(model, 1.0, uneven_rows()[0])
    torch.testing.assert_close(scorer(*uneven_rows())[0], expected_BT, rtol=0, atol=1e-3)
