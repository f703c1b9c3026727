"""A run as four records: each holds the parts of one concern, built once by :func:`grpo.run.prepare.prepare`.

A function takes the record that it needs. Records never change; what changes during a run are the
weights and states inside of their parts, and :class:`grpo.checkpoint.saver.Progress`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.algorithm.advantages import OwnAdvantages
from grpo.algorithm.batch import Problem
from grpo.algorithm.choices import Objective
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import OwnObjective
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
from grpo.telemetry.reporter import Reporter
from grpo.turns.tools import Tools


@dataclass(frozen=True)
class Learner:
    """The policy, and what updates it."""

    config: Config
    world: World
    progress: Progress
    policy: Policy
    scorer: nn.Module
    """Log-probs of completions under the policy, with gradient; wrapped by DDP, or sharded by FSDP."""
    bare_scorer: CompletionScorer
    """The same module without DDP, for passes without gradient; under FSDP the same object."""
    ref_scorer: CompletionScorer | None
    """Log-probs under the frozen reference. None if ``beta`` is 0: no reference is in memory then."""
    optimizer: torch.optim.Optimizer
    lr_schedule: LRScheduler
    reporter: Reporter
    """Shows bars and warnings."""
    objective: Objective | OwnObjective
    """The loss of a token: a name, or a function of the user."""
    user_advantages: OwnAdvantages | None = None
    """Advantages by a function of the user. Default: those of the configuration."""

    @property
    def is_sharded(self) -> bool:
        """True under FSDP. Each pass is a collective then, so all ranks need as many passes."""
        return is_sharded(self.bare_scorer)

    @property
    def tokens_per_microbatch(self) -> int:
        """Most tokens of one forward and backward pass: as configured, or fewer that fit in memory."""
        return self.progress.tokens_per_microbatch or self.config.optim.tokens_per_microbatch

    @property
    def max_length(self) -> float:
        """Tokens that ``aggregation=constant`` counts for each completion in the denominator."""
        longest = self.config.rollout.max_completion_length
        return self.config.algorithm.normalize_constant or longest


@dataclass(frozen=True)
class Sampler:
    """The engine that samples completions, and its settings."""

    config: Config
    world: World
    progress: Progress
    engine: Engine

    @property
    def sampling(self) -> SamplingParams:
        """The settings of a rollout; ``tokens_in_flight`` as configured, or fewer that fit in memory."""
        rollout = self.config.rollout
        return SamplingParams(
            num_generations=rollout.num_generations,
            max_completion_length=rollout.max_completion_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            stop=tuple(rollout.stop),
            tokens_in_flight=self.progress.tokens_in_flight or rollout.tokens_in_flight,
            keep_sampling_mask=rollout.keep_sampling_mask,
        )

    def current_weights(self, seconds: dict[str, float] | None = None) -> AbstractContextManager[None]:
        """Inside the block the engine samples from the policy's weights at its start.

        The time to copy, gather or send them is added to ``seconds["rollout"]``.
        """
        return engine_with_weights(self.engine, self.world, seconds)


@dataclass(frozen=True)
class Tasks:
    """The problems, and what judges their completions."""

    problems: Schedule
    eval_problems: Sequence[Problem]
    rewards: RewardRunner
    tools: Tools | None
    """Tools and environments; None: completions are one turn."""


@dataclass(frozen=True)
class Log:
    """The output of a run: console, dashboards and checkpoints; and the signals that it obeys."""

    reporter: Reporter
    saver: Saver
    signals: Signals
    lock: Lock


@dataclass(frozen=True)
class Run:
    """All of a run."""

    config: Config
    world: World
    progress: Progress
    learner: Learner
    sampler: Sampler
    tasks: Tasks
    log: Log
    max_steps: int

    @property
    def trainer_state(self) -> TrainerState:
        """The position of the run, for rewards that take it as an argument."""
        step = self.progress.step
        epoch = step / self.tasks.problems.steps_per_epoch
        return TrainerState(step, epoch, self.max_steps)

    def close(self) -> None:
        self.sampler.engine.close()
        self.tasks.rewards.close()
        self.log.reporter.close()
        self.log.signals.close()
        self.log.lock.release()
