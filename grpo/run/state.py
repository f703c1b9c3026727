"""What the loop works with: the parts of a run, and what it asks of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from grpo.batch import Batch, Group, Problem, cut
from grpo.config import Config
from grpo.data import Schedule
from grpo.distributed import World
from grpo.evaluation import evaluate, judge_of
from grpo.logprobs import CompletionScorer
from grpo.model import Policy
from grpo.rewards import RewardResult, RewardRunner
from grpo.rewards.groups import score_groups
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.run.lock import Lock
from grpo.run.saver import Saver
from grpo.run.signals import Signals
from grpo.telemetry.metrics import Accumulator, Reporter


@dataclass
class Run:
    """What the loop works with."""

    config: Config
    world: World
    policy: Policy
    engine: BuiltinEngine
    """Samples with the policy."""
    scorer: nn.Module
    """Log-probs of the policy with gradient; DDP-wrapped when there are several ranks."""
    bare_scorer: CompletionScorer
    """The same, never wrapped: for passes without gradient."""
    ref_scorer: CompletionScorer | None
    """Of the frozen reference; None when ``beta`` is 0, and then no reference is in memory."""
    optimizer: torch.optim.Optimizer
    schedule: Any
    """Learning rates."""
    problems: Schedule
    eval_problems: list[Problem]
    rewards: RewardRunner
    reporter: Reporter
    start: int
    """Steps already done."""
    max_steps: int
    before: dict[str, float] | None = None
    """The evaluation before training."""
    num_tokens: int = 0
    """Prompt and completion tokens seen so far, over all ranks."""
    skipped_in_a_row: int = 0
    old_logprobs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Rows of this step's batch and the old log-probs of the loss for them, part by part."""
    signals: Signals = field(init=False)
    saver: Saver = field(init=False)
    lock: Lock = field(default_factory=Lock)
    """On ``output_dir``: no second run writes there."""

    @property
    def packed(self) -> bool:
        """Whether each prompt is computed once per group when scoring."""
        return self.bare_scorer.packed

    @torch.no_grad()
    def logprobs(self, scorer: CompletionScorer, batch: Batch) -> torch.Tensor:
        """Log-probs of a whole batch without gradient, ``[B, T]`` fp32, in passes of ``tokens_per_microbatch``."""
        logprobs_BT = torch.zeros(batch.completion_mask_BT.shape, device=self.world.device)
        with self.policy.autocast(), self.reporter.bar("log-probs", len(batch), "row") as bar:
            for rows in cut(batch, self.config.optim.tokens_per_microbatch, packed=scorer.packed):
                scored_bt, _ = scorer(*batch.rows(rows).to_score)
                logprobs_BT[rows.to(scored_bt.device), : scored_bt.shape[1]] = scored_bt
                bar.update(len(rows))
        return logprobs_BT

    @property
    def sampling(self) -> SamplingParams:
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        values = {name: value for name, value in self.config.rollout.model_dump().items() if name in names}
        return SamplingParams(**values | {"stop": tuple(self.config.rollout.stop)})

    def score(self, groups: Sequence[Group]) -> tuple[torch.Tensor, RewardResult]:
        """Every reward of every completion: ``[P, G, F]`` fp32, NaN where a function gave None; and what went wrong.

        Raises:
            RewardContractError: if a function returned something that is no reward.
        """
        result = score_groups(self.rewards, groups)
        values = torch.tensor([[math.nan if v is None else v for v in row] for row in result.values])
        return values.view(len(groups), -1, len(self.rewards.names)), result

    def evaluate(self, step: int) -> dict[str, float]:
        """``eval/...`` metrics of the current weights; empty without evaluation data."""
        if not self.eval_problems:
            return {}
        e = self.config.eval
        with self.reporter.bar(
            "evaluation", len(self.eval_problems[:: self.world.size]) * (1 + (e.num_samples > 1)), "problem"
        ) as bar:
            evaluation = evaluate(
                self.engine,
                self.eval_problems,
                judge_of(self.config, self.rewards),
                self.world,
                num_samples=e.num_samples,
                temperature=e.temperature,
                max_completion_length=self.config.rollout.max_completion_length,
                stop=tuple(self.config.rollout.stop),
                tokens_in_flight=self.config.rollout.tokens_in_flight,
                seed=self.config.seed,
                step=0,  # the same samples' addresses each time: curves differ by the weights alone
                on_problems=bar.update,
            )
        if evaluation.num_unscored:
            self.reporter.say(
                f"warning: {evaluation.num_unscored} completions of this evaluation could not be scored and count as wrong"
            )
        return evaluation.metrics

    def close(self) -> None:
        self.rewards.close()
        self.reporter.close()
        self.signals.close()
        self.lock.release()


def check_rewards(
    run: Run, result: RewardResult | None, error: BaseException | None, metrics: Accumulator, *, is_whole_step: bool
) -> None:
    """Count failures; raise on all ranks if a reward broke its contract on one, or failed on every completion on all.

    Args:
        result: what this rank's rewards gave; None after ``error``, or if it had nothing to score.
        is_whole_step: whether these are all completions of the step, not substitutes for a few: one bad problem is no bad reward.
    """
    run.world.raise_together(error)
    names = run.rewards.names
    failures, rows = (result.failures, len(result.values)) if result else ([0] * len(names), 0)
    for name, count in zip(names, failures, strict=True):
        metrics.total(f"rewards/{name}/errors", count)
    *failed, rows = run.world.sum(torch.tensor([*failures, rows])).tolist()
    for name, count in zip(names, failed, strict=True):
        if is_whole_step and rows and count == rows:
            trace = result.first_traceback.get(name) if result else None
            raise ValueError(
                f"reward {name!r} failed on all {rows} completions of this step"
                + (f":\n{trace}" if trace else " (timeout)")
            )
