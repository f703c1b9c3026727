"""Hints name problems that an experienced person would see in the metrics, and what to do about
each problem (``docs/metrics.md``)."""

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grpo.telemetry.records import is_computed

MAX_STEPS_OF_MEAN = 10
"""Largest number of steps in the mean of a metric. The mean is over the last steps of the run."""
MIN_STEPS_OF_MEAN = 3
"""Number of steps after which hints begin. The mean of one or two steps says little."""


@dataclass(frozen=True)
class HintRule:
    """A hint, and the metric that it depends on."""

    name: str
    """Name of the hint in ``docs/metrics.md``."""
    metric: str
    """Name of the metric whose mean over the last steps is compared with the limits."""
    text: str
    """The hint, with ``{mean}`` in the place of the mean, and ``{higher_rate}`` in the place
    of ten times the highest learning rate so far."""
    above: float = math.inf
    """The hint holds if the mean is above this limit. Default: no limit."""
    below: float = -math.inf
    """The hint holds if the mean is below this limit. Default: no limit."""
    min_steps: int = 1
    """Number of steps before which the hint does not hold."""
    unless: str = ""
    """Name of a rule before this one, whose hint explains the metric too."""


# The limits are rules of thumb: a task that is nearly learned also has equal rewards and a low
# entropy.
HINT_RULES = (
    # Usual values are 0.001 to 0.1. At 0.5, twenty tokens are about e^10 times as likely under the
    # policy as under the reference.
    HintRule(
        "KL",
        "kl",
        (
            "the KL to the reference is {mean:.2f} nats per token: the policy is far from where "
            "training started. Lower optim.learning_rate or raise algorithm.beta, and read some "
            "completions: the policy may exploit a weakness of the reward"
        ),
        above=0.5,
    ),
    # At 0.02 nats the likeliest token has a probability of about 0.997.
    HintRule(
        "entropy",
        "entropy",
        (
            "the entropy is {mean:.4f}: the completions of a prompt become identical. All is well "
            "if the reward is high: the task is learned. If it should still rise, lower "
            "optim.learning_rate, raise algorithm.beta, or, with several updates per rollout, set "
            "algorithm.epsilon_high=0.28"
        ),
        below=0.02,
    ),
    # None is a valid value, for what cannot be scored, so that no error says that all are None.
    HintRule(
        "no score",
        "frac_unscorable",
        (
            "{mean:.0%} of the completions have no score, and so no advantage: each reward "
            "function, or get_reward, returned None for them, or failed (rewards/NAME/errors)"
        ),
        above=0.5,
    ),
    # Above 0.8, less than a fifth of the groups give all of the gradient.
    HintRule(
        "equal rewards",
        "frac_reward_zero_std",
        (
            "{mean:.0%} of the groups have equal rewards. All is well if the reward is high: "
            "these problems are learned. If it is low, they give no gradient (except with "
            "algorithm.baseline=none): they are too hard, tools fail, or the reward function is "
            "wrong or gives None: read completions, change the data, raise "
            "rollout.num_generations, or set algorithm.dynamic_sampling=true"
        ),
        above=0.8,
        unless="no score",
    ),
    # Also with groups that differ, a small model moves little at the rates of large models.
    HintRule(
        "no movement",
        "kl",
        (
            "the KL to the reference is {mean:.4f} nats per token after ten steps: the policy "
            "hardly moves. Unless the warm-up goes on, algorithm.ref_sync_steps moves the "
            "reference, or hundreds of steps follow, try optim.learning_rate={higher_rate:.0e}"
        ),
        below=0.0005,
        min_steps=MAX_STEPS_OF_MEAN,
        unless="equal rewards",
    ),
    # A completion that is cut off mostly has no answer. Its reward is then about its length.
    HintRule(
        "truncation",
        "completions/clipped_ratio",
        (
            "{mean:.0%} of the completions are cut off at rollout.max_completion_length, often "
            "before their answer: raise the limit, add the reward soft_overlong, or check whether "
            "the model ever generates its end token. A tool's result that does not fit cuts off, "
            "too: rollout.max_tool_tokens"
        ),
        above=0.25,
    ),
    # Only runs with tools have this metric: the number of calls per completion.
    HintRule(
        "no calls",
        "tools/call_frequency",
        (
            "nobody called the tool: no completion of the last steps has a call. Read a prompt and"
            " a completion (--debug shows them): describe the tools in data.system_prompt if the "
            "prompt does not, check that the model writes calls in the form of tools_format, and "
            "that rollout.max_turns leaves a turn after a call: those of the last turn are not run"
        ),
        below=0.001,
    ),
    # At the start a model may write calls that fail, and learn from the errors.
    HintRule(
        "failing tools",
        "tools/failure_frequency",
        (
            "{mean:.0%} of the tool calls fail. The model reads their errors, and may learn from "
            "them. A tool whose calls all fail, or take longer than reward.timeout_s, needs "
            "mending: completions/ has each call with its error"
        ),
        above=0.5,
    ),
    # Most objectives give a clipped token no gradient: much of the rollout was sampled in vain.
    HintRule(
        "clipping",
        "clip_ratio/region_mean",
        (
            "{mean:.0%} of the tokens are clipped and have no gradient: the updates from one "
            "rollout change the policy too much. Lower optim.learning_rate, "
            "algorithm.num_iterations or algorithm.num_minibatches, or raise algorithm.epsilon"
        ),
        above=0.3,
    ),
    # Usual values are 1e-6 in fp32 and up to 0.02 in bf16. Rounding does not explain a larger
    # difference.
    HintRule(
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
    # Linux counts this time; elsewhere the metric is 0.
    HintRule(
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
    """Hints on a run. :meth:`update` takes the metrics of each step in turn, and returns each hint
    once."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        """Names of the hints that :meth:`update` has returned."""
        self._peak_rate = 0.0
        """Highest learning rate of the steps so far."""
        self._steps: deque[dict[str, Any]] = deque(maxlen=MAX_STEPS_OF_MEAN)

    def update(self, metrics: dict[str, Any]) -> list[str]:
        """Take the metrics of a step, and return the hints that hold for the first time."""
        # The line of an evaluation before training has no reward.
        if "reward" not in metrics:
            return []
        self._steps.append(metrics)
        rate = metrics.get("learning_rate")
        if is_computed(rate):
            self._peak_rate = max(self._peak_rate, rate)
        if len(self._steps) < MIN_STEPS_OF_MEAN:
            return []
        hints = self.verdict()
        new = [hint for name, hint in hints.items() if name not in self._given]
        self._given.update(hints)
        return new

    def verdict(self) -> dict[str, str]:
        """Return all hints that hold for the last steps, by the names of their rules. Hints that
        were given before are included."""
        hints = {}
        for rule in HINT_RULES:
            if len(self._steps) < rule.min_steps or rule.unless in hints:
                continue
            metric = rule.metric
            values = [step[metric] for step in self._steps if is_computed(step.get(metric))]
            # A metric that was never computed gives no hint: NaN is neither above nor below.
            mean = fmean(values) if values else math.nan
            if mean > rule.above or mean < rule.below:
                hints[rule.name] = rule.text.format(mean=mean, higher_rate=10 * self._peak_rate)
        return hints
