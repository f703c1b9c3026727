"""The section ``algorithm`` and its presets. Formulas and sources: docs/algorithm.md."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from grpo.algorithm.choices import (
    Aggregation,
    Baseline,
    ImportanceLevel,
    KLEstimator,
    MultiObjectiveAggregation,
    Objective,
    SamplerCorrection,
    Scale,
)
from grpo.config.schema import Section

_GRPO = dict(objective="clip", baseline="mean", scale="group", aggregation="response_mean", importance_level="token")
_DPPO = dict(objective="dppo_tv", scale="none", aggregation="constant", epsilon=0.15, epsilon_high=0.15)
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "dr_grpo": _GRPO | dict(scale="none", aggregation="constant", beta=0.0),
    "dapo": _GRPO | dict(aggregation="token_mean", epsilon_high=0.28, beta=0.0, dynamic_sampling=True),
    "gspo": _GRPO | dict(importance_level="sequence", epsilon=3e-4, epsilon_high=4e-4, beta=0.0),
    "cispo": _GRPO | dict(objective="cispo", aggregation="token_mean", epsilon_high=5.0, beta=0.0),
    "maxrl": _GRPO | dict(scale="mean", beta=0.0),
    "gdpo": _GRPO | dict(multi_objective_aggregation="normalize_then_sum", beta=0.0),
    "sapo": _GRPO | dict(objective="sapo", beta=0.0),
    "dppo_tv": _GRPO | _DPPO | dict(beta=0.0),
    "rloo": _GRPO | dict(objective="reinforce", baseline="leave_one_out", scale="none", beta=0.0),
    "reinforce": _GRPO | dict(objective="reinforce", baseline="none", scale="none", beta=0.0),
    "reinforce_baseline": _GRPO | dict(objective="reinforce", beta=0.0),
}
"""``algorithm.name`` -> the keys that it sets; the other keys keep the defaults below."""


class AlgorithmConfig(Section):
    name: Literal[tuple(PRESETS)] = "grpo"  # type: ignore[valid-type]
    """Preset that sets other keys of this section; keys that you set yourself win."""
    objective: Objective = "clip"
    """Loss of each token: PPO's clipped surrogate, CISPO's weighted log-prob, SAPO's soft gate, DPPO's bound on the change of a probability,
    or REINFORCE."""
    baseline: Baseline = "mean"
    """Subtracted from each reward: mean of the group, mean of the other completions of the group, or 0."""
    scale: Scale = "group"
    """Divides the reward less its baseline: standard deviation of the group or of the whole batch, mean of the group (MaxRL), or 1."""
    multi_objective_aggregation: MultiObjectiveAggregation = "sum_then_normalize"
    """With several rewards: sum_then_normalize takes the advantages of their weighted sum; normalize_then_sum (GDPO) takes the advantages of
    each, sums them with the weights, and normalizes the sum over the batch."""
    advantage_eps: float = Field(1e-4, ge=0)
    """Added to the scale that divides, so that almost equal rewards do not give huge advantages."""
    aggregation: Aggregation = "response_mean"
    """Average that the loss is: over tokens, then responses; over all tokens; or the sum / (responses x max_completion_length)."""
    importance_level: ImportanceLevel = "token"
    """One importance ratio per token, or one per response (GSPO)."""
    epsilon: float = Field(0.2, ge=0)
    """Importance ratios below 1 - epsilon are clipped (objective=clip); with dppo_tv, probabilities that fell by more than epsilon."""
    epsilon_high: float | None = Field(None, ge=0)
    """Importance ratios above 1 + epsilon_high are clipped; with dppo_tv, probabilities that rose by more; none: as epsilon."""
    delta: float | None = Field(None, gt=1)
    """Upper bound of the importance ratio where objective=clip does not clip it, for negative advantages; none: no bound."""
    sapo_temperature_pos: float = Field(1.0, gt=0)
    """With objective=sapo, how fast the gradient falls as the importance ratio moves away from 1, for positive advantages; higher: faster."""
    sapo_temperature_neg: float = Field(1.05, gt=0)
    """The same for other advantages."""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """Train only on this share of the tokens of a step, those with the highest entropy (0.2: a fifth); the KL counts all. Below 1 it costs one
    more forward pass."""
    sampler_correction: SamplerCorrection = "none"
    """Multiply the loss of each token, or of each completion (sequence), by its probability as scored before the update / as sampled. Outside of
    the bounds below the weight is the bound (truncate: TIS) or 0 (mask: MIS)."""
    sampler_correction_min: float | None = Field(None, ge=0)
    """Lower bound of that weight; none: no bound."""
    sampler_correction_max: float | None = Field(3.0, gt=0)
    """Upper bound of that weight; none: no bound."""
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """Leave completions with a negative advantage out of the policy loss where the log-prob per token has fallen by more than this since they
    were sampled (DeepSeek-V3.2: off-policy sequence masking, OPSM); none: keep all."""
    beta: float = Field(0.04, ge=0)
    """Weight of the KL to the reference model; 0: no reference model is kept in memory."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL to the reference model: -d, d^2 / 2 or exp(d) - d - 1, where d is the reference's log-prob less the policy's."""
    unbiased_kl: bool = False
    """Multiply the KL of each token by its importance ratio, which makes the gradient of the KL term unbiased (DeepSeek-V3.2)."""
    num_iterations: int = Field(1, ge=1)
    """Passes over the completions of a step."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer updates per pass."""
    skip_zero_advantage: bool = True
    """At beta 0, do not compute the log-probs and updates of completions with advantage 0, which have no gradient. Then entropy, ratio,
    the clip shares and sampling/logprob_difference are means over the other completions (0 if there are none)."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss."""
    dynamic_sampling: bool = False
    """Replace a group whose advantages are all 0 (equal rewards) by a group of another problem (DAPO)."""
    dynamic_sampling_attempts: int = Field(3, ge=1)
    """Number of other problems that are tried for such a group; if all fail, the last group is kept."""
    ref_sync_steps: int = Field(0, ge=0)
    """Move the reference model towards the policy every N steps; 0: never."""
    ref_sync_alpha: float = Field(1.0, gt=0, le=1)
    """Weight of the policy in the moved reference model: ref = alpha * policy + (1 - alpha) * ref."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("name", "grpo")
        return (PRESETS.get(name, {}) if isinstance(name, str) else {}) | values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.objective == "reinforce" and self.updates_per_step > 1:
            raise ValueError(
                f"algorithm.objective=reinforce takes one update per rollout, got num_iterations={self.num_iterations} x "
                f"num_minibatches={self.num_minibatches}: later updates would be off-policy and it has no importance ratio; "
                "use objective=clip, or 1 and 1"
            )
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(f"algorithm.delta={self.delta} must be above 1 + epsilon_high = {1 + self.clip_high:g}")
        is_group_normalized = self.baseline == "mean" and self.scale == "group"
        if self.multi_objective_aggregation == "normalize_then_sum" and not is_group_normalized:
            raise ValueError(
                "algorithm.multi_objective_aggregation=normalize_then_sum (GDPO) subtracts the mean and divides by the standard deviation, "
                f"got baseline={self.baseline}, scale={self.scale}: use baseline=mean and scale=group"
            )
        if self.objective == "dppo_tv" and (self.importance_level != "token" or self.sampler_correction != "none"):
            raise ValueError(
                "algorithm.objective=dppo_tv compares each token with the sampler's own probability, got "
                f"importance_level={self.importance_level}, sampler_correction={self.sampler_correction}: use token and none"
            )
        lowest, highest = self.sampler_correction_min, self.sampler_correction_max
        if lowest is not None and highest is not None and lowest >= highest:
            raise ValueError(
                f"algorithm.sampler_correction_min={lowest} must be below sampler_correction_max={highest}"
            )
        if self.sampler_correction.endswith("truncate") and lowest is None and highest is None:
            raise ValueError(
                f"algorithm.sampler_correction={self.sampler_correction} needs sampler_correction_min or sampler_correction_max"
            )
        return self

    @property
    def without_effect(self) -> list[tuple[str, str]]:
        """``(key, other key)`` of each key that differs from its default, but has no effect with the value of the other key."""
        unclipped = self.objective in ("sapo", "reinforce")
        ignored = [
            ("epsilon", "objective", unclipped or (self.objective == "cispo" and self.epsilon_high is not None)),
            ("epsilon_high", "objective", unclipped),
            ("delta", "objective", self.objective != "clip"),
            ("importance_level", "objective", self.objective == "reinforce"),
            ("sapo_temperature_pos", "objective", self.objective != "sapo"),
            ("sapo_temperature_neg", "objective", self.objective != "sapo"),
            ("advantage_eps", "scale", self.scale == "none"),
            ("sampler_correction_min", "sampler_correction", self.sampler_correction == "none"),
            ("sampler_correction_max", "sampler_correction", self.sampler_correction == "none"),
            ("unbiased_kl", "beta", self.beta == 0),
            ("ref_sync_steps", "beta", self.beta == 0),
        ]
        keys = type(self).model_fields
        return [
            (key, other) for key, other, is_ignored in ignored if is_ignored and getattr(self, key) != keys[key].default
        ]

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates from the completions of one step."""
        return self.num_iterations * self.num_minibatches

    @property
    def skips_rows(self) -> bool:
        """True if completions with advantage 0 are not computed: with a KL term they have a gradient too."""
        return self.skip_zero_advantage and self.beta == 0

    @property
    def clip_high(self) -> float:
        """``epsilon_high``, with its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def advantage_options(self) -> dict[str, Any]:
        """The keyword arguments of :meth:`grpo.algorithm.advantages.Scores.advantages`."""
        return {"baseline": self.baseline, "scale": self.scale, "eps": self.advantage_eps}

    @property
    def loss_options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`grpo.algorithm.loss.policy_loss` that this section decides."""
        keys = {
            "objective", "importance_level", "epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg",
            "sampler_correction", "sampler_correction_min", "sampler_correction_max", "off_policy_mask_threshold",
            "beta", "kl_estimator", "unbiased_kl", "aggregation",
        }  # fmt: skip
        return self.model_dump(include=keys)
