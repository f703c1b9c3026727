"""What a person with experience would say while watching the metrics: each sign once a run, with what to do about it.

The thresholds are rules of thumb, stated for the reader in ``docs/metrics.md``; a hint stops nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean, variance
from typing import Any

SHORT, LONG, START = 5, 20, 10
"""Steps that a mean is taken over: of what must be seen at once, of what swings, and of the beginning to compare with."""
ALL_EQUAL = 10
"""Steps in a row without any unequal rewards: nothing to learn from, said without waiting for ``LONG``."""

MAX_KL = 0.5  # nats per token
MIN_ENTROPY_KEPT = 0.1  # of the entropy at the start
MAX_EQUAL_GROUPS = 0.8
MAX_TRUNCATED = 0.25
MAX_CLIPPED = 0.3
FLAT_AFTER = 100  # steps
FORMAT_ROSE, ACCURACY_ROSE = 0.2, 0.02
MAX_LOGPROB_DIFFERENCE = 0.05  # nats per token
MAX_ROLLOUT_SHARE, MAX_REWARD_SHARE = 0.9, 0.3
MIN_STEP_TIME = 1.0  # seconds; below it nobody waits for a phase

NOT_ACCURACY = ("format", "tag", "overlong", "length", "brevity")
"""Parts of the names of rewards that do not look at the answer."""


class Health:
    """Reads one step's metrics after the other; :meth:`look` says what has just become noticeable."""

    def __init__(self) -> None:
        self._history: list[Mapping[str, Any]] = []
        self._said: set[str] = set()

    def look(self, metrics: Mapping[str, Any]) -> list[str]:
        """Hints that this step gives cause for and that were not given before. Steps without a reward (evaluations) do not count."""
        if _number(metrics.get("reward")) is None:
            return []
        self._history.append(metrics)
        hints = []
        for name, sign in SIGNS.items():
            if name not in self._said and (hint := sign(self)):
                self._said.add(name)
                hints.append(hint)
        return hints

    def recent(self, name: str, steps: int) -> float | None:
        """Mean over the last ``steps`` steps; None before there are so many, or where one has no number."""
        return _mean(self.values(name, slice(-steps, None)), steps)

    def at_start(self, name: str) -> float | None:
        """Mean over the first steps, once twice as many have been seen."""
        return _mean(self.values(name, slice(0, START)), START) if len(self._history) >= 2 * START else None

    def values(self, name: str, steps: slice) -> list[float | None]:
        return [_number(metrics.get(name)) for metrics in self._history[steps]]

    @property
    def num_steps(self) -> int:
        return len(self._history)

    def reward_names(self) -> list[str]:
        return [name for name in self._history[-1] if name.startswith("rewards/") and name.endswith("/mean")]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _mean(values: list[float | None], wanted: int) -> float | None:
    return fmean(values) if len(values) == wanted and None not in values else None


def _kl(health: Health) -> str | None:
    kl = health.recent("kl", SHORT)
    if kl is None or kl <= MAX_KL:
        return None
    return (
        f"the KL to the reference is {kl:.2f} nats per token: the policy has left its starting point. Lower optim.learning_rate "
        "or raise algorithm.beta, and read the completions for a reward that is gamed"
    )


def _entropy(health: Health) -> str | None:
    now, then = health.recent("entropy", SHORT), health.at_start("entropy")
    if now is None or then is None or then <= 0 or now >= MIN_ENTROPY_KEPT * then:
        return None
    return (
        f"the entropy fell from {then:.3f} to {now:.3f}: completions of one prompt become the same, and groups stop teaching. If "
        "accuracy still has far to go, use algorithm.epsilon_high=0.28, a lower optim.learning_rate, or more algorithm.beta"
    )


def _equal_groups(health: Health) -> str | None:
    if health.recent("frac_reward_zero_std", ALL_EQUAL) == 1 and not _reward_rose(health, LONG):
        return (
            f"{ALL_EQUAL} steps in a row, all completions of each group got the same reward: there is nothing to learn from, and "
            "only the KL term and weight decay move the weights. Look at completions/, the reward, rollout.temperature; "
            "change the data, or set algorithm.dynamic_sampling=true"
        )
    share = health.recent("frac_reward_zero_std", LONG)
    if share is None or share <= MAX_EQUAL_GROUPS:
        return None
    if _reward_rose(health, LONG):
        return (
            f"{share:.0%} of the groups have equal rewards by now, and the reward has risen: what these problems can teach is nearly "
            "learned. Stop here, go on with harder ones, or set algorithm.dynamic_sampling=true"
        )
    return (
        f"{share:.0%} of the groups have equal rewards and teach nothing: the problems are too easy (reward near its best) or too "
        "hard (near its worst). Change the data, raise rollout.num_generations, or set algorithm.dynamic_sampling=true"
    )


