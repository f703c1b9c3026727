"""Hints: problems that an experienced person would see in the metrics, and what to do
(``docs/metrics.md``)."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo.telemetry.records import is_computed

WINDOW = 10
"""Means are taken over so many steps, or over all steps of a shorter run."""
FIRST_STEP = 3
"""The step of the first hints: the mean of one or two steps says little."""


@dataclass(frozen=True)
class Rule:
    """A hint, and when it is given."""

    name: str
    """Name in ``docs/metrics.md``."""
    metric: str
    text: str
    """The hint, with ``{mean}`` where the metric's mean over the last steps goes."""
    above: float = math.inf
    """The hint is given when the mean is above this, or below the next. A mean of nothing is NaN,
    and gives none."""
    below: float = -math.inf


RULES = (
    Rule(
        "KL",
        "kl",
        (
            "the KL to the reference is {mean:.2f} nats per token: the policy is far from where "
            "training started. Lower optim.learning_rate or raise algorithm.beta, and read some "
            "completions: the policy may exploit a weakness of the reward"
        ),
        above=0.5,
    ),
    Rule(
        "entropy",
        "entropy",
        (
            "the entropy is {mean:.3f}: the completions of a prompt become identical, as they do "
            "once it is learned, and then give no gradient. If the accuracy should still rise, set "
            "algorithm.epsilon_high=0.28, lower optim.learning_rate, or raise algorithm.beta"
        ),
        below=0.02,
    ),
    Rule(
        "equal rewards",
        "frac_reward_zero_std",
        (
            "{mean:.0%} of the groups have equal rewards and give no gradient, except with "
            "algorithm.baseline=none. With a high reward these problems are learned; all is well "
            "then. Else they are too hard, or the reward function is wrong or gives None: read completions, "
            "change the data, raise rollout.num_generations, or set algorithm.dynamic_sampling=true"
        ),
        above=0.8,
    ),
    Rule(
        "truncation",
        "completions/clipped_ratio",
        (
            "{mean:.0%} of the completions are cut off at rollout.max_completion_length, often "
            "before their answer: raise the limit, add the reward soft_overlong, or check whether "
            "the model ever generates its end token"
        ),
        above=0.25,
    ),
    Rule(
        "no calls",
        "tools/call_frequency",
        (
            "nobody called the tool: no completion of the last steps has a call. Read a prompt and"
            " a completion (--debug shows them): describe the tools in data.system_prompt if the "
            "prompt does not, and check that the model writes calls in the form of tools_format"
        ),
        below=0.001,
    ),
    Rule(
        "clipping",
        "clip_ratio/region_mean",
        (
            "{mean:.0%} of the tokens are clipped and have no gradient: the updates from one "
            "rollout change the policy too much. Lower optim.learning_rate, "
            "algorithm.num_iterations or algorithm.num_minibatches, or raise algorithm.epsilon"
        ),
        above=0.3,
    ),
    Rule(
        "log-prob difference",
        "sampling/logprob_difference",
        (
            "log-probs from sampling and from scoring differ by {mean:.3f} nats per token: the "
            "gradient is not that of the policy which sampled. Compare with runtime.precision=fp32"
            " and another model.attn_implementation; with rollout.engine=vllm, keep "
            "algorithm.sampler_correction"
        ),
        above=0.05,
    ),
    Rule(
        "shared cores",
        "time/frac_core_wait",
        (
            "for {mean:.0%} of the time the process waited for a CPU core that another process "
            "had. Stop what else runs; if this run has several threads, which then wait for each "
            "other, set runtime.threads_per_rank=1"
        ),
        above=0.2,
    ),
)


class Hints:
    """Takes the metrics of one step after the other, and gives each hint once."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._steps: deque[dict[str, Any]] = deque(maxlen=WINDOW)

    def update(self, metrics: dict[str, Any]) -> list[str]:
        """The new hints of this step. Lines without a reward (evaluations) are ignored."""
        if "reward" not in metrics:
            return []
        self._steps.append(metrics)
        if len(self._steps) < FIRST_STEP:
            return []
        holding = self.verdict()
        new = [hint for name, hint in holding.items() if name not in self._given]
        self._given.update(holding)
        return new

    def verdict(self) -> dict[str, str]:
        """Name -> hint of each rule that holds for the last steps, whether or not its hint has been
        given."""
        holding = {}
        for rule in RULES:
            values = [step.get(rule.metric) for step in self._steps]
            values = [value for value in values if is_computed(value)]
            mean = fmean(values) if values else math.nan
            if mean > rule.above or mean < rule.below:
                holding[rule.name] = rule.text.format(mean=mean)
        return holding
