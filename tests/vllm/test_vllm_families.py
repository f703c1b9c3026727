"""The names under which weights go to the servers are those of the Hub, also where the model's own differ."""

import pytest
import torch
from conftest import load
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from grpo.distributed import whole_trained_weights
from grpo.vllm.weights import WeightsFolder

SIZES = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)
EXPERTS = dict(intermediate_size=64, num_key_value_heads=2, num_experts_per_tok=2)
MODELS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4)),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=32),
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, intermediate_size=64)),
}
NAMES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "gpt_neox": "gpt_neox.layers.1.attention.query_key_value.weight",
}
"""As in mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B and EleutherAI/pythia-70m."""


@pytest.fixture
def policy(request, random_model, tmp_path):
    """Of a family, with random weights and the tokenizer of the tests."""
    kind, config = MODELS[request.param]
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    config.vocab_size, config.eos_token_id = 128 * -(-len(tokenizer) // 128), tokenizer.eos_token_id
    torch.manual_seed(0)
    kind(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return load(tmp_path / "model")


@pytest.mark.parametrize(("policy", "name"), NAMES.items(), indirect=["policy"], ids=NAMES)
def test_names_are_those_of_the_hub(policy, name, tmp_path):
    folder = WeightsFolder(str(tmp_path)).write(policy, whole_trained_weights(policy.trained), "v")
    policy.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = load_file(folder / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert name in ours and ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
