"""Hints: problems that an experienced person would see in the metrics, and what to do about each. ``docs/metrics.md`` lists them."""

import math
from collections.abc import Callable, Collection, Mapping
from statistics import fmean, variance
from typing import Any

FEW, MANY, START = 5, 20, 10
"""Number of steps to average over: ``FEW`` if a quick reaction is needed, ``MANY`` for noisy metrics, and the first ``START`` steps,
with which later ones are compared."""
ALL_EQUAL = 10  # steps in a row without unequal rewards: a hint then does not wait for MANY steps

MAX_KL = 0.5  # nats per token
MIN_ENTROPY_KEPT = 0.1  # share of the entropy of the first steps
MAX_EQUAL_GROUPS = 0.8
MAX_TRUNCATED = 0.25
MAX_CLIPPED = 0.3
FLAT_AFTER = 100  # steps
FORMAT_ROSE, ACCURACY_ROSE = 0.2, 0.02
MAX_LOGPROB_DIFFERENCE = 0.05  # nats per token
MAX_ROLLOUT_SHARE, MAX_REWARD_SHARE = 0.9, 0.3
MIN_STEP_TIME = 1.0  # seconds; in shorter steps the share of a phase does not matter

NOT_ACCURACY = ("format", "tag", "overlong", "length", "brevity")
"""A reward whose name contains one of these does not judge the answer."""


class Hints:
    """Takes the metrics of one step after the other, and gives each hint once; those of the rules ``without`` never."""

    def __init__(self, *, without: Collection[str] = ()) -> None:
        self._history = History()
        self._given: set[str] = set(without)

    def update(self, metrics: Mapping[str, Any]) -> list[str]:
        """The hints that this step triggers and that were not given before. Lines without a reward (evaluations) are ignored."""
        if _number(metrics.get("reward")) is None:
            return []
        self._history.steps.append(metrics)
        found = {name: rule(self._history) for name, rule in RULES.items() if name not in self._given}
        hints = {name: hint for name, hint in found.items() if hint}
        self._given |= hints.keys()
        return list(hints.values())


