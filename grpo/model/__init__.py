"""The policy, its tokenizer, and the frozen reference."""

from grpo.model.policy import (
    Policy,
    cast_reference_to_bf16,
    check_context,
    end_tokens,
    load_policy,
    load_tokenizer,
    make_reference,
    num_parameters,
    resolve_model,
    sync_reference,
    turn_dropout_off,
    use_fp32_head,
)

__all__ = [
    "Policy",
    "cast_reference_to_bf16",
    "check_context",
    "end_tokens",
    "load_policy",
    "load_tokenizer",
    "make_reference",
    "num_parameters",
    "resolve_model",
    "sync_reference",
    "turn_dropout_off",
    "use_fp32_head",
]
