"""The written-out decode step computes what the model computes, and is used only for models for
which that holds."""

import pytest
import torch
from architectures import CAN, SIZES, build, checked

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.attention import (
    ForkedCache,
    forked_hidden,
    pack_prompts,
    packed_hidden,
)
from grpo.model import Policy
from grpo.rollout import BuiltinEngine, SamplingParams, check_model
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.prefill import prefill
from grpo.rollout.weights import copied_weights

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMA_SHAPED = {
    name: row for name, row in CAN.items() if "gpt2" not in name and "longrope" not in name
} | {
    "biases everywhere": ("llama", SIZES | dict(attention_bias=True, mlp_bias=True)),
    "mistral without a window": ("mistral", SIZES | dict(sliding_window=None)),
    "scaled rotary embedding": ("qwen2", SIZES | dict(rope_parameters=YARN)),
}
OTHERS = {
    "gpt2": CAN["gpt2, learned positions"],
    "residuals times a factor": ("granite", SIZES | dict(residual_multiplier=0.9)),
    "layers without positions": ("smollm3", SIZES | dict(no_rope_layers=[1, 0])),
}


def ready(model_type, settings):
    """A model whose weights are large enough that every part of a layer shows in its output."""
    model = build(model_type, settings)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p * 8 if p.dim() == 2 else p + 0.1 * torch.randn(p.shape))
    assert checked(model)[1] is None
    return model


def matches(model) -> bool:
    policy = Policy(model, None, (2,), 0, torch.device("cpu"), "fp32")
    model.set_attn_implementation("sdpa")
    assert check_model(policy, CompletionScorer(model)) is None
    return policy.is_llama


@torch.no_grad()
def hidden_states(model, decode, steps: int = 6) -> torch.Tensor:
    """``[steps, rows, hidden]``, a row leaving on the way."""
    prompts = [(5, 6, 7, 8), (9, 10, 11, 12, 13, 14, 15)]
    cache = ForkedCache(prompts, capacity=steps)
    packed_hidden(model.base_model, pack_prompts(prompts, "cpu"), cache)
    cache.fork(torch.tensor([0, 0, 1]))
    found = []
    for step in range(steps):
        if step == 3:
            cache.keep_rows(torch.tensor([0, 2]))
        token_R = torch.tensor([20 + step, 30 + 2 * step, 40 + step])[: len(cache.prompt_R)]
        found.append(decode(token_R, cache))
    return torch.cat(found)


def by_modules(model):
    """The step of the model's own modules."""

    def decode(token_R, cache):
        positions_R = cache.begin_token()
        return forked_hidden(model.model, token_R[:, None], positions_R[:, None], cache)[:, 0]

    return decode


@pytest.mark.parametrize("name", LLAMA_SHAPED)
def test_decoder_gives_what_the_models_modules_give(name):
    model = ready(*LLAMA_SHAPED[name])
    assert matches(model)
    expected = hidden_states(model, by_modules(model))
    torch.testing.assert_close(
        hidden_states(model, LlamaDecoder(model.model)), expected, rtol=0, atol=1e-5
    )
    with copied_weights(model, "fp32"):
        found = hidden_states(model, LlamaDecoder(model.model))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for precision, share in (("fp32", 1e-6), ("bf16", 0.03)):
        with (
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"),
            copied_weights(model, precision),
        ):
            theirs = hidden_states(model, by_modules(model))
            ours = hidden_states(model, LlamaDecoder(model.model))
        assert float((ours - theirs).norm()) < share * float(theirs.norm())


@torch.no_grad()
def test_prompts_that_begin_alike_decode_as_alone():
    model = ready(*CAN["llama with one key head"])
    policy = Policy(model, None, (2,), 0, torch.device("cpu"), "fp32")
    shared = tuple(range(5, 25))
    prompts = [(*shared, 30), (*shared, 31, 32, 33)]

    def logits(prompts):
        decoder, first_RV = prefill(policy, LlamaDecoder(model.model), prompts, capacity=4)
        second_RV = decoder.step(torch.full((len(prompts),), 40))
        return torch.stack([first_RV, second_RV])

    alone = torch.cat([logits(prompts[:1]), logits(prompts[1:])], dim=1)
    torch.testing.assert_close(logits(prompts), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_keep_their_modules(name):
    assert not matches(ready(*OTHERS[name]))


def test_a_factor_of_a_thousandth_is_noticed():
    model = ready(*CAN["qwen2"])
    assert matches(model)
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: 1.001 * output)
    assert not matches(model)


def test_fast_decode_changes_rounding_alone(policy):
    problems = [
        Problem(i, "", tuple(policy.tokenizer.encode(text)))
        for i, text in enumerate(("12+3=", "Make 24"))
    ]
    slow, fast = (
        BuiltinEngine(policy, fast_decode=fast).generate(
            problems, SamplingParams(4, 24), seed_key=(0, "rollout", 0)
        )
        for fast in (False, True)
    )
    for one, other in zip(slow, fast, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.ids == b.ids
            assert a.sampling_logprobs == pytest.approx(b.sampling_logprobs, abs=1e-4)
