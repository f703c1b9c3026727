"""The estimate of memory against what PyTorch keeps."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo.logprobs import CompletionScorer
from grpo.run.memory.estimate import Memory, estimate, line

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def kept_for_backward(model, precision: str, B: int, S: int) -> int:
    """Bytes of all tensors that a scoring pass saves, each storage once, without the weights themselves."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that no address is used twice
        return tensor

    ids_BS, mask_BT = torch.randint(0, 100, (B, S)), torch.ones(B, S // 2, dtype=torch.bool)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), autocast:
        CompletionScorer(model)(ids_BS, torch.full((B,), S // 2), mask_BT)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_about_what_autograd_keeps(precision, checkpointing):
    config = Qwen2Config(vocab_size=100, max_position_embeddings=512, **SIZES)
    model = Qwen2ForCausalLM(config).train()
    num_parameters = sum(p.numel() for p in model.parameters())
    options = dict(precision=precision, reference_bytes=7.0, gradient_checkpointing=checkpointing, tokens_in_flight=10)
    memory = estimate(config, num_parameters, tokens_per_microbatch=4 * 100, on_cpu=False, **options)
    assert memory.states == 16 * num_parameters and memory.reference == 7
    # keys and values: 6 layers x 2 heads of 32
    bf16 = precision == "bf16"
    assert memory.cache == 2 * 6 * 64 * (2 if bf16 else 4) * 10 + 2 * num_parameters * bf16
    there = estimate(config, num_parameters, tokens_per_microbatch=4 * 100, on_cpu=True, **options)
    assert there.cache == 2 * 6 * 64 * 4 * 10 + (2 if bf16 else 4) * num_parameters  # keys in fp32, copies re-ordered
    if checkpointing:
        whole = estimate(
            config,
            num_parameters,
            tokens_per_microbatch=400,
            on_cpu=False,
            **options | {"gradient_checkpointing": False},
        )
        assert memory.activations < 0.5 * whole.activations
    else:
        assert memory.activations == pytest.approx(kept_for_backward(model, precision, 4, 100), rel=0.2)


def test_the_line_of_the_summary():
    memory = Memory(states=2 * 2**30, reference=2**29, cache=2**20, activations=2**30)
    assert memory.peak == 3.5 * 2**30
    assert line(memory) == (
        "memory    about 3.5 GiB a rank: weights, gradients and optimizer 2.0 GiB, reference 0.5 GiB, then KV cache and weight copies 1 MiB "
        "while sampling, activations 1.0 GiB in the update"
    )
