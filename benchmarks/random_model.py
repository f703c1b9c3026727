"""Random weights whose distributions are as sharp as a trained model's.

A model with random weights is nearly uniform over its vocabulary: a mean log-prob of -11.9 at
151,936 tokens, where trained models are sampled at -0.3 to -1. Rounding then decides nearly every
token, and a cumulative distribution has no large steps."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from grpo.data.tiny import CHAT_TEMPLATE, EOS, PAD, TURN, build_tokenizer

MEAN_LOGPROB = -0.6
"""In nats, of sampled tokens."""
SIZES = {
    "small": dict(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # With tied embeddings, rows of a model of this width repeat one token.
        tie_word_embeddings=False,
    ),
    "qwen2.5-0.5b": dict(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}


@torch.no_grad()
def sharpen(model) -> None:
    """Scale the logits of a Llama-shaped model, by its last norm, so that sampled tokens have
    ``MEAN_LOGPROB``.

    Measured over the tokens of a few random prompts.
    """
    backbone = model.base_model
    head = model.get_output_embeddings()
    rng = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(head.weight.shape[0], (4, 32), generator=rng)
    output = backbone(input_ids=ids_BS.to(head.weight.device), use_cache=False)
    hidden_NH = output.last_hidden_state[:, 16:].flatten(0, 1)
    logits_NV = head(hidden_NH).float()
    least = 1e-3
    most = 1e3
    for _ in range(30):  # the entropy falls as the factor grows
        factor = (least * most) ** 0.5
        drawn = torch.distributions.Categorical(logits=logits_NV * factor)
        entropy = float(drawn.entropy().mean())
        if entropy > -MEAN_LOGPROB:
            least = factor
        else:
            most = factor
    backbone.norm.weight.mul_(factor)


@torch.no_grad()
def save_random_model(folder, *, query_scale: float, vocab_size: int, **sizes) -> None:
    """Save a Qwen2 of these sizes with its weights for queries scaled, and a tokenizer that the
    trainer can use.

    The text of nearly every token is a number: `` 1234``.
    """
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=vocab_size, max_position_embeddings=32768, **sizes)
    model = Qwen2ForCausalLM(config).float()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.mul_(query_scale)
    sharpen(model)
    model.save_pretrained(folder)
    ids = build_tokenizer().get_vocab()
    ids |= {f"\u0120{i}": i for i in range(len(ids), vocab_size)}
    tokenizer = Qwen2Tokenizer(
        vocab=ids,
        merges=[],
        padding_side="left",
        pad_token=PAD,
        eos_token=EOS,
        unk_token=None,
        additional_special_tokens=[TURN],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