def _truncation(health: Health) -> str | None:
    share = health.recent("completions/clipped_ratio", LONG)
    if share is None or share <= MAX_TRUNCATED:
        return None
    return (
        f"{share:.0%} of the completions are cut at rollout.max_completion_length and rarely hold an answer: raise it, punish "
        "length (soft_overlong), or check whether the model ever ends its turn"
    )


def _clipping(health: Health) -> str | None:
    share = health.recent("clip_ratio/region_mean", SHORT)
    if share is None or share <= MAX_CLIPPED:
        return None
    return (
        f"{share:.0%} of the tokens are clipped and have no gradient: the updates of one rollout go too far. Lower "
        "optim.learning_rate, algorithm.num_iterations or num_minibatches, or widen algorithm.epsilon"
    )


def _reward_rose(health: Health, steps: int) -> bool | None:
    """Whether the mean of the last steps is above that of the first by two standard errors; None if it cannot be said yet."""
    first, last = health.values("reward", slice(0, START)), health.values("reward", slice(-steps, None))
    if health.num_steps < START + steps or None in first or None in last:
        return None
    error = math.sqrt(variance(first) / len(first) + variance(last) / len(last))
    return fmean(last) - fmean(first) > 2 * error


def _flat_reward(health: Health) -> str | None:
    half = FLAT_AFTER // 2
    if health.num_steps < FLAT_AFTER or _reward_rose(health, half) in (True, None):
        return None
    start, now = health.at_start("reward"), health.recent("reward", half)
    return (
        f"after {health.num_steps} steps the reward ({now:.3f}) is no higher than at the start ({start:.3f}). If groups "
        "have unequal rewards (frac_reward_zero_std below 1), raise optim.learning_rate; else the reward gives no signal"
    )


def _format_alone(health: Health) -> str | None:
    rises: dict[bool, list[float]] = {True: [], False: []}
    for name in health.reward_names():
        now, then = health.recent(name, LONG), health.at_start(name)
        if now is not None and then is not None:
            inner = name.split("/")[1].lower()
            is_accuracy = not any(part in inner for part in NOT_ACCURACY)
            if is_accuracy or "format" in inner or "tag" in inner:
                rises[is_accuracy].append(now - then)
    if health.num_steps < 2 * LONG or not rises[True] or not rises[False]:
        return None
    if max(rises[False]) < FORMAT_ROSE or max(rises[True]) > ACCURACY_ROSE:
        return None
    return (
        f"the format reward rose by {max(rises[False]):.2f} while accuracy moved by {max(rises[True]):+.2f}: the model learns the "
        "form alone. Lower the weight of the format reward, and check that right answers are recognised (eval/lenient_accuracy)"
    )


def _scoring(health: Health) -> str | None:
    difference = health.recent("sampling/logprob_difference", SHORT)
    if difference is None or difference <= MAX_LOGPROB_DIFFERENCE:
        return None
    return (
        f"sampled and scored log-probs differ by {difference:.3f} nats per token: the gradient belongs to another policy. Compare "
        "with runtime.precision=fp32; switch off what samples differently (attention kernel, dropout)"
    )


def _rollout_time(health: Health) -> str | None:
    share = _share(health, "time/rollout")
    if share is None or share <= MAX_ROLLOUT_SHARE:
        return None
    return (
        f"{share:.0%} of the time goes to sampling: raise rollout.tokens_in_flight if it is set, lower "
        "rollout.max_completion_length, or make more of each rollout (algorithm.num_minibatches=2)"
    )


def _reward_time(health: Health) -> str | None:
    share = _share(health, "time/reward")
    if share is None or share <= MAX_REWARD_SHARE:
        return None
    return (
        f"{share:.0%} of the time goes to the reward functions: raise reward.num_workers, lower reward.timeout_s (see "
        "rewards/<name>/errors), or make them faster"
    )


def _share(health: Health, phase: str) -> float | None:
    part, whole = health.recent(phase, LONG), health.recent("step_time", LONG)
    return None if part is None or whole is None or whole < MIN_STEP_TIME else part / whole


SIGNS: dict[str, Callable[[Health], str | None]] = {
    "kl": _kl,
    "entropy": _entropy,
    "equal groups": _equal_groups,
    "truncation": _truncation,
    "clipping": _clipping,
    "flat reward": _flat_reward,
    "format alone": _format_alone,
    "scoring": _scoring,
    "rollout time": _rollout_time,
    "reward time": _reward_time,
}
