"""Copies of a model without weights, for other ranks."""

import pickle

import pytest
import torch
from architectures import GPT2, SIZES, build

from grpo.model import Policy
from grpo.model.lora import adapter_parameters, add_adapter

EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
KINDS = {
    "llama": ("llama", SIZES | dict(tie_word_embeddings=False)),
    "qwen2, tied": ("qwen2", SIZES | dict(tie_word_embeddings=True)),
    "gpt2, tied": ("gpt2", GPT2),
    "gemma3, tied": ("gemma3_text", SIZES | dict(head_dim=8)),
    "qwen3_moe": ("qwen3_moe", SIZES | EXPERTS | dict(head_dim=8)),
}


def named(model):
    """Parameters under all of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_without_weights_is_the_model_once_it_has_them(kind, lora):
    model = build(*KINDS[kind])
    model.gradient_checkpointing_enable({"use_reentrant": False})  # the name that transformers 5.17 has, too
    policy = Policy(model.train(), None, (2,), 0, torch.device("cpu"), "fp32")
    if lora:
        add_adapter(policy, dict(r=2, target_modules="all-linear", init_lora_weights=False), base="")
    empty = policy.without_weights()
    assert len(pickle.dumps(empty)) < 0.9 * len(pickle.dumps(policy))  # there is no weight in it
    other = pickle.loads(pickle.dumps(empty))
    theirs, parameters = named(other.model), named(model)
    assert not any(p.is_meta for p in parameters.values()) and all(p.is_meta for p in theirs.values())
    assert (kind.endswith("tied")) == any(
        parameters[a] is parameters[b] for a in parameters for b in parameters if a < b
    )
    facts = [
        [(n, p.shape, p.dtype, p.requires_grad, [m for m in found if found[m] is p]) for n, p in found.items()]
        for found in (theirs, parameters)
    ]
    assert facts[0] == facts[1]
    buffers = dict(other.model.named_buffers())
    assert buffers.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    if lora:
        assert other.adapter.get_base_model() is other.model
        assert adapter_parameters(other.model).keys() == adapter_parameters(model).keys()

    other.model.load_state_dict(model.state_dict(), assign=True)
    other.model.tie_weights()
    results, ids = [], torch.arange(3, 23)[None]
    for found in (model, other.model):
        (*_, layer), calls = (m for m in found.modules() if hasattr(m, "gradient_checkpointing")), []
        next(layer.children()).register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        logits = found(ids, use_cache=False).logits
        logits.log_softmax(-1)[..., 0].sum().backward()
        assert len(calls) == 2, "the backward pass computes a layer again"
        results.append([logits, *(p.grad for p in named(found).values() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 4
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))
