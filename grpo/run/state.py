"""A run: its parts, which never change after the start, and its progress, which every checkpoint saves."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.algorithm.advantages import Scores
from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.checkpoint.resume import Lock
from grpo.checkpoint.saver import Progress, Saver
from grpo.config import Config
from grpo.data import Schedule
from grpo.distributed import World, is_sharded
from grpo.evaluation.collect import eval_sampling, evaluate
from grpo.evaluation.grading import Grader
from grpo.model import Policy, sync_reference
from grpo.model.lora import copy_to_reference_adapter
from grpo.rewards import RewardRunner
from grpo.rewards.calls import TrainerState
from grpo.rollout import BuiltinEngine, Engine, SamplingParams, engine_with_weights
from grpo.run.own import OwnFunctions
from grpo.run.signals import Signals
from grpo.telemetry.reporter import Reporter


@dataclass(frozen=True)
class Run:
    """The parts of a run, built once by :func:`grpo.run.prepare.prepare`."""

    config: Config
    world: World
    policy: Policy
    engine: Engine
    """Samples completions with the policy."""
    scorer: nn.Module
    """Log-probs of completions under the policy, with gradient; with several ranks in DDP, or sharded by FSDP."""
    bare_scorer: CompletionScorer
    """The same module without DDP, for passes without gradient; under FSDP the same object."""
    ref_scorer: CompletionScorer | None
    """Log-probs under the frozen reference; None when ``beta`` is 0, and then no reference model is in memory."""
    optimizer: torch.optim.Optimizer
    lr_schedule: LRScheduler
    problems: Schedule
    eval_problems: list[Problem]
    rewards: RewardRunner
    reporter: Reporter
    saver: Saver
    signals: Signals
    lock: Lock
    max_steps: int
    progress: Progress
    own: OwnFunctions
    debug_checks: list[str] = field(default_factory=list)
    """Names of the checks of ``--debug`` that have passed so far, in order; a repeated check is there several times."""

    @property
    def may_capture(self) -> bool:
        """True if decode steps are captured in CUDA graphs, as far as the settings and the model's modules tell."""
        return isinstance(self.engine, BuiltinEngine) and self.engine.may_capture

    @property
    def is_sharded(self) -> bool:
        """True under FSDP: each forward and backward pass is then a collective, so all ranks need the same number."""
        return is_sharded(self.bare_scorer)

    @property
    def sampling(self) -> SamplingParams:
        values = {field.name: getattr(self.config.rollout, field.name) for field in fields(SamplingParams)}
        tokens_in_flight = self.progress.tokens_in_flight or self.config.rollout.tokens_in_flight
        return SamplingParams(**values | {"stop": tuple(values["stop"]), "tokens_in_flight": tokens_in_flight})

    @property
    def tokens_per_microbatch(self) -> int:
        """Most tokens of one forward and backward pass: the configured number, or a smaller one that fits in memory."""
        return self.progress.tokens_per_microbatch or self.config.optim.tokens_per_microbatch

    @property
    def trainer_state(self) -> TrainerState:
        """The position of the run, for rewards that take it as an argument."""
        step = self.progress.step
        return TrainerState(step, step / self.problems.steps_per_epoch, self.max_steps)

    def scores(self, values_PGF: torch.Tensor) -> Scores:
        """The values of all reward functions, with the weights of the configuration."""
        how = self.config.algorithm.multi_objective_aggregation
        return Scores(values_PGF, self.rewards.weights, how, self.own.advantages)

    @property
    def averaging(self) -> dict[str, Any]:
        """The keyword arguments of :func:`grpo.algorithm.loss.loss_denominator`."""
        algorithm, longest = self.config.algorithm, self.config.rollout.max_completion_length
        return {"aggregation": algorithm.aggregation, "max_length": algorithm.normalize_constant or longest}

    @property
    def loss_options(self) -> dict[str, Any]:
        """The keyword arguments of :func:`grpo.algorithm.loss.policy_loss` that the configuration decides."""
        own = {"objective": self.own.objective} if self.own.objective else {}
        return self.config.algorithm.loss_options | self.averaging | own

    def sync_reference(self) -> None:
        """Move the reference towards the policy, by the share ``algorithm.ref_sync_alpha``."""
        if self.ref_scorer.model is self.policy.model:
            copy_to_reference_adapter(self.policy.model)
        else:
            sync_reference(self.ref_scorer.model, self.policy.model, self.config.algorithm.ref_sync_alpha)

    def evaluate(self, step: int, seconds: dict[str, float]) -> dict[str, float]:
        """``eval/...`` metrics of the current weights; empty without evaluation data."""
        if not self.eval_problems:
            return {}
        reporter = self.reporter
        # tokens_in_flight may be lower than configured, to fit in memory
        sampling = replace(eval_sampling(self.config), tokens_in_flight=self.sampling.tokens_in_flight)
        grader = Grader(self.config.eval, self.rewards, self.trainer_state)
        total = len(self.world.own_rows(self.eval_problems)) * (1 if sampling.is_greedy else 2)
        bar = reporter.bar("evaluation" if sampling.is_greedy else "evaluation, greedy and sampled", total, "problem")
        # Each evaluation has the seeds of step 0, so that metrics differ by the weights alone.
        options = dict(seed=self.config.seed, step=0, on_problems=bar.update)
        with self.world.timed("eval", seconds), engine_with_weights(self.engine, self.world), bar:
            evaluation = evaluate(self.engine, self.eval_problems, grader, self.world, sampling, **options)
        reporter.intervals(step, evaluation.intervals)
        if unscored := evaluation.num_unscored:
            reporter.print(f"warning: {unscored} completions of this evaluation could not be scored and count as wrong")
        return evaluation.metrics

    def close(self) -> None:
        for part in (self.engine, self.rewards, self.reporter, self.signals):
            part.close()
        self.lock.release()
