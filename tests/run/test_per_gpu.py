"""The table of docs/multi_gpu.md counts what real models hold. (Shards of two ranks: tests/distributed/test_sharded.py.)"""

import pytest
import torch
from conftest import ROOT, load, save_random_model
from transformers import AutoConfig

from grpo.model import cast_frozen_to_bf16, make_reference, num_parameters
from grpo.model.lora import adapter_parameters, add_adapter, store_frozen_in_bf16
from grpo.rollout.weights import FusedLinear, copies_of
from grpo.run.memory.per_gpu import STATES, Shape, ddp_bytes, lora_bytes, table
from grpo.run.optimizer import make_optimizer


def num_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_ddp_are_those_of_a_real_model(tmp_path, tied, monkeypatch):
    monkeypatch.setattr("grpo.rollout.weights._can_reorder", lambda weight: False)  # as on a GPU
    save_random_model(tmp_path, tie_word_embeddings=tied)
    shape, policy = Shape.of(AutoConfig.from_pretrained(tmp_path)), load(tmp_path, packed=True, precision="bf16")
    model = policy.model
    assert shape.total == num_parameters(model)
    reference = make_reference(model)
    assert cast_frozen_to_bf16(reference, policy)
    assert num_bytes(reference.parameters()) == shape.reference
    copies = copies_of(list(model.modules()), "bf16")
    fused = dict.fromkeys(copies.values())
    assert all(isinstance(copy, FusedLinear) for copy in fused)
    assert num_bytes(t for copy in fused for t in (copy.weight, copy.bias) if t is not None) == shape.copies

    optimizer = make_optimizer(model, learning_rate=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    model(input_ids=torch.arange(4)[None]).logits.sum().backward()
    optimizer.step()
    averages = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *averages]
    assert num_bytes(held) == STATES * shape.total
    assert ddp_bytes(shape) == num_bytes(held) + shape.reference + shape.copies


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_lora_are_those_of_a_real_model(tmp_path, tied):
    save_random_model(tmp_path, tie_word_embeddings=tied)
    shape, policy = Shape.of(AutoConfig.from_pretrained(tmp_path)), load(tmp_path, packed=True, precision="bf16")
    add_adapter(policy, dict(r=4, lora_alpha=8, target_modules="all-linear"), base=str(tmp_path))
    store_frozen_in_bf16(policy)
    optimizer = make_optimizer(policy.model, learning_rate=1e-3, betas=(0.9, 0.999), weight_decay=0.0)
    policy.model(input_ids=torch.arange(4)[None]).logits.sum().backward()
    optimizer.step()
    averages = (state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
    gradients = [parameter.grad for parameter in adapter_parameters(policy.model).values()]
    held = [*policy.model.parameters(), *gradients, *averages]
    assert lora_bytes(shape, rank=4) == num_bytes(held) + shape.copies


def test_the_table_stands_in_the_document():
    assert table() in (ROOT / "docs" / "multi_gpu.md").read_text(encoding="utf-8")
