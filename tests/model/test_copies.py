"""Copies of a model without weights, for other ranks."""

import pickle

import pytest
import torch
from architectures import SIZES, build

from grpo.model import Policy
from grpo.model.lora import add_adapter

MIXTURE = SIZES | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=8)


def parameters_of(model):
    """Parameters under all of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize(
    ("kind", "settings", "lora"),
    [
        ("qwen2", SIZES | dict(tie_word_embeddings=True), True),
        ("qwen3_moe", MIXTURE, False),
    ],
)
def test_a_copy_without_weights_is_the_model_once_it_has_them(kind, settings, lora):
    model = build(kind, settings).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # the name that transformers 5.17 has, too
    policy = Policy(model, None, (2,), 0, torch.device("cpu"), "fp32")
    if lora:
        add_adapter(policy, dict(r=2, target_modules="all-linear", init_lora_weights=False), base="")
    empty = policy.without_weights()
    other = pickle.loads(pickle.dumps(empty)).model
    facts = []
    for parameters in (parameters_of(model), parameters_of(other)):
        ties = {name: [n for n in parameters if parameters[n] is p] for name, p in parameters.items()}
        facts.append([(n, p.shape, p.dtype, p.requires_grad, ties[n]) for n, p in parameters.items()])
    assert facts[0] == facts[1]
    assert all(p.is_meta for p in other.parameters()) and not any(p.is_meta for p in model.parameters())

    other.load_state_dict(model.state_dict(), assign=True)
    other.tie_weights()
    results = []
    for each in (model, other):
        logits = each(torch.arange(3, 23)[None], use_cache=False).logits
        logits.log_softmax(-1)[..., 0].sum().backward()
        results.append([logits, *(p.grad for p in parameters_of(each).values() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 4
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
