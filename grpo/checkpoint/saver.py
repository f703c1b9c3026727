"""Write the state of a run to disk: on schedule, on request, or after a failure."""

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.checkpoint import format as checkpoint
from grpo.config import Config
from grpo.distributed import World
from grpo.telemetry.reporter import Reporter


@dataclass
class Progress:
    """Progress of a run: the values that a checkpoint saves in addition to the tensors. The fields
    have the same names in ``trainer/state.json``."""

    step: int = 0
    """Number of complete steps."""
    num_tokens: int = 0
    """Prompt and completion tokens of all steps, summed over ranks."""
    skipped_in_a_row: int = 0
    """Number of consecutive updates, up to the newest, that were skipped because a gradient was not
    finite."""
    before: dict[str, float] | None = None
    """Metrics of the evaluation before training; None without this evaluation."""
    best: dict[str, Any] | None = None
    """``{"step", "value"}`` of the evaluation with the highest value of the metric
    ``checkpoint.keep_best``."""
    line: dict[str, Any] | None = None
    """Metrics of the newest step. ``metrics.jsonl`` may lack these metrics, if the disk was
    full."""
    evaluated_step: int | None = None
    """Step of the newest complete evaluation."""
    tokens_per_microbatch: int | None = None
    """Reduced limit that the dry run chose because the default of ``optim.tokens_per_microbatch``
    does not fit in memory; None if the limit was not reduced."""
    tokens_in_flight: int | None = None
    """Reduced limit that the dry run chose because the default of ``rollout.tokens_in_flight`` does
    not fit in memory; None if the limit was not reduced."""
    loop_state: dict[str, Any] = field(default_factory=dict)
    """State of a training loop of the user, which changes it after the updates of a step, and on
    all ranks alike. Its values are those that JSON has."""
    # Without an annotation, `mid_update` is no field of the dataclass, so it is not saved.
    mid_update = False
    """True from the first update of the weights in a step until the step is complete. In between,
    the weights belong to no complete step, so they must not be saved."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Progress":
        """Return the progress in a checkpoint's state. For an empty state, return the progress of a
        new run."""
        # The state holds facts of the run as well, such as its configuration, and that of an
        # earlier version may lack fields.
        names = vars(cls()).keys() & state.keys()
        return cls(**{name: state[name] for name in names})

    def complete_step(self, line: dict[str, Any], world: World) -> None:
        """Record that all updates of a step are done.

        Raises:
            ValueError: if the state of the user's loop differs between ranks.
            TypeError: if the state has a value that JSON lacks.
        """
        self.line = line
        self.step = line["step"]
        self.num_tokens = line["num_tokens"]
        # What a checkpoint would give back: an error shows now, and a number as a key is text from
        # here on, also in a run that is never stopped.
        state = json.dumps(self.loop_state)
        world.check_same({"progress.loop_state": state})
        self.loop_state = json.loads(state)
        self.mid_update = False


def how_to_continue(config: Config) -> str:
    """Return the part of a message that says how the user continues the run from a checkpoint."""
    if config.debug:
        return "--debug saves no checkpoint"
    # The same command with `never` would start anew.
    setting = " with checkpoint.resume=auto" if config.checkpoint.resume == "never" else ""
    return f"the same command or call{setting} continues from there"


@dataclass
class Saver:
    """Writer of the checkpoints of a run. A checkpoint holds the state after a complete step, never
    the middle of an update.

    Under DDP the main rank has the full state and writes alone. Under FSDP all ranks write
    together.
    """

    config: Config
    world: World
    trained: checkpoint.TrainedTensors
    reporter: Reporter
    progress: Progress
    max_steps: int
    facts: dict[str, Any]
    """Facts that a continued run is compared with (``StartPoint.facts``)."""

    def __post_init__(self) -> None:
        self.saved_step = self.progress.step
        """Step of the newest checkpoint; until the first save, the step at which this process
        started."""
        # Under FSDP saving is a collective, which no rank can do alone after a failure.
        self.is_collective = (
            self.config.runtime.parallel == "fsdp" and not self.world.is_single_process
        )

    def save_if_due(self, evaluation: dict[str, float]) -> None:
        """Save at the last step, every ``save_steps`` steps, and after the best evaluation so far.

        Args:
            evaluation: metrics of the evaluation at this step; empty if this step had no
                evaluation.
        """
        settings = self.config.checkpoint
        progress = self.progress
        step = progress.step
        best = progress.best
        # NaN if the evaluation lacks this metric. Comparisons with NaN are False, so the step is
        # not the best.
        value = evaluation.get(settings.keep_best, math.nan)
        is_best = value > (best["value"] if best else -math.inf)
        if is_best:
            progress.best = {"step": step, "value": value}
        is_regular = step % (settings.save_steps or self.max_steps) == 0
        if is_best or is_regular or step == self.max_steps:
            self.save()

    def save(self, folder: Path | None = None) -> None:
        """Write a checkpoint of the newest complete step. All ranks call this method, and an error
        on one rank is raised on all ranks.

        Args:
            folder: folder in which the checkpoint is written. Default: ``output_dir``.
        """
        # A debug run only shows whether everything works. It leaves no checkpoint to continue from.
        if self.config.debug:
            return
        with self.world.timed("save", {}):
            if self.is_collective:
                # save_checkpoint() is a collective here, and collects errors from all ranks itself.
                # fail_together() must not contain a collective.
                self._write(folder)
            else:
                with self.world.fail_together():
                    if self.world.is_main:
                        self._write(folder)
        self.saved_step = self.progress.step

    def save_newest(self) -> None:
        """Write a checkpoint of the newest complete step, unless this step is on disk already."""
        if self.progress.step > self.saved_step:
            self.save()

    def try_saving(self) -> None:
        """Save a checkpoint before the first step, and delete it. So a model that cannot be saved,
        or a full disk, shows before hours of training."""
        trial = Path(self.config.output_dir, ".partial-checkpoint-trial")
        try:
            self.save(trial)
        finally:
            if self.world.is_main:
                shutil.rmtree(trial, ignore_errors=True)

    def rescue(self) -> str | None:
        """Save a checkpoint of the newest complete step after a failure, and return a message on it
        for the user. Return None if there is nothing to save.

        Only the main rank saves. It does not wait for the other ranks, which may hang or have
        ended.
        """
        step = self.progress.step
        if self.config.debug or not self.world.is_main or step == self.saved_step:
            return None
        how = f"{how_to_continue(self.config)}; changed files need checkpoint.accept_changes=true"
        if self.is_collective or self.progress.mid_update:
            return (
                f"step {step} cannot be saved by one rank or amid an update; "
                f"the newest that is saved is step {self.saved_step}: {how}"
            )
        self._write(None)
        return f"saved checkpoint-{step}: {how}"

    def _write(self, folder: Path | None) -> None:
        progress = self.progress
        best_step = progress.best["step"] if progress.best else None
        state = dataclasses.asdict(progress) | self.facts
        state["wandb_run_id"] = self.reporter.wandb_run_id
        state["config"] = self.config.values_to_save()
        # Under DDP the other ranks do not save, so save_checkpoint() must not wait for their votes.
        checkpoint.save_checkpoint(
            folder or self.config.output_dir,
            progress.step,
            trained=self.trained,
            world=self.world if self.is_collective else checkpoint.SINGLE_PROCESS,
            state=state,
            keep=self.config.checkpoint.keep,
            best_step=best_step,
        )
