"""The section ``algorithm`` and its presets. docs/algorithm.md has the formulas and their
sources."""

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

# All presets but the first set beta to 0, so that no reference model is kept in memory.
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
"""Values that each preset (``algorithm.name``) gives to keys. Other keys keep the defaults of
:class:`AlgorithmConfig`, which are GRPO's. docs/algorithm.md names the papers."""


def is_user_function(name: str) -> bool:
    """True if a name refers to a user's function: ``path/to/file.py:function`` or
    ``package.module:function``."""
    return ":" in name


class AlgorithmConfig(Section):
    name: Literal[tuple(PRESETS)] = "grpo"  # type: ignore[valid-type]
    """Preset that sets other keys of this section, except keys that you set. gdpo: the advantages
    of each reward function are summed with the weights, and the sum is normalized over the
    batch."""
    # A typing error in a name is found here, before models or data are loaded.
    objective: str = Field("clip", pattern=f"^({'|'.join(get_args(Objective))}|.*:.*)$")
    """Loss of each token: clip (PPO's surrogate), cispo (log-prob with a clipped weight), sapo
    (soft gate), dppo_tv (bound on the change of a probability), reinforce, or your function:
    path/to/file.py:function (docs/algorithm.md)."""
    advantages: str | None = None
    """Your function that computes advantages from rewards: path/to/file.py:function
    (docs/algorithm.md). Default: (reward - baseline) / scale."""
    loop: str | None = None
    """Your function train(run) in the place of the loop in train_grpo.py: path/to/file.py:function
    (docs/algorithm.md). Default: the loop of the page."""
    own_args: dict[Literal["objective", "advantages", "loop"], dict[str, Any]] = {}
    """Keyword arguments for your functions: {objective: {NAME: VALUE}, loop: {NAME: VALUE}}."""
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
    """Average of the token losses: over the tokens of a response, then over responses
    (response_mean); over all tokens (token_mean); or their sum / (responses x
    max_completion_length) (constant)."""
    importance_level: ImportanceLevel = "token"
    """Importance ratios: one per token (token), or one per response (sequence, as in GSPO)."""
    epsilon: NonNegativeFloat = 0.2
    """Importance ratios below 1 - epsilon are clipped (objective=clip). dppo_tv: tokens with a
    negative advantage whose probability fell by more than epsilon get no gradient."""
    epsilon_high: NonNegativeFloat | None = None
    """Importance ratios above 1 + epsilon_high are clipped. dppo_tv: tokens with a positive
    advantage whose probability rose by more than epsilon_high get no gradient. Default: epsilon."""
    # A bound below 1 would clip the ratios of the first update, which are 1.
    delta: float | None = Field(None, gt=1)
    """Upper bound of the importance ratio where the advantage is negative. objective=clip has no
    other upper bound there. Default: no bound."""
    top_entropy_quantile: PositiveFraction = 1.0
    """Train only on this fraction of the tokens of a step: the tokens with the highest entropy. The
    KL counts all tokens. A value below 1 costs one more forward pass."""
    sampler_correction: SamplerCorrection = "none"
    """Weight of the loss: the trainer's probability before the update / the sampler's probability,
    of a token (token_...) or of a completion (sequence_...). A weight outside the bounds
    sampler_correction_min and _max becomes the bound (truncate: TIS) or 0 (mask: MIS).
    geometric_mask: the weight of a completion is 1 if the geometric mean of its tokens' ratios is
    within the bounds, such as 0.99 and 1.01, else 0. none: all weights are 1."""
    sampler_correction_min: NonNegativeFloat | None = None
    """Lower bound of the weight of sampler_correction. Default: no bound."""
    sampler_correction_max: PositiveFloat | None = 3.0
    """Upper bound of the weight of sampler_correction; none disables this bound."""
    off_policy_mask_threshold: NonNegativeFloat | None = None
    """Leave a completion with a negative advantage out of the policy loss if its mean log-prob per
    token has fallen by more than this since sampling (off-policy sequence masking, DeepSeek-V3.2).
    Default: no completion is left out."""
    beta: NonNegativeFloat = 0.04
    """Weight of the KL to the reference model. With 0 no reference model is loaded."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL: -d (k1), d^2 / 2 (k2) or exp(d) - d - 1 (k3), where d is the reference's
    log-prob minus the policy's."""
    unbiased_kl: bool = False
    """Multiply the KL of each token by its importance ratio, for an unbiased gradient of the KL
    (DeepSeek-V3.2)."""
    num_iterations: PositiveInt = 1
    """Passes over the completions of a step."""
    num_minibatches: PositiveInt = 1
    """Optimizer updates in each pass over the completions of a step."""
    mask_truncated_completions: bool = False
    """Leave completions that were truncated at max_completion_length out of the loss."""
    dynamic_sampling: bool = False
    """Replace a group whose advantages are all 0 (equal rewards) by a group of another problem
    (DAPO), at most three times. The third replacement is kept even if its rewards are equal."""
    ref_sync_steps: NonNegativeInt = 0
    """Move the reference model towards the policy every N steps; 0 disables this."""
    ref_sync_alpha: PositiveFraction = 1.0
    """Weight alpha of the policy when the reference model is moved: alpha * policy + (1 - alpha) *
    reference."""

    # DAPO samples until the batch is full. A bound keeps a step finite when every group has equal
    # rewards.
    dynamic_sampling_attempts: ClassVar[int] = 3
    """Limit on the other problems that are tried, one after another, in place of a problem whose
    advantages are all 0."""

    @model_validator(mode="after")
    def _fill_from_preset(self) -> Self:
        for key, value in PRESETS[self.name].items():
            if key not in self.model_fields_set:
                # pydantic refuses a plain assignment, which would also count the key as set by the
                # user.
                object.__setattr__(self, key, value)
        return self

    @property
    def multi_objective_aggregation(self) -> MultiObjectiveAggregation:
        """Order of operations with several reward functions: advantages of the weighted sum of
        rewards, or (GDPO) the weighted sum of the advantages of each reward."""
        return "normalize_then_sum" if self.name == "gdpo" else "sum_then_normalize"

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates in one step."""
        return self.num_iterations * self.num_minibatches

    @property
    def skips_zero_advantage(self) -> bool:
        """True if completions with advantage 0 need no forward and backward pass."""
        # The policy loss of these completions has no gradient. The KL has a gradient, and a user's
        # loss may have one.
        return self.beta == 0 and not is_user_function(self.objective)
