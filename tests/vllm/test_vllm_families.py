"""The names under which weights go to the servers are those of the Hub, also where the model's own differ."""

import asyncio

import pytest
import torch
from conftest import load
from safetensors import safe_open
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm_server import VLLMServer

from grpo.distributed import whole_trained_weights
from grpo.vllm.client import Server, session
from grpo.vllm.weights import Probe, WeightsFolder

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
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert name in file.keys()  # noqa: SIM118  no mapping


@pytest.mark.slow
@pytest.mark.parametrize("policy", MODELS, indirect=True)
def test_a_server_reads_all_weights(policy, tmp_path):
    """At its start: vLLM 0.32 on the CPU computes other log-probs after ``reload_weights`` of a mixture."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    folder = WeightsFolder(str(tmp_path)).write(policy, whole_trained_weights(policy.trained), "v")
    policy.tokenizer.save_pretrained(folder)
    started, probe = VLLMServer(folder, tmp_path / "log"), Probe(policy, policy.model, range(3, 40))
    started.command = started.command.replace("--max-model-len 1024", "--max-model-len 128")
    started.start()

    async def ask(server: Server) -> list[float]:
        async with session() as http:
            return await server.prompt_logprobs(http, probe.ids, str(folder))

    try:
        probe.update()
        found = asyncio.run(ask(Server(started.address, 300.0, started.started.explain)))
    finally:
        started.stop()
    assert (torch.tensor(found) - probe.computed_S).abs().max() < 1e-5
