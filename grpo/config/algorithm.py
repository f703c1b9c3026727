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
from grpo.config.schema import PositiveFraction, Section

# With beta 0, in all but the first preset, no reference model is kept in memory.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": dict(scale="none", aggregation="constant", beta=0.0),
    # DAPO's punishment of long completions is a reward, which grpo/config/config.py adds.
    "dapo": dict(aggregation="token_mean", epsilon_high=0.28, beta=0.0, dynamic_sampling=True),
    # The ratio of a sequence is a geometric mean over its tokens, and stays close to 1.
    "gspo": dict(importance_level="sequence", epsilon=3e-4, epsilon_high=4e-4, beta=0.0),
    "cispo": dict(objective="cispo", aggregation="token_mean", epsilon_high=5.0, beta=0.0),
    "maxrl": dict(scale="mean", beta=0.0),
    # The advantages of GDPO follow from this name: see multi_objective_aggregation.
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
"""Values of keys by preset (``algorithm.name``). The other keys keep the defaults of
:class:`AlgorithmConfig`, which are GRPO's. Papers: docs/algorithm.md."""


def is_user_function(name: str) -> bool:
    """True if a name stands for a user's function: ``path/to/file.py:function`` or
    ``package.module:function``."""
    return ":" in name


class AlgorithmConfig(Section):
    name: Literal[tuple(PRESETS)] = "grpo"  # type: ignore[valid-type]
    """Preset that sets other keys of this section, except those that you set. gdpo: the advantages
    of each reward function are summed with the weights, and the sum is normalized over the
    batch."""
    # A typing error in a name is found here, before anything is loaded.
    objective: str = Field("clip", pattern=f"^({'|'.join(get_args(Objective))}|.*:.*)$")
    """Loss of each token: clip (PPO's surrogate), cispo (log-prob with a clipped weight), sapo
    (soft gate), dppo_tv (bound on the change of a probability), reinforce, or a function of yours:
    path/to/file.py:function (docs/algorithm.md)."""
    advantages: str | None = None
    """A function of yours from rewards to advantages: path/to/file.py:function (docs/algorithm.md).
    Default: (reward - baseline) / scale."""
    baseline: Baseline = "mean"
    """Number that is subtracted from each reward: the mean of the group, the mean of the other
    completions of the group (leave_one_out), or 0 (none)."""
    scale: Scale = "group"
    """Number that divides the reward minus its baseline: the standard deviation of the group or of
    the batch, the mean of the group (MaxRL), or 1 (none)."""
    advantage_eps: NonNegativeFloat = 1e-4
    """Number that is added to the scale, so that almost equal rewards do not give huge
    advantages."""
    aggregation: Aggregation = "response_mean"
    """Average of the loss: over the tokens of a response, then over responses (response_mean); over
    all tokens (token_mean); or the sum / (responses x max_completion_length) (constant)."""
    importance_level: ImportanceLevel = "token"
    """One importance ratio per token, or one per response (GSPO)."""
    epsilon: NonNegativeFloat = 0.2
    """Importance ratios below 1 - epsilon are clipped (objective=clip). dppo_tv: tokens whose
    probability fell by more than epsilon get no gradient."""
    epsilon_high: NonNegativeFloat | None = None
    """Importance ratios above 1 + epsilon_high are clipped. dppo_tv: tokens whose probability rose
    by more than epsilon_high get no gradient. Default: epsilon."""
    # A bound below 1 would clip the ratios of the first update, which are 1.
    delta: float | None = Field(None, gt=1)
    """Upper bound of the importance ratio for negative advantages, which objective=clip does not
    clip. Default: no bound."""
    top_entropy_quantile: PositiveFraction = 1.0
    """Train only on this fraction of the tokens of a step, those with the highest entropy; the KL
    counts all tokens. Below 1 it costs one more forward pass."""
    sampler_correction: SamplerCorrection = "none"
    """Weight of the loss: the probability that the trainer computes before the update, divided by
    the probability that the sampler used, of a token or of a completion (sequence). A weight
    outside the two bounds becomes the bound (truncate: TIS) or 0 (mask: MIS). geometric_mask: the
    weight is 1 if the geometric mean of this ratio over the completion's tokens is within the
    bounds, such as 0.99 and 1.01, else 0."""
    sampler_correction_min: NonNegativeFloat | None = None
    """Lower bound of the weight of sampler_correction. Default: no bound."""
    sampler_correction_max: PositiveFloat | None = 3.0
    """Upper bound of the weight of sampler_correction; none: no bound."""
    off_policy_mask_threshold: NonNegativeFloat | None = None
    """Leave a completion with a negative advantage out of the policy loss if its log-prob per token
    has fallen by more than this since it was sampled (off-policy sequence masking, DeepSeek-V3.2).
    Default: no completion is left out."""
    beta: NonNegativeFloat = 0.04
    """Weight of the KL to the reference model. 0: no reference model is loaded."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL: -d (k1), d^2 / 2 (k2) or exp(d) - d - 1 (k3), where d is the reference's
    log-prob minus the policy's."""
    unbiased_kl: bool = False
    """Multiply the KL of each token by its importance ratio, for an unbiased gradient of the KL
    (DeepSeek-V3.2)."""
    num_iterations: PositiveInt = 1
    """Passes over the completions of a step."""
    num_minibatches: PositiveInt = 1
    """Optimizer updates per pass."""
    mask_truncated_completions: bool = False
    """Leave out of the loss the completions that max_completion_length has truncated."""
    dynamic_sampling: bool = False
    """Replace a group whose advantages are all 0 (equal rewards) by a group of another problem
    (DAPO), at most three times. The third replacement stays."""
    ref_sync_steps: NonNegativeInt = 0
    """Move the reference model towards the policy every N steps; 0: never."""
    ref_sync_alpha: PositiveFraction = 1.0
    """Weight alpha of the policy when the reference model is moved: alpha * policy + (1 - alpha) *
    reference."""

    # DAPO samples until the batch is full. A bound keeps a step finite when all groups are equal.
    dynamic_sampling_attempts: ClassVar[int] = 3
    """Number of other problems that are tried in place of one whose group has no advantage."""

    @model_validator(mode="after")
    def _fill_from_preset(self) -> Self:
        for key, value in PRESETS[self.name].items():
            if key not in self.model_fields_set:
                # A plain assignment is refused, and would count the key as set by the user.
                object.__setattr__(self, key, value)
        return self

    @property
    def multi_objective_aggregation(self) -> MultiObjectiveAggregation:
        """Order of operations with several rewards: advantages of their weighted sum, or (GDPO) the
        weighted sum of their advantages."""
        return "normalize_then_sum" if self.name == "gdpo" else "sum_then_normalize"

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates from the completions of one step."""
        return self.num_iterations * self.num_minibatches

    @property
    def skips_zero_advantage(self) -> bool:
        """True if completions with advantage 0 need no forward and backward pass."""
        # Their policy loss has no gradient. The KL has one, and the loss of a user may have one.
        return self.beta == 0 and not is_user_function(self.objective)

    @property
    def clip_high(self) -> float:
        """Value of ``epsilon_high``, or of ``epsilon`` if it is not set."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
