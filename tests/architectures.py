"""Small random models of several architectures: those that can be packed, and those that cannot."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.algorithm.logprobs import CompletionScorer
from grpo.model import Policy, turn_dropout_off
from grpo.rollout import check_model

V = 64
SIZES = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
GPT2 = dict(
    vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
PHI3 = SIZES | dict(rope_parameters=LONGROPE, original_max_position_embeddings=64)
CAN = {  # name -> model type of transformers, its settings
    "qwen2": ("qwen2", SIZES),
    "qwen3": ("qwen3", SIZES | dict(head_dim=16)),
    "llama without shared key heads": ("llama", SIZES | dict(num_key_value_heads=4)),
    "llama with one key head": ("llama", SIZES | dict(num_key_value_heads=1)),
    "gpt2, learned positions": ("gpt2", GPT2),
    "longrope within its original context": ("phi3", PHI3),
}
CANNOT = {  # name -> model type, settings, part of the reason
    "sliding window": ("mistral", SIZES | dict(sliding_window=4), "window"),
    # Both windows are longer than the probe and shorter than the longest row of the test.
    "window in the mask alone": (
        "phimoe",
        SIZES | dict(sliding_window=20, num_local_experts=2),
        "sliding_window=20",
    ),
    "nearest values alone": ("doge", SIZES | dict(keep_window_size=20), "keep_window_size=20"),
    "scaled logits": ("granite", SIZES | dict(logits_scaling=8.0), "head"),
    "convolutions": ("lfm2", SIZES | dict(layer_types=["conv", "full_attention"]), ""),
}
READS_IMAGES = (  # model type, settings: its vision tower lies beside a text model
    "gemma3",
    dict(
        text_config=SIZES | dict(head_dim=8),
        vision_config=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28,
            patch_size=14,
        ),
        mm_tokens_per_image=4, image_token_index=60, boi_token_index=61, eoi_token_index=62,
    ),
)  # fmt: skip


def build(model_type, settings, attention="sdpa"):
    """In evaluation mode and without dropout."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    turn_dropout_off(model)
    return model


def checked(model, temperature=1.0):
    """A scorer that has been checked, and the reason why it is not packed, or None."""
    scorer = CompletionScorer(model, temperature)
    policy = Policy(model, None, (2,), 0, torch.device("cpu"), "fp32")
    return scorer, check_model(policy, scorer)
