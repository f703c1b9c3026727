"""The policy, its loading and saving, its LoRA adapter, and the frozen reference model."""

# ruff: noqa: F401, names for other packages

from grpo.model.loading import (
    REFERENCE_KEY,
    check_base,
    check_context,
    check_reference,
    end_tokens,
    file_digest,
    load_policy,
    load_tokenizer,
    model_digests,
    resolve_model,
    save_weights,
    write_merged,
)
from grpo.model.lora import adapted_base, base_of, effective_weight, is_adapter
from grpo.model.policy import (
    BF16Linear,
    Policy,
    decoder_layers,
    freeze_unused_by_text,
    in_training_mode,
    num_parameters,
    store_frozen_in_bf16,
    sync_reference,
    turn_dropout_off,
)
