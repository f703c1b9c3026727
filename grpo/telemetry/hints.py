"""Hints: problems that an experienced person would see in the metrics, and what to do (``docs/metrics.md``)."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

WINDOW = 10
"""Steps whose mean is compared with a limit."""
MIN_ENTROPY = 0.1
"""Share of the mean entropy of the first ``WINDOW`` steps."""
ENTROPY = (
    "the entropy fell from {:.3f} to {:.3f}: the completions of a prompt become identical, as they do once it is "
    "learned, and then give no gradient. If the accuracy should still rise, set algorithm.epsilon_high=0.28, lower "
    "optim.learning_rate, or raise algorithm.beta"
)
RULES = {
    "KL": (
        "kl", 0.5,
        "the KL to the reference is {:.2f} nats per token: the policy is far from where training started. Lower "
        "optim.learning_rate or raise algorithm.beta, and read some completions: the policy may exploit a weakness of "
        "the reward",
    ),
    "equal rewards": (
        "frac_reward_zero_std", 0.8,
        "{:.0%} of the groups have equal rewards and give no gradient. With a high reward these problems are learned; "
        "all is well then. Else they are too hard, or the reward function is wrong or gives None: read completions, "
        "change the data, raise rollout.num_generations, or set algorithm.dynamic_sampling=true",
    ),
    "no score": (
        "frac_unscorable", 0.99,
        "no completion of this step has a score, since the reward functions gave None for all: it teaches nothing",
    ),
    "truncation": (
        "completions/clipped_ratio", 0.25,
        "{:.0%} of the completions are cut off at rollout.max_completion_length, often before their answer: raise the "
        "limit, add the reward soft_overlong, or check whether the model ever generates its end token",
    ),
    "clipping": (
        "clip_ratio/region_mean", 0.3,
        "{:.0%} of the tokens are clipped and have no gradient: the updates from one rollout change the policy too "
        "much. Lower optim.learning_rate, algorithm.num_iterations or algorithm.num_minibatches, or raise "
        "algorithm.epsilon",
    ),
    "log-prob difference": (
        "sampling/logprob_difference", 0.05,
        "log-probs from sampling and from scoring differ by {:.3f} nats per token: the gradient is not that of the "
        "policy which sampled. Compare with runtime.precision=fp32 and another model.attn_implementation; with "
        "rollout.engine=vllm, keep algorithm.sampler_correction",
    ),
    "shared cores": (
        "time/frac_core_wait", 0.2,
        "for {:.0%} of this step the process waited for a CPU core that another process had. Stop what else runs; if "
        "this run has several threads, which then wait for each other, set runtime.threads_per_rank=1",
    ),
}  # fmt: skip
"""Name in ``docs/metrics.md`` -> metric, limit that its mean exceeds, and the hint, with ``{}`` where the mean goes."""


class Hints:
    """Takes the metrics of one step after the other, and gives each hint once; those of the rules ``without`` never."""

    def __init__(self, *, without: Collection[str] = ()) -> None:
        self._steps: list[Mapping[str, Any]] = []
        self._given: set[str] = set(without)

    def update(self, metrics: Mapping[str, Any]) -> list[str]:
        """The new hints of this step. Lines without a reward (evaluations) are ignored."""
        if "reward" not in metrics:
            return []
        self._steps.append(metrics)
        found = {}
        for rule, (name, limit, hint) in RULES.items():
            window = 1 if rule in ("no score", "shared cores") else WINDOW  # one step may take minutes
            value = _mean(self._steps[-window:], name, window)
            if value is not None and value > limit:
                found[rule] = hint.format(value)
        now, start = (_mean(steps, "entropy") for steps in (self._steps[-WINDOW:], self._steps[:WINDOW]))
        if now is not None and start is not None and now < MIN_ENTROPY * start:
            found["entropy"] = ENTROPY.format(start, now)
        hints = [hint for rule, hint in found.items() if rule not in self._given]
        self._given |= found.keys()
        return hints


def _mean(steps: Sequence[Mapping[str, Any]], name: str, count: int = WINDOW) -> float | None:
    """The mean of a metric; None with fewer than ``count`` steps, or if one of them has no number."""
    values = [metrics.get(name) for metrics in steps]
    is_complete = len(values) == count and all(value is not None and math.isfinite(value) for value in values)
    return fmean(values) if is_complete else None
