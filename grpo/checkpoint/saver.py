"""Writes a run's state to disk: on schedule, on request, or after a failure."""

from __future__ import annotations

import dataclasses
import math
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from grpo.checkpoint import format as checkpoint
from grpo.config import Config, EvalConfig
from grpo.distributed import World
from grpo.telemetry.reporter import Reporter

CHOSEN = {"optim.tokens_per_microbatch": "tokens_per_microbatch", "rollout.tokens_in_flight": "tokens_in_flight"}
"""Settings whose defaults a dry run may lower, and the field of :class:`Progress` that holds the chosen value."""


@dataclass
class Progress:
    """The progress of a run: all that a checkpoint must save beside weights, optimizer and reference."""

    step: int = 0
    """Steps that are complete."""
    num_tokens: int = 0
    """Prompt and completion tokens seen so far, over all ranks."""
    skipped_in_a_row: int = 0
    """Optimizer updates left out in a row because a gradient was not finite."""
    before: dict[str, float] | None = None
    """Metrics of the evaluation before training."""
    best: dict[str, Any] | None = None
    """``{"step", "value"}`` of the best evaluation by ``checkpoint.keep_best``."""
    line: dict[str, Any] | None = None
    """Metrics of the newest step, which ``metrics.jsonl`` may lack: its disk may have been full."""
    evaluated_step: int | None = None
    """The step of the newest complete evaluation."""
    tokens_per_microbatch: int | None = None
    """A dry run's choice where the default of ``optim.tokens_per_microbatch`` does not fit in memory; else None."""
    tokens_in_flight: int | None = None
    """The same for ``rollout.tokens_in_flight``."""
    mid_update: bool = False
    """True from the first change of the weights to the end of the step, between two states. Not saved."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """The progress saved in a checkpoint's state; missing names keep their defaults."""
        # The name of the line in checkpoints of an earlier version.
        state = {"line": state.get("unwritten_line"), **state}
        return cls(**{f.name: state[f.name] for f in dataclasses.fields(cls) if f.name in state})

    def choose(self, config: Config, key: str, value: int) -> bool:
        """Use a value in place of the default of a key of ``CHOSEN``; False if the user has set the key."""
        setattr(self, CHOSEN[key], value)
        self.forget_chosen(config)
        return getattr(self, CHOSEN[key]) == value

    def forget_chosen(self, config: Config) -> None:
        """Drop the chosen values of keys that the user has set."""
        for key, name in CHOSEN.items():
            section, _, leaf = key.partition(".")
            settings = getattr(config, section)
            if leaf in settings.model_fields_set and getattr(settings, leaf) is not None:
                setattr(self, name, None)

    def complete_step(self, line: dict[str, Any]) -> None:
        """Record that all updates of a step are done."""
        self.line = line
        self.step = line["step"]
        self.num_tokens = line["num_tokens"]
        self.mid_update = False

    def evaluation_is_due(self, settings: EvalConfig, max_steps: int) -> bool:
        """True if the newest weights are to be evaluated, and have not been."""
        if self.evaluated_step == self.step or self.step > max_steps:
            return False
        if self.step == 0:
            return settings.before_training
        is_regular = settings.every is not None and self.step % settings.every == 0
        return is_regular or self.step == max_steps


