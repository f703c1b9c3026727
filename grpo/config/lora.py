"""The section ``lora``: training of low-rank adapters in place of all weights. Names follow peft's ``LoraConfig``."""

from typing import Any, Literal

from pydantic import Field, field_validator

from grpo.config.schema import Section

INITS = (True, "gaussian")
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "eva", "lora_ga", "orthogonal", "mica")
"""Initialisations of peft that change the base weights, need data, or do not start at a change of exactly zero."""


class LoraConfig(Section):
    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: int | None = Field(None, ge=1)
    """The adapters' change of a weight is multiplied by alpha / rank; none: 2 * rank, as TRL's defaults have it (r 16, alpha 32)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs while training; above 0 it needs model.disable_dropout=false."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get adapters: all-linear (every linear layer but the head), a list of the ends of their names (q_proj, v_proj), or a
    regular expression that matches whole names. Linear layers alone: no embeddings, no head."""
    rslora: bool = False
    """Rank-stabilised LoRA: multiply by alpha / sqrt(rank) instead."""
    init: Literal[True, "gaussian"] = True
    """First values of the first of the two matrices: true (uniform, as an nn.Linear), or gaussian; the second begins at 0."""
    base_precision: Literal["bf16", "fp32"] = "bf16"
    """Precision in which the frozen weights are stored. bf16 is half the memory, and gives the same bits under autocast; where it would
    not, and with runtime.precision=fp32, they stay in fp32."""

    @field_validator("init", mode="before")
    @classmethod
    def _starts_at_zero(cls, value: Any) -> Any:
        if isinstance(value, str) and value.lower().startswith(CHANGES_BASE):
            raise ValueError(
                "it changes the base weights or does not start at a change of 0, and the reference is the base without adapters: use true "
                "or gaussian"
            )
        return value

    @field_validator("target_modules", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        names = value if isinstance(value, list) else [value]
        if not all(isinstance(name, str) for name in names):
            raise ValueError("names of layers are texts: use all-linear, or a list such as [q_proj, v_proj]")
        return value

    @field_validator("target_modules")
    @classmethod
    def _not_empty(cls, value: str | list[str]) -> str | list[str]:
        if not value or not all(value):
            raise ValueError("name at least one layer, or use all-linear")
        return value