class History:
    """The metrics of all steps so far, and means over some of them."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []

    def recent(self, name: str, num_steps: int) -> float | None:
        """Mean over the last ``num_steps`` steps; None if there are fewer, or if one of them has no number."""
        return _mean(self.values(name, slice(-num_steps, None)), num_steps)

    def at_start(self, name: str) -> float | None:
        """Mean over the first ``START`` steps; None before there are twice as many, or if one of them has no number."""
        return _mean(self.values(name, slice(0, START)), START) if len(self.steps) >= 2 * START else None

    def values(self, name: str, steps: slice) -> list[float | None]:
        return [_number(metrics.get(name)) for metrics in self.steps[steps]]

    def time_share(self, phase: str, num_steps: int) -> float | None:
        """Mean share of the step time that a phase took; None while that is unknown, or if steps are short."""
        part, whole = self.recent(phase, num_steps), self.recent("step_time", num_steps)
        return None if part is None or whole is None or whole < MIN_STEP_TIME else part / whole

    def reward_rose(self, num_steps: int) -> bool | None:
        """True if the mean reward of the last steps is above that of the first by two standard errors; None with too few steps."""
        first, last = self.values("reward", slice(0, START)), self.values("reward", slice(-num_steps, None))
        if len(self.steps) < START + num_steps or None in first or None in last:
            return None
        error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
        return fmean(last) - fmean(first) > 2 * error


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _mean(values: list[float | None], expected: int) -> float | None:
    return fmean(values) if len(values) == expected and None not in values else None


Rule = Callable[[History], str | None]
"""Returns a hint if the history triggers it."""


def _above(limit: float, name: str, num_steps: int, hint: str) -> Rule:
    """A rule: the mean of a metric over the last steps (of ``time/...``: its share of the step time) is above ``limit``.

    ``hint`` has ``{}`` where the number goes.
    """

    def rule(history: History) -> str | None:
        value = (history.time_share if name.startswith("time/") else history.recent)(name, num_steps)
        return None if value is None or value <= limit else hint.format(value)

    return rule


def _entropy(history: History) -> str | None:
    now, then = history.recent("entropy", FEW), history.at_start("entropy")
    if now is None or then is None or then <= 0 or now >= MIN_ENTROPY_KEPT * then:
        return None
    return (
        f"the entropy fell from {then:.3f} to {now:.3f}: the completions of a prompt become identical, get equal rewards, and then give "
        "no gradient. If the accuracy should still rise, set algorithm.epsilon_high=0.28, lower optim.learning_rate, or raise algorithm.beta"
    )


def _equal_groups(history: History) -> str | None:
    if history.recent("frac_reward_zero_std", ALL_EQUAL) == 1 and not history.reward_rose(MANY):
        return (
            f"{ALL_EQUAL} steps in a row, all completions of each group got the same reward: there is nothing to learn from, and "
            "only the KL term and weight decay change the weights. Read some completions and check the reward function; raise "
            "rollout.temperature, change the data, or set algorithm.dynamic_sampling=true"
        )
    share = history.recent("frac_reward_zero_std", MANY)
    if share is None or share <= MAX_EQUAL_GROUPS:
        return None
    if history.reward_rose(MANY):
        return (
            f"{share:.0%} of the groups now have equal rewards, and the reward has risen: the policy has nearly learned these "
            "problems. Stop here, continue with harder problems, or set algorithm.dynamic_sampling=true"
        )
    return (
        f"{share:.0%} of the groups have equal rewards and give no gradient: the problems are too easy (reward near its maximum) or "
        "too hard (near its minimum). Change the data, raise rollout.num_generations, or set algorithm.dynamic_sampling=true"
    )


def _flat_reward(history: History) -> str | None:
    half = FLAT_AFTER // 2
    if len(history.steps) < FLAT_AFTER or history.reward_rose(half) in (True, None):
        return None
    start, now = history.at_start("reward"), history.recent("reward", half)
    return (
        f"after {len(history.steps)} steps the reward ({now:.3f}) is no higher than at the start ({start:.3f}). If groups have "
        "unequal rewards (frac_reward_zero_std below 1), raise optim.learning_rate; if not, the reward gives nothing to learn from"
    )


def _format_alone(history: History) -> str | None:
    accuracy_rises, format_rises = [], []
    for name in history.steps[-1]:
        now, then = history.recent(name, MANY), history.at_start(name)
        if now is None or then is None or not (name.startswith("rewards/") and name.endswith("/mean")):
            continue
        function = name.split("/")[1].lower()
        if not any(part in function for part in NOT_ACCURACY):
            accuracy_rises.append(now - then)
        elif "format" in function or "tag" in function:
            format_rises.append(now - then)
    if len(history.steps) < 2 * MANY or not accuracy_rises or not format_rises or max(format_rises) < FORMAT_ROSE:
        return None
    if max(accuracy_rises) > ACCURACY_ROSE:
        return None
    return (
        f"the format reward rose by {max(format_rises):.2f} while accuracy moved by {max(accuracy_rises):+.2f}: the model learns the "
        "format only. Lower the weight of the format reward, and check that right answers are recognised (eval/lenient_accuracy)"
    )


RULES: dict[str, Rule] = {
    "KL": _above(
        MAX_KL, "kl", FEW,
        "the KL to the reference is {:.2f} nats per token: the policy is far from the model that training started from. Lower "
        "optim.learning_rate or raise algorithm.beta, and read some completions: the policy may exploit a weakness of the reward",
    ),
    "entropy": _entropy,
    "equal rewards": _equal_groups,
    "truncation": _above(
        MAX_TRUNCATED, "completions/clipped_ratio", MANY,
        "{:.0%} of the completions are cut off at rollout.max_completion_length, often before their answer: raise the limit, "
        "add the reward soft_overlong against long completions, or check whether the model ever generates its end token",
    ),
    "clipping": _above(
        MAX_CLIPPED, "clip_ratio/region_mean", FEW,
        "{:.0%} of the tokens are clipped and have no gradient: the updates from one rollout change the policy too much. Lower "
        "optim.learning_rate, algorithm.num_iterations or algorithm.num_minibatches, or raise algorithm.epsilon",
    ),
    "flat reward": _flat_reward,
    "format alone": _format_alone,
    "log-prob difference": _above(
        MAX_LOGPROB_DIFFERENCE, "sampling/logprob_difference", FEW,
        "log-probs from sampling and from scoring differ by {:.3f} nats per token: the gradient is not that of the policy which "
        "sampled. Compare with runtime.precision=fp32, and switch off what computes differently while sampling (attention kernel, "
        "dropout). With rollout.engine=vllm, give vLLM the same precision, and keep "
        "algorithm.sampler_correction; its share of cut weights is sampling/importance_sampling_ratio/cut",
    ),
    "rollout time": _above(
        MAX_ROLLOUT_SHARE, "time/rollout", MANY,
        "{:.0%} of the time goes to sampling: raise rollout.tokens_in_flight if it is set (built-in engine), lower "
        "rollout.max_completion_length, or make more updates from each rollout (algorithm.num_minibatches=2)",
    ),
    "reward time": _above(
        MAX_REWARD_SHARE, "time/reward", MANY,
        "{:.0%} of the time goes to the reward functions: raise reward.num_workers, lower reward.timeout_s (see "
        "rewards/<name>/errors), or make the functions faster",
    ),
}  # fmt: skip
"""The rules by the name they have in ``docs/metrics.md``."""