def bits_depend_on(world: World) -> dict[str, Any]:
    """The facts besides the configuration on which the last bits of a run depend."""
    return {
        "world_size": world.size,
        "runtime.threads_per_rank": torch.get_num_threads() if world.device.type == "cpu" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def how_to_continue(config: Config) -> str:
    """The last words of a message about a checkpoint: the command (or call of ``train``) that continues the run."""
    setting = " with checkpoint.resume=auto" if config.checkpoint.resume == "never" else ""
    return f"the same command or call{setting} continues from there"


@dataclass
class Saver:
    """Writes checkpoints of one run, always of a complete step: never while ``progress.mid_update`` is true.

    The main rank has the whole state and writes alone, maybe in a thread. Under FSDP all ranks write together.
    """

    config: Config
    world: World
    trained: checkpoint.Trained
    reporter: Reporter
    progress: Progress
    max_steps: int
    facts: dict[str, Any]
    """Facts for JSON that a continued run is compared with: fingerprint of the data, digests of files, origin."""
    saved_step: int = field(init=False)
    """The step of the newest save that was begun, or of the start; the same on all ranks."""
    written_step: int = field(init=False)
    """The step of the newest checkpoint on disk, or of the start; known to the ranks that write."""

    def __post_init__(self) -> None:
        self.saved_step = self.written_step = self.progress.step
        self.is_collective = self.trained.is_sharded

    def save_if_due(self, evaluation: dict[str, float]) -> None:
        """Save at the last step, every ``save_steps`` steps, or after the best evaluation so far."""
        settings = self.config.checkpoint
        step = self.progress.step
        best = self.progress.best
        value = evaluation.get(settings.keep_best, math.nan)
        is_best = math.isfinite(value) and (best is None or value > best["value"])
        if is_best:
            self.progress.best = {"step": step, "value": value}
        is_regular = settings.save_steps is not None and step % settings.save_steps == 0
        if is_best or is_regular or step == self.max_steps:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the newest complete step; it raises on all ranks if it fails on one."""
        if self.config.debug:
            return
        with self.world.timed("save", {}):
            with self.world.fail_together():
                self.reporter.sync()
            self._on_writing_ranks(lambda: self._write(self.progress.step))
        self.saved_step = self.progress.step

    def save_newest(self) -> None:
        """At the end: write the newest complete step if the disk lacks it."""
        self._on_writing_ranks(self._write_newest)

    def try_saving(self) -> None:
        """Save before the first step and delete it: what cannot be saved, or a full disk, shows now."""
        trial = Path(self.config.output_dir) / ".trial-save"
        try:
            self._on_writing_ranks(lambda: checkpoint.save_checkpoint(trial, 0, **self._arguments()))
        finally:
            if self.world.is_main:
                shutil.rmtree(trial, ignore_errors=True)

    def rescue(self) -> str | None:
        """After a failure, on the main rank without the others: save the newest complete step; a note on it."""
        if self.config.debug or not self.world.is_main:
            return None
        step, how = self.progress.step, how_to_continue(self.config)
        if step > self.written_step and (self.is_collective or self.progress.mid_update):
            reason = "under FSDP that needs all ranks" if self.is_collective else "an update has changed the weights"
            newest = f"checkpoint-{self.written_step} is the newest: {how}"
            return f"step {step} cannot be saved ({reason}); {newest}"
        return f"saved checkpoint-{step}: {how}" if self._write_newest() else None

    def _on_writing_ranks(self, write: Callable[[], Any]) -> None:
        """Call it on all ranks together under FSDP, else on the main rank, whose error all raise."""
        if self.is_collective:
            write()
            return
        with self.world.fail_together():
            if self.world.is_main:
                write()

    def _write_newest(self) -> bool:
        """Write the newest complete step, unless the disk has it: then False."""
        step = self.progress.step
        if step <= self.written_step or self.config.debug:
            return False
        self._write(step)
        return True

    def _write(self, step: int) -> None:
        checkpoint.save_checkpoint(self.config.output_dir, step, **self._arguments())
        self.written_step = step

    def _arguments(self) -> dict[str, Any]:
        state = dataclasses.asdict(self.progress) | self.facts
        state |= {"wandb_run_id": self.reporter.wandb_run_id, "bits_depend_on": bits_depend_on(self.world)}
        state["config"] = self.config.for_saving()
        del state["mid_update"]
        return dict(
            trained=self.trained,
            world=self.world if self.is_collective else checkpoint.ALONE,
            state=state,
            keep=self.config.checkpoint.keep,
            best_step=self.progress.best and self.progress.best["step"],
        )
