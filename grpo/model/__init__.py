"""The policy, how it is loaded, and the frozen reference."""

from grpo.model.fp32_head import use_fp32_head
from grpo.model.loading import (
    REFERENCE,
    check_context,
    check_finite,
    check_reference,
    end_tokens,
    load_policy,
    load_tokenizer,
    make_policy,
    resolve_model,
)
from grpo.model.lora import (
    Adapter,
    HalfLinear,
    adapted_base,
    add_adapter,
    base_of,
    effective_weight,
    is_adapter,
    load_peft,
    read_adapter,
    read_adapter_config,
    use_half_linears,
)
from grpo.model.merging import write_merged
from grpo.model.meta import decoder_layers, model_without_weights
from grpo.model.policy import Policy, cast_frozen_to_bf16, make_reference, num_parameters, sync_reference
from grpo.model.randomness import turn_dropout_off, turn_randomness_off
from grpo.model.saving import save_weights

__all__ = [
    "REFERENCE",
    "check_context",
    "check_finite",
    "check_reference",
    "end_tokens",
    "load_policy",
    "load_tokenizer",
    "make_policy",
    "resolve_model",
    "turn_dropout_off",
    "turn_randomness_off",
]
__all__ += ["Policy", "cast_frozen_to_bf16", "make_reference", "num_parameters", "sync_reference", "use_fp32_head"]
__all__ += [
    "Adapter",
    "HalfLinear",
    "adapted_base",
    "add_adapter",
    "base_of",
    "effective_weight",
    "is_adapter",
    "load_peft",
    "read_adapter",
    "read_adapter_config",
    "use_half_linears",
]
__all__ += ["decoder_layers", "model_without_weights", "save_weights", "write_merged"]
