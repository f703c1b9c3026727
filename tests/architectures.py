"""Small random models of several architectures: those that can be packed, and those that cannot."""

import torch
import transformers

from grpo.model import turn_dropout_off

V = 64
SIZES = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GPT2 = dict(vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
PHI3 = SIZES | dict(rope_parameters=LONGROPE, original_max_position_embeddings=64)
CAN = {
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, SIZES),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, SIZES | dict(head_dim=16)),
    "llama without shared key heads": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        SIZES | dict(num_key_value_heads=4),
    ),
    "llama with one key head": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        SIZES | dict(num_key_value_heads=1),
    ),
    "gpt2, learned positions": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2),
    "longrope within its original context": (transformers.Phi3ForCausalLM, transformers.Phi3Config, PHI3),
}
CANNOT = {
    "sliding window": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig,
        SIZES | dict(sliding_window=4),
        "window",
    ),
    # Both windows are longer than the probe and shorter than the longest row of the test.
    "window in the mask alone": (
        transformers.PhimoeForCausalLM,
        transformers.PhimoeConfig,
        SIZES | dict(sliding_window=20, num_local_experts=2),
        "sliding_window=20",
    ),
    "nearest values alone": (
        transformers.DogeForCausalLM,
        transformers.DogeConfig,
        SIZES | dict(keep_window_size=20),
        "keep_window_size=20",
    ),
    "scaled logits": (
        transformers.GraniteForCausalLM,
        transformers.GraniteConfig,
        SIZES | dict(logits_scaling=8.0),
        "head",
    ),
    "convolutions": (
        transformers.Lfm2ForCausalLM,
        transformers.Lfm2Config,
        SIZES | dict(layer_types=["conv", "full_attention"]),
        "",
    ),
}


def build(architecture, configuration, options):
    torch.manual_seed(0)
    model = architecture._from_config(configuration(**options), attn_implementation="sdpa").eval()
    turn_dropout_off(model)
    return model
