"""Writes a run's state to disk: on schedule, on request, or after a failure."""

import dataclasses
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.checkpoint import format as checkpoint
from grpo.config import Config
from grpo.distributed import World
from grpo.telemetry.reporter import Reporter


@dataclass
class Progress:
    """The progress of a run: all that a checkpoint must save beside weights, optimizer and
    reference."""

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
    """A dry run's choice where the default of ``optim.tokens_per_microbatch`` does not fit in
    memory; else None."""
    tokens_in_flight: int | None = None
    """The same for ``rollout.tokens_in_flight``."""
    mid_update = False
    """True from the first change of the weights to the end of the step, between two states. Not
    saved."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """The progress saved in a checkpoint's state; that of a new run from an empty state."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: state[name] for name in names if state})

    def complete_step(self, line: dict[str, Any]) -> None:
        """Record that all updates of a step are done."""
        self.line = line
        self.step = line["step"]
        self.num_tokens = line["num_tokens"]
        self.mid_update = False


def how_to_continue(config: Config) -> str:
    """The last words of a message about a checkpoint: the command (or call of ``train``) that
    continues the run."""
    setting = " with checkpoint.resume=auto" if config.checkpoint.resume == "never" else ""
    return f"the same command or call{setting} continues from there"


@dataclass
class Saver:
    """Writes checkpoints of one run, always of a complete step: never while ``progress.mid_update``
    is true.

    The main rank has the whole state and writes alone, maybe in a thread. Under FSDP all ranks
    write together."""

    config: Config
    world: World
    trained: checkpoint.TrainedTensors
    reporter: Reporter
    progress: Progress
    max_steps: int
    facts: dict[str, Any]
    """Facts for JSON that a continued run is compared with: digests of files, origin."""

    def __post_init__(self) -> None:
        self.saved_step = self.progress.step
        """The step of the newest checkpoint, or of the start."""
        self.is_collective = (
            self.config.runtime.parallel == "fsdp" and not self.world.is_single_process
        )

    def save_if_due(self, evaluation: dict[str, float]) -> None:
        """Save at the last step, every ``save_steps`` steps, or after the best evaluation so
        far."""
        settings = self.config.checkpoint
        step = self.progress.step
        best = self.progress.best
        value = evaluation.get(settings.keep_best, math.nan)
        is_best = value > (best["value"] if best else -math.inf)
        if is_best:
            self.progress.best = {"step": step, "value": value}
        is_regular = step % (settings.save_steps or self.max_steps) == 0
        if is_best or is_regular or step == self.max_steps:
            self.save()

    def save(self, folder: Path | None = None) -> None:
        """Write a checkpoint of the newest complete step; it raises on all ranks if it fails on
        one.

        Args:
            folder: default ``output_dir``.
        """
        if self.config.debug:
            return
        with self.world.timed("save", {}):
            if self.is_collective:
                self._write(folder)
            else:
                with self.world.fail_together():
                    if self.world.is_main:
                        self._write(folder)
        self.saved_step = self.progress.step

    def save_newest(self) -> None:
        """Write the newest complete step if the disk lacks it."""
        if self.progress.step > self.saved_step:
            self.save()

    def try_saving(self) -> None:
        """Save before the first step and delete it: what cannot be saved, or a full disk, shows
        now."""
        trial = Path(self.config.output_dir, ".partial-checkpoint-trial")
        try:
            self.save(trial)
        finally:
            if self.world.is_main:
                shutil.rmtree(trial, ignore_errors=True)

    def rescue(self) -> str | None:
        """After a failure, on the main rank without the others: save the newest complete step; a
        note on it."""
        step = self.progress.step
        if self.config.debug or not self.world.is_main or step == self.saved_step:
            return None
        how = how_to_continue(self.config)
        if self.is_collective or self.progress.mid_update:
            return f"step {step} cannot be saved by one rank or amid an update; checkpoint-{self.saved_step}: {how}"
        self._write(None)
        return f"saved checkpoint-{step}: {how}"

    def _write(self, folder: Path | None) -> None:
        progress = self.progress
        state = dataclasses.asdict(progress) | self.facts
        state["wandb_run_id"] = self.reporter.wandb_run_id
        state["config"] = self.config.for_saving()
        checkpoint.save_checkpoint(
            folder or self.config.output_dir,
            progress.step,
            trained=self.trained,
            world=self.world if self.is_collective else checkpoint.SINGLE_PROCESS,
            state=state,
            keep=self.config.checkpoint.keep,
            best_step=progress.best and progress.best["step"],
        )
