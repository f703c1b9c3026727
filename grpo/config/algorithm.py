"""The section ``algorithm`` and its presets. Formulas and sources: docs/algorithm.md."""

from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

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
from grpo.config.schema import Proportion, Section

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": dict(scale="none", aggregation="constant", beta=0.0),
    "dapo": dict(aggregation="token_mean", epsilon_high=0.28, beta=0.0, dynamic_sampling=True),
    "gspo": dict(importance_level="sequence", epsilon=3e-4, epsilon_high=4e-4, beta=0.0),
    "cispo": dict(objective="cispo", aggregation="token_mean", epsilon_high=5.0, beta=0.0),
    "maxrl": dict(scale="mean", beta=0.0),
    "gdpo": dict(beta=0.0),
    "sapo": dict(objective="sapo", beta=0.0),
    "dppo_tv": dict(
        objective="dppo_tv",
        scale="none",
        aggregation="constant",
        epsilon=0.15,
        epsilon_high=0.15,
        beta=0.0,
    ),
    "rloo": dict(objective="reinforce", baseline="leave_one_out", scale="none", beta=0.0),
    "reinforce": dict(objective="reinforce", baseline="none", scale="none", beta=0.0),
    "reinforce_baseline": dict(objective="reinforce", beta=0.0),
}
"""``algorithm.name`` -> the keys that it sets; the other keys keep the defaults below, which are
GRPO's."""


def is_user_function(name: str) -> bool:
    """True for the name of a user's function, ``path/to/file.py:function`` or
    ``package.module:function``."""
    return ":" in name


class AlgorithmConfig(Section):
    name: Literal[tuple(PRESETS)] = "grpo"  # type: ignore[valid-type]
    """Preset that sets other keys of this section; keys that you set yourself win. gdpo: with
    several rewards, the advantages of each are summed with the weights, and the sum is normalized
    over the batch."""
    objective: str = Field("clip", pattern=f"^({'|'.join(get_args(Objective))}|.*:.*)$")
    """Loss of each token: clip (PPO's surrogate), cispo (weighted log-prob), sapo (soft gate),
    dppo_tv (bound on the change of a probability), reinforce, or a function of yours:
    path/to/file.py:function (docs/algorithm.md)."""
    advantages: str | None = None
    """A function of yours from rewards to advantages: path/to/file.py:function (docs/algorithm.md);
    none: as baseline and scale say."""
    baseline: Baseline = "mean"
    """Subtracted from each reward: mean of the group, mean of the other completions of the group,
    or 0."""
    scale: Scale = "group"
    """Divides the reward less its baseline: standard deviation of group or batch, mean of the group
    (MaxRL), or 1."""
    advantage_eps: NonNegativeFloat = 1e-4
    """Added to the scale that divides, so that almost equal rewards do not give huge advantages."""
    aggregation: Aggregation = "response_mean"
    """Average over tokens, then responses; over all tokens; or the sum / (responses x
    max_completion_length)."""
    importance_level: ImportanceLevel = "token"
    """One importance ratio per token, or one per response (GSPO)."""
    epsilon: NonNegativeFloat = 0.2
    """Importance ratios below 1 - epsilon are clipped (objective=clip); dppo_tv: probabilities that
    fell by more."""
    epsilon_high: NonNegativeFloat | None = None
    """The same above 1 + epsilon_high, or for probabilities that rose by more; none: as epsilon."""
    delta: float | None = Field(None, gt=1)
    """Upper bound of the importance ratio for negative advantages, which objective=clip does not
    clip; none: none."""
    top_entropy_quantile: Proportion = 1.0
    """Train only on this share of the tokens of a step, those with the highest entropy; the KL
    counts all. Below 1 it costs one more forward pass."""
    sampler_correction: SamplerCorrection = "none"
    """Weight the loss by the probability as scored before the update / as sampled, per token or
    completion (sequence). Outside of the two bounds the weight is the bound (truncate: TIS) or 0
    (mask: MIS). geometric_mask: 1 within the bounds, such as 0.99 and 1.01, of the geometric mean
    over the completion's tokens, else 0."""
    sampler_correction_min: NonNegativeFloat | None = None
    """Lower bound of that weight; none: no bound."""
    sampler_correction_max: PositiveFloat | None = 3.0
    """Upper bound of that weight; none: no bound."""
    off_policy_mask_threshold: NonNegativeFloat | None = None
    """Leave completions with a negative advantage out of the policy loss if their log-prob per
    token has fallen by more than this since they were sampled (off-policy sequence masking,
    DeepSeek-V3.2); none: leave none out."""
    beta: NonNegativeFloat = 0.04
    """Weight of the KL to the reference model; 0: no reference model is kept in memory."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL: -d, d^2 / 2 or exp(d) - d - 1, where d is the reference's log-prob less
    the policy's."""
    unbiased_kl: bool = False
    """Multiply the KL of each token by its importance ratio, for an unbiased gradient of the KL
    (DeepSeek-V3.2)."""
    num_iterations: PositiveInt = 1
    """Passes over the completions of a step."""
    num_minibatches: PositiveInt = 1
    """Optimizer updates per pass."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss."""
    dynamic_sampling: bool = False
    """Replace a group whose advantages are all 0 (equal rewards) by a group of another problem
    (DAPO), three times at most; then the last group stays."""
    ref_sync_steps: NonNegativeInt = 0
    """Move the reference model towards the policy every N steps; 0: never."""
    ref_sync_alpha: Proportion = 1.0
    """Weight of the policy in the moved reference model: ref = alpha * policy + (1 - alpha) *
    ref."""

    dynamic_sampling_attempts: ClassVar[int] = 3
    """Number of other problems that are tried in place of one whose group has no advantage."""

    @model_validator(mode="after")
    def _fill_from_preset(self) -> Self:
        for key, value in PRESETS[self.name].items():
            if key not in self.model_fields_set:
                object.__setattr__(self, key, value)  # frozen for others
        return self

    @property
    def multi_objective_aggregation(self) -> MultiObjectiveAggregation:
        """Of several rewards: the advantages of their weighted sum, or with GDPO the sum of their
        advantages."""
        return "normalize_then_sum" if self.name == "gdpo" else "sum_then_normalize"

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates from the completions of one step."""
        return self.num_iterations * self.num_minibatches

    @property
    def skips_zero_advantage(self) -> bool:
        """True if completions with advantage 0 are not computed: a KL term, or a user's loss, may
        have a gradient."""
        return self.beta == 0 and not is_user_function(self.objective)

    @property
    def clip_high(self) -> float:
        """``epsilon_high``, with its default."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
