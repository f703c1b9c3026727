"""The policy, how it is loaded, and the frozen reference."""

from grpo.model.fp32_head import FP32Head, use_fp32_head
from grpo.model.loading import (
    check_context,
    end_tokens,
    load_policy,
    load_tokenizer,
    num_parameters,
    resolve_model,
    turn_dropout_off,
)
from grpo.model.policy import Policy
from grpo.model.reference import cast_reference_to_bf16, make_reference, sync_reference

__all__ = [
    "FP32Head",
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
