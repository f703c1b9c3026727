"""The four records of a run, each of one concern, and the record of a step in progress.

:func:`grpo.run.prepare.prepare` builds the four records once, and a function takes the record that
it needs. No field of the four records is ever set again. What changes during a run lies inside of
their parts: the weights, the states of the optimizer and the schedule,
:class:`grpo.checkpoint.saver.Progress`, and bookkeeping such as the step saved last.

Shapes: ``P`` problems, ``G`` completions each, ``F`` reward functions, ``B`` rows, ``T`` completion
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.algorithm.advantages import UserAdvantages
from grpo.algorithm.batch import Batch, Group, Problem
from grpo.algorithm.choices import Objective
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import UserObjective
from grpo.checkpoint.resume import Lock
from grpo.checkpoint.saver import Progress, Saver
from grpo.config import Config
from grpo.data import Schedule
from grpo.distributed import World, is_sharded
from grpo.model import Policy
from grpo.rewards import RewardRunner
from grpo.rewards.calls import TrainerState
from grpo.rollout import Engine, SamplingParams, engine_with_weights
from grpo.run.signals import Signals
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.reporter import Reporter
from grpo.turns.tools import Tools


@dataclass(frozen=True)
class Learner:
    """The policy, the scorers of completions, and the optimizer."""

    config: Config
    world: World
    progress: Progress
    policy: Policy
    scorer: nn.Module
    """Computes log-probs of completions under the policy, with gradient. DDP wraps it, or FSDP
    shards it."""
    bare_scorer: CompletionScorer
    """The scorer without DDP, for passes without gradient. Under FSDP and in a single process,
    ``scorer`` and ``bare_scorer`` are one object."""
    ref_scorer: CompletionScorer | None
    """Computes log-probs of completions under the frozen reference. None if neither ``beta`` nor a
    user's loss needs a reference, when none is in memory."""
    optimizer: torch.optim.Optimizer
    lr_schedule: LRScheduler
    reporter: Reporter
    """Prints warnings."""
    objective: Objective | UserObjective
    """Loss of a token: the name of a built-in objective, or a function of the user."""
    user_advantages: UserAdvantages | None = None
    """A function of the user that computes advantages. Default: the built-in ones."""

    @property
    def is_sharded(self) -> bool:
        """True under FSDP. Each pass is then a collective, so all ranks must make the same number
        of passes."""
        return is_sharded(self.bare_scorer)

    @property
    def tokens_per_microbatch(self) -> int:
        """Token limit of one forward and backward pass."""
        # The try of the largest possible step lowers a default that does not fit in memory.
        return self.progress.tokens_per_microbatch or self.config.optim.tokens_per_microbatch

    @property
    def max_length(self) -> int:
        """Number of tokens that ``aggregation=constant`` counts for each completion in the
        denominator."""
        return self.config.rollout.max_completion_length

    def clear_gradients(self) -> None:
        """Set all gradients to None, or under DDP to 0."""
        # DDP's gradients are views of its buckets. If they were set to None, new gradients would be
        # allocated beside the buckets.
        self.optimizer.zero_grad(set_to_none=self.scorer is self.bare_scorer)


@dataclass(frozen=True)
class Sampler:
    """The engine that samples completions, and its settings."""

    config: Config
    world: World
    progress: Progress
    engine: Engine

    @property
    def sampling(self) -> SamplingParams:
        """Sampling settings of a rollout."""
        rollout = self.config.rollout
        # The try of the largest possible step lowers a default that does not fit in memory.
        tokens_in_flight = self.progress.tokens_in_flight or rollout.tokens_in_flight
        return SamplingParams(
            num_generations=rollout.num_generations,
            max_completion_length=rollout.max_completion_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            tokens_in_flight=tokens_in_flight,
        )

    def current_weights(
        self, seconds: dict[str, float] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager. In its block the engine samples from the weights that the
        policy has at the start of the block.

        The time to copy, gather or send the weights is added to ``seconds["rollout"]``.
        """
        return engine_with_weights(self.engine, self.world, seconds)


@dataclass(frozen=True)
class Tasks:
    """The problems, and the rewards of their completions."""

    schedule: Schedule
    eval_problems: Sequence[Problem]
    rewards: RewardRunner
    tools: Tools


@dataclass(frozen=True)
class Log:
    """Output of a run (console, dashboards, checkpoints), its signal handlers, and the lock of its
    folder."""

    reporter: Reporter
    saver: Saver
    signals: Signals
    lock: Lock


@dataclass(frozen=True)
class Run:
    """A run: its four records, and the configuration, the ranks and the progress, which the records
    share."""

    config: Config
    world: World
    progress: Progress
    learner: Learner
    sampler: Sampler
    tasks: Tasks
    log: Log
    max_steps: int
    user_loop: Callable[[Run], None] | None = None
    """A function of the user in the place of the training loop. Default: that of the page."""

    @property
    def trainer_state(self) -> TrainerState:
        """Current step and epoch, and number of steps, for reward functions with the argument
        ``trainer_state``."""
        step = self.progress.step
        epoch = step / self.tasks.schedule.steps_per_epoch
        return TrainerState(step, epoch, self.max_steps)

    def close(self) -> None:
        """End worker processes and dashboards, restore signal handlers, unlock the folder."""
        self.sampler.engine.close()
        self.tasks.rewards.close()
        self.log.reporter.close()
        self.log.signals.close()
        # Last: another run may start in the folder from here on.
        self.log.lock.release()


PHASES = ("rollout", "reward", "logprobs", "update", "eval")
"""Phases of a step whose seconds are reported as metrics."""


@dataclass(frozen=True)
class Rollout:
    """This rank's completions of a step, and the values that the reward functions gave them."""

    groups: Sequence[Group]
    values_PGF: Tensor
    """Values of the reward functions, fp32; NaN where a function gave no value."""


@dataclass
class Step:
    """One step of a run, in progress."""

    number: int
    """Number of the step, counted from 0."""
    metrics: Accumulator = field(default_factory=Accumulator)
    # A step without an evaluation reports 0 seconds for that phase.
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """Seconds of each phase on this rank."""
    sampled: set[tuple[int, int]] = field(default_factory=set)
    """Problems of this rank that were sampled in this step: index and number of the draw."""
    groups: Sequence[Group] = ()
    """Problems of this rank with their completions."""
    values_PGF: Tensor | None = None
    """Values of the reward functions for the completions of all ranks."""
    rewards_PG: Tensor | None = None
    """Rewards of the completions of all ranks."""
    batch: Batch | None = None
    """Completions of this rank as tensors."""
    reported_old_BT: Tensor | None = None
    """Old log-probs, for the records of completions.

    They start as the sampler's log-probs. The first iteration over the batch overwrites the rows
    that this iteration computes.
    """

    def keep_for_metrics(
        self,
        groups: Sequence[Group],
        values_PGF: Tensor,
        rewards_PG: Tensor,
        batch: Batch,
    ) -> None:
        """Keep the values that the metrics and the records of completions need at the end of the
        step."""
        self.groups = groups
        self.values_PGF = values_PGF
        self.rewards_PG = rewards_PG
        self.batch = batch
        self.reported_old_BT = batch.sampling_logprobs_BT.clone()
