"""A run: its parts, which never change after the start, and its progress, which every checkpoint saves."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.algorithm.advantages import Scores
from grpo.algorithm.batch import Batch, Group, Problem, microbatch_rows, microbatches
from grpo.algorithm.corrections import entropy_threshold
from grpo.algorithm.logprobs import CompletionScorer
from grpo.checkpoint.resume import Lock
from grpo.checkpoint.saver import Progress, Saver
from grpo.config import Config
from grpo.data import Schedule
from grpo.distributed import World, give_back, is_sharded
from grpo.evaluation.collect import eval_sampling, evaluate
from grpo.evaluation.grading import Grader
from grpo.model import Policy, sync_reference
from grpo.model.lora import copy_to_reference_adapter
from grpo.rewards import RewardResult, RewardRunner
from grpo.rewards.scores import score_groups
from grpo.rewards.worker import TrainerState
from grpo.rollout import BuiltinEngine, Engine, SamplingParams, sampling_weights
from grpo.run.signals import Signals
from grpo.system import UserError
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
    """Log-probs of completions under the policy, with gradient; wrapped in DDP, or divided by FSDP, when there are several ranks."""
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

    @property
    def packed(self) -> bool:
        """True if scoring computes each prompt once per group instead of once per completion."""
        return self.bare_scorer.packed

    @property
    def may_capture(self) -> bool:
        """True if decode steps are captured in CUDA graphs, as far as the settings and the model's modules tell."""
        return isinstance(self.engine, BuiltinEngine) and self.engine.may_capture

    @property
    def sampling(self) -> SamplingParams:
        values = {field.name: getattr(self.config.rollout, field.name) for field in fields(SamplingParams)}
        chosen = self.progress.tokens_in_flight or self.config.rollout.tokens_in_flight
        return SamplingParams(**values | {"stop": tuple(values["stop"]), "tokens_in_flight": chosen})

    @property
    def tokens_per_microbatch(self) -> int:
        """Most tokens of one forward and backward pass: that of the configuration, or a smaller one that a dry run chose."""
        return self.progress.tokens_per_microbatch or self.config.optim.tokens_per_microbatch

    @property
    def is_sharded(self) -> bool:
        """True under FSDP: every forward and backward pass is then a collective, of which all ranks need the same number."""
        return is_sharded(self.bare_scorer)

    @contextlib.contextmanager
    def sampling_weights(self, seconds: dict[str, float] | None = None) -> Iterator[None]:
        """Inside the block the engine samples from the weights of its start; ``seconds``: copying or gathering them counts as rollout."""
        taken: dict[str, float] = {}
        timed = contextlib.nullcontext() if seconds is None else self.world.timed("weights", taken)
        with contextlib.ExitStack() as stack:
            with timed:
                stack.enter_context(sampling_weights(self.engine, self.world))
            if seconds is not None:
                seconds["rollout"] += taken["weights"]
            yield

    def microbatches(self, minibatch: Batch) -> Iterator[tuple[Batch, bool]]:
        """``(micro-batch, is_last)``, as many on each rank under FSDP: a rank with fewer first computes rows that no loss or metric counts."""
        for spare in self._spares(minibatch, self.packed):
            yield spare, False
        yield from microbatches(minibatch, self.tokens_per_microbatch, packed=self.packed)

    def _spares(self, batch: Batch, packed: bool) -> list[Batch]:
        """One micro-batch without effect for each that this rank has less than another; none unless every pass is a collective."""
        if not self.is_sharded:
            return []
        count = len(microbatch_rows(batch, self.tokens_per_microbatch, packed=packed))
        missing = int(self.world.max(torch.tensor(count))) - count
        return [_spare(batch)] * missing

    def logprobs(self, scorer: CompletionScorer, batch: Batch) -> torch.Tensor:
        """Log-probs of a whole batch without gradient, ``[B, T]`` fp32 nats, in passes of ``tokens_per_microbatch`` tokens."""
        return self.logprobs_and_entropies(scorer, batch)[0]

    @torch.no_grad()
    def logprobs_and_entropies(self, scorer: CompletionScorer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and the entropy of the distribution of each token, ``[B, T]`` each; 0 at the rows that are not computed."""
        logprobs_BT, entropies_BT = torch.zeros(2, *batch.completion_mask_BT.shape, device=self.world.device)
        parts = microbatch_rows(batch, self.tokens_per_microbatch, packed=scorer.packed)
        with self.policy.autocast(), self.reporter.bar("log-probs", sum(map(len, parts)), "row") as bar:
            for spare in self._spares(batch, scorer.packed):
                scorer(*spare.scorer_inputs)
            for rows in parts:
                scored = scorer(*batch.select(rows).scorer_inputs)
                for whole_BT, scored_bt in zip((logprobs_BT, entropies_BT), scored, strict=True):
                    whole_BT[rows.to(scored_bt.device), : scored_bt.shape[1]] = scored_bt
                bar.update(len(rows))
        give_back(scorer)
        return logprobs_BT, entropies_BT

    def top_entropy_mask(self, batch: Batch) -> torch.Tensor:
        """``[B, T]`` True at the share ``algorithm.top_entropy_quantile`` of the tokens to train on, over all ranks, with the most entropy."""
        _, entropies_BT = self.logprobs_and_entropies(self.bare_scorer, replace(batch, computed_B=None))
        gathered = self.world.gather_objects(entropies_BT[batch.loss_mask_BT].cpu())
        threshold = entropy_threshold(torch.cat(gathered), self.config.algorithm.top_entropy_quantile)
        return batch.loss_mask_BT & (entropies_BT >= threshold.to(entropies_BT.device))

    @property
    def trainer_state(self) -> TrainerState:
        """The position of the run, for rewards that ask for it."""
        step = self.progress.step
        return TrainerState(step, step / self.problems.steps_per_epoch, self.max_steps)

    def score(self, groups: Sequence[Group]) -> tuple[torch.Tensor, RewardResult]:
        """Every reward of every completion, ``[P, G, F]`` fp32 with NaN where a function gave None; and the failures.

        The completions keep what the rewards logged about them.
        """
        result = score_groups(self.rewards, groups, self.trainer_state)
        for row, completion in enumerate(completion for group in groups for completion in group.completions):
            completion.logged.update({column: values[row] for column, values in result.extra.items()})
        values = torch.tensor([[math.nan if v is None else v for v in row] for row in result.values])
        values_PGF = values.view(len(groups), -1, len(self.rewards.names))
        if self.config.algorithm.scale == "mean":
            check_not_negative(self.scores(values_PGF), self.rewards.names, step=self.progress.step + 1)
        return values_PGF, result

    def scores(self, values_PGF: torch.Tensor) -> Scores:
        """The values of all reward functions, with the weights of the configuration."""
        return Scores(values_PGF, self.rewards.weights, self.config.algorithm.multi_objective_aggregation)

    def sync_reference(self) -> None:
        """Move the reference towards the policy, by the share ``algorithm.ref_sync_alpha``."""
        if self.ref_scorer.model is self.policy.model:
            copy_to_reference_adapter(self.policy.model)
        else:
            sync_reference(self.ref_scorer.model, self.policy.model, self.config.algorithm.ref_sync_alpha)

    def evaluate(self, step: int) -> dict[str, float]:
        """``eval/...`` metrics of the current weights; empty without evaluation data."""
        if not self.eval_problems:
            return {}
        # tokens_in_flight may be one that a dry run chose
        sampling = replace(eval_sampling(self.config), tokens_in_flight=self.sampling.tokens_in_flight)
        started = time.perf_counter()
        total = len(self.world.own_rows(self.eval_problems)) * (1 if sampling.is_greedy else 2)
        with self.sampling_weights(), self.reporter.bar("evaluation", total, "problem") as bar:
            evaluation = evaluate(
                self.engine,
                self.eval_problems,
                Grader(self.config.eval, self.rewards, self.trainer_state),
                self.world,
                sampling,
                seed=self.config.seed,
                step=0,  # the same seeds in each evaluation, so that metrics differ by the weights alone
                on_problems=bar.update,
            )
        self.reporter.time_left.evaluation_s = time.perf_counter() - started
        self.reporter.intervals(step, evaluation.intervals)
        if unscored := evaluation.num_unscored:
            self.reporter.print(
                f"warning: {unscored} completions of this evaluation could not be scored and count as wrong"
            )
        return evaluation.metrics

    def close(self) -> None:
        self.engine.close()
        self.rewards.close()
        self.reporter.close()
        self.signals.close()
        self.lock.release()


def check_not_negative(scores: Scores, names: Sequence[str], *, step: int) -> None:
    """``UserError``, with the step and the value of each function, if the reward of a completion is negative (MaxRL)."""
    rewards_B = scores.rewards_PG.flatten().nan_to_num(0.0)
    if (rewards_B >= 0).all():
        return
    lowest = int(rewards_B.argmin())
    values_F = scores.values_PGF.flatten(end_dim=-2)[lowest].tolist()
    parts = [f"{n} {v:g} x {w:g}" for n, v, w in zip(names, values_F, scores.weights, strict=True)]
    raise UserError(
        f"step {step}: algorithm.scale=mean (MaxRL) divides by the mean reward of a group, so rewards must not be "
        f"negative, and a completion got {rewards_B[lowest]:g} ({', '.join(parts)}): change the rewards or their "
        "weights, or take algorithm.scale=group"
    )


def _spare(batch: Batch) -> Batch:
    """The shortest row of a batch, marked so that no loss and no metric counts it."""
    row = batch.select(batch.lengths_B.argmin()[None])
    nothing = torch.zeros_like(row.loss_mask_BT)
    uncounted = dict(
        advantages_B=torch.zeros_like(row.advantages_B), computed_B=torch.ones_like(row.group_B, dtype=bool)
    )
    uncounted["row_B"] = row.row_B[:0]  # of no place in the batch: its log-probs are not kept as old ones
    return replace(row, loss_mask_BT=nothing, **uncounted)
