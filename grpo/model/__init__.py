"""The policy, how it is loaded and saved, its LoRA adapter, and the frozen reference."""

from grpo.model.loading import (
    REFERENCE,
    check_base,
    check_context,
    check_reference,
    digest,
    end_tokens,
    load_policy,
    load_tokenizer,
    model_digests,
    resolve_model,
    save_weights,
    write_merged,
)
from grpo.model.lora import adapted_base, base_of, effective_weight, is_adapter
from grpo.model.policy import (
    HalfLinear,
    Policy,
    cast_frozen_to_bf16,
    decoder_layers,
    freeze_unreached,
    make_reference,
    num_parameters,
    sync_reference,
    turn_dropout_off,
    turn_randomness_off,
)

__all__ = (
    "REFERENCE", "HalfLinear", "Policy", "adapted_base", "base_of", "cast_frozen_to_bf16", "check_base",
    "check_context", "check_reference", "decoder_layers", "digest", "effective_weight", "end_tokens",
    "freeze_unreached", "is_adapter", "load_policy", "load_tokenizer", "make_reference", "model_digests",
    "num_parameters", "resolve_model", "save_weights", "sync_reference", "turn_dropout_off", "turn_randomness_off",
    "write_merged",
)  # fmt: skip
