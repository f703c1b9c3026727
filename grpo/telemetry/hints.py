"""Hints: problems that an experienced person would see in the metrics, and what to do (``docs/metrics.md``)."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo.algorithm.choices import Baseline, Scale, equal_rewards_have_gradient
from grpo.telemetry.records import is_computed

Metrics = Mapping[str, Any]
"""Metrics of one step by name."""
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
    applies: Callable[[float, float], bool]
    """Takes the metric's mean over the last steps, and its mean over the first steps of the run. A mean is NaN if the
    metric was computed in none of these steps; comparisons with NaN are false, so there is no hint then."""
    text: str
    """The hint, with ``{last}`` and ``{first}`` where the two means go."""


RULES = (
    Rule(
        "KL",
        "kl",
        lambda last, first: last > 0.5,
        (
            "the KL to the reference is {last:.2f} nats per token: the policy is far from where "
            "training started. Lower optim.learning_rate or raise algorithm.beta, and read some "
            "completions: the policy may exploit a weakness of the reward"
        ),
    ),
    Rule(
        "entropy",
        "entropy",
        lambda last, first: last < 0.1 * first,
        (
            "the entropy fell from {first:.3f} to {last:.3f}: the completions of a prompt become "
            "identical, as they do once it is learned, and then give no gradient. If the accuracy "
            "should still rise, set algorithm.epsilon_high=0.28, lower optim.learning_rate, or "
            "raise algorithm.beta"
        ),
    ),
    Rule(
        "equal rewards",
        "frac_reward_zero_std",
        lambda last, first: last > 0.8,
        (
            "{last:.0%} of the groups have equal rewards and give no gradient. With a high reward "
            "these problems are learned; all is well then. Else they are too hard, or the reward "
            "function is wrong or gives None: read completions, change the data, raise "
            "rollout.num_generations, or set algorithm.dynamic_sampling=true"
        ),
    ),
    Rule(
        "no score",
        "frac_unscorable",
        lambda last, first: last > 0.99,
        (
            "no completion of the last steps has a score, since the reward functions gave None for"
            " all, or failed: they teach nothing"
        ),
    ),
    Rule(
        "truncation",
        "completions/clipped_ratio",
        lambda last, first: last > 0.25,
        (
            "{last:.0%} of the completions are cut off at rollout.max_completion_length, often "
            "before their answer: raise the limit, add the reward soft_overlong, or check whether "
            "the model ever generates its end token"
        ),
    ),
    Rule(
        "no calls",
        "tools/call_frequency",
        lambda last, first: last == 0.0,
        (
            "nobody called the tool: no completion of the last steps has a call. Read a prompt and"
            " a completion (--debug shows them): describe the tools in data.system_prompt if the "
            "prompt does not, and check that the model writes calls in the form of tools_format"
        ),
    ),
    Rule(
        "clipping",
        "clip_ratio/region_mean",
        lambda last, first: last > 0.3,
        (
            "{last:.0%} of the tokens are clipped and have no gradient: the updates from one "
            "rollout change the policy too much. Lower optim.learning_rate, "
            "algorithm.num_iterations or algorithm.num_minibatches, or raise algorithm.epsilon"
        ),
    ),
    Rule(
        "log-prob difference",
        "sampling/logprob_difference",
        lambda last, first: last > 0.05,
        (
            "log-probs from sampling and from scoring differ by {last:.3f} nats per token: the "
            "gradient is not that of the policy which sampled. Compare with runtime.precision=fp32"
            " and another model.attn_implementation; with rollout.engine=vllm, keep "
            "algorithm.sampler_correction"
        ),
    ),
    Rule(
        "shared cores",
        "time/frac_core_wait",
        lambda last, first: last > 0.2,
        (
            "for {last:.0%} of the time the process waited for a CPU core that another process "
            "had. Stop what else runs; if this run has several threads, which then wait for each "
            "other, set runtime.threads_per_rank=1"
        ),
    ),
)


class Hints:
    """Takes the metrics of one step after the other, and gives each hint once.

    Args:
        without: names of rules to leave out.
    """

    def __init__(self, *, without: Collection[str] = ()) -> None:
        self._rules = [rule for rule in RULES if rule.name not in without]
        self._given: set[str] = set()
        self._first_steps: list[Metrics] = []
        self._last_steps: deque[Metrics] = deque(maxlen=WINDOW)

    def update(self, metrics: Metrics) -> list[str]:
        """The new hints of this step. Lines without a reward (evaluations) are ignored."""
        if "reward" not in metrics:
            return []
        if len(self._first_steps) < WINDOW:
            self._first_steps.append(metrics)
        self._last_steps.append(metrics)
        if len(self._last_steps) < FIRST_STEP:
            return []
        holding = self.verdict()
        new = [hint for name, hint in holding.items() if name not in self._given]
        self._given.update(holding)
        return new

    def verdict(self) -> dict[str, str]:
        """Name -> hint of each rule that holds for the last steps, whether or not its hint has been given."""
        holding = {}
        for rule in self._rules:
            first = _mean(self._first_steps, rule.metric)
            last = _mean(self._last_steps, rule.metric)
            if rule.applies(last, first):
                holding[rule.name] = rule.text.format(first=first, last=last)
        return holding


def _mean(steps: Iterable[Metrics], metric: str) -> float:
    """The mean over the steps in which a metric was computed; NaN if there is none."""
    values = [step[metric] for step in steps if is_computed(step.get(metric))]
    return fmean(values) if values else math.nan


def hints_for(baseline: Baseline, scale: Scale, advantages: str | None) -> Hints:
    """The hints for a run, by the settings of its section ``algorithm``."""
    equal_rewards_teach = advantages or equal_rewards_have_gradient(baseline, scale)
    return Hints(without=["equal rewards"] if equal_rewards_teach else [])
