"""When and how the state of a run goes to disk: due, asked for, the best so far, in the background, or on the way out."""

from __future__ import annotations

import math
import platform
import threading
from typing import Any

import torch
import transformers

from grpo.config import Config
from grpo.run import checkpoint


def versions() -> dict[str, str]:
    """What the bits of a run depend on beside its configuration."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def how_to_continue(config: Config) -> str:
    """For a message about a checkpoint."""
    if config.checkpoint.resume == "never":
        return "the same command with checkpoint.resume=auto continues from there"
    return "the same command continues from there"


class Saver:
    """Saves one run (a ``grpo.run.state.Run``).

    The state in memory is that of a step boundary nearly always: rollouts, rewards and evaluations do not change it. ``whole_step``
    says which boundary, and is None from the first change of an update to the end of its step.
    """

    def __init__(self, run: Any, facts: dict[str, Any], restored: dict[str, Any]):
        self.run, self.facts = run, facts
        self.whole_step: int | None = run.start
        self.saved = run.start
        """The step of the newest checkpoint, or of the start."""
        self.unreported: dict[str, Any] | None = restored.get("unreported")
        """The line of a step that is done but not in ``metrics.jsonl`` yet: an evaluation comes first."""
        self.best: dict[str, Any] | None = restored.get("best")
        """``{"step", "value"}`` of the best evaluation by ``checkpoint.keep_best``."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def step_done(self, step: int, line: dict[str, Any]) -> None:
        self.whole_step, self.unreported = step, line

    def after(self, step: int, line: dict[str, Any]) -> None:
        """Save if it is time to, or if ``line`` has the best evaluation so far."""
        settings = self.run.config.checkpoint
        metric, is_best = settings.keep_best, False
        if metric in line and math.isfinite(line[metric]):
            is_best = self.best is None or line[metric] > self.best["value"]
            if is_best:
                self.best = {"step": step, "value": line[metric]}
        if step == self.run.max_steps or is_best or (settings.save_steps and step % settings.save_steps == 0):
            self.save(step)

    def save(self, step: int) -> None:
        """Checkpoint the state after ``step`` steps: the main rank writes, or copies and lets a thread write.

        Raises:
            OSError, RanksDisagree: on all ranks, if this save or the one before it failed.
        """
        if self.run.config.debug:
            return
        error = self._finished()
        if self.run.world.is_main and error is None:
            self.run.reporter.sync()
            if self.run.config.checkpoint.background and step < self.run.max_steps:
                arguments = self._arguments()
                live = (arguments[name] for name in ("model", "optimizer", "schedule", "reference"))
                arguments["tensors"] = checkpoint.Tensors.of(*live).on_host()
                self._thread = threading.Thread(target=self._write, args=(step, arguments), name="checkpoint")
                self._thread.start()
            else:
                self._write(step, self._arguments())
                error = self._finished()
        self.run.world.raise_together(error)
        self.saved = step

    def finish(self) -> None:
        """Wait for a save in the background; all ranks fail together if it failed."""
        self.run.world.raise_together(self._finished())

    def rehearse(self) -> None:
        """A save before the first step: a model that cannot be saved, or a full disk, must not show at the end."""
        error: Exception | None = None
        if self.run.world.is_main:
            try:
                checkpoint.rehearse_save(self.run.config.output_dir, **self._arguments())
            except OSError as caught:
                error = self._explained(0, caught)
        self.run.world.raise_together(error)

    def rescue(self) -> str | None:
        """After a failure, without the other ranks: save the last whole state if it is newer than the newest checkpoint.

        Returns:
            What to say about it; None if there was nothing to do.
        """
        run = self.run
        if not run.world.is_main or run.config.debug:
            return None
        before = self._finished()
        if self.whole_step is None:
            return f"the weights are in the middle of step {self.saved + 1} or later: checkpoint-{self.saved} is the newest"
        if self.whole_step <= self.saved and before is None:
            return None
        self._write(self.whole_step, self._arguments())
        error = self._finished()
        return f"{error}" if error else f"saved checkpoint-{self.whole_step}: {how_to_continue(run.config)}"

    def _finished(self) -> Exception | None:
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

    def _write(self, step: int, arguments: dict[str, Any]) -> None:
        try:
            checkpoint.save_checkpoint(self.run.config.output_dir, step, **arguments)
        except Exception as caught:  # perhaps in a thread: handed to all ranks by the next vote
            self._error = self._explained(step, caught)

    def _explained(self, step: int, error: Exception) -> Exception:
        if not isinstance(error, OSError):
            return error
        return OSError(f"checkpoint at step {step} could not be saved in {self.run.config.output_dir}: {error}")

    def _arguments(self) -> dict[str, Any]:
        run = self.run
        moves = run.ref_scorer is not None and run.config.algorithm.ref_sync_steps
        return dict(
            model=run.policy.model,
            tokenizer=run.policy.tokenizer,
            optimizer=run.optimizer,
            schedule=run.schedule,
            reference=run.ref_scorer.model if moves else None,
            keep=run.config.checkpoint.keep,
            best_step=self.best and self.best["step"],
            state={
                "num_tokens": run.num_tokens,
                "skipped_in_a_row": run.skipped_in_a_row,
                "before": run.before,
                "unreported": self.unreported,
                "best": self.best,
                "wandb_run_id": run.reporter.wandb_run_id,
                "world_size": run.world.size,
                "versions": versions(),
                **self.facts,
                "config": run.config.model_dump(mode="json"),
            },
        )
