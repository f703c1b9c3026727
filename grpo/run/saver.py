"""When a run's state is written to disk: on schedule, on request, for the best evaluation, in the background, or after a failure."""

from __future__ import annotations

import dataclasses
import math
import platform
import threading
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from grpo.config import Config
from grpo.distributed import World
from grpo.model import Policy
from grpo.run import checkpoint
from grpo.run.progress import Progress
from grpo.telemetry.reporter import Reporter


def versions() -> dict[str, str]:
    """The versions that the bits of a run depend on, beside its configuration."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def how_to_continue(config: Config) -> str:
    """The end of a message about a checkpoint: the command that continues from it."""
    if config.checkpoint.resume == "never":
        return "the same command with checkpoint.resume=auto continues from there"
    return "the same command continues from there"


class Saver:
    """Writes checkpoints of one run.

    The state in memory is that of a step boundary nearly always: rollouts, rewards and evaluations do not change it. Only between the
    first weight change of a step and the end of that step (``progress.mid_update``) it must not be saved.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        *,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        lr_schedule: LRScheduler,
        reference: nn.Module | None,
        reporter: Reporter,
        progress: Progress,
        max_steps: int,
        facts: dict[str, Any],
    ):
        """
        Args:
            reference: only if it changes during training (``ref_sync_steps``); otherwise it is the starting model.
            facts: JSON-serialisable facts that a continued run is compared with (fingerprint of the data, origin).
        """
        self.config, self.world, self.policy, self.optimizer = config, world, policy, optimizer
        self.lr_schedule, self.reference, self.reporter = lr_schedule, reference, reporter
        self.progress, self.max_steps, self.facts = progress, max_steps, facts
        self.saved_step = progress.step
        """The step of the newest checkpoint, or of the start."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save_if_due(self, line: dict[str, Any]) -> None:
        """Save at the last step, every ``save_steps`` steps, or if ``line`` has the best evaluation so far."""
        settings, step = self.config.checkpoint, self.progress.step
        value, is_best = line.get(settings.keep_best), False
        if value is not None and math.isfinite(value):
            is_best = self.progress.best is None or value > self.progress.best["value"]
            if is_best:
                self.progress.best = {"step": step, "value": value}
        if step == self.max_steps or is_best or (settings.save_steps and step % settings.save_steps == 0):
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the newest complete step: the main rank writes, or copies the state and lets a thread write.

        Raises:
            OSError, OtherRankFailed: on all ranks, if this save or the one before it failed.
        """
        if self.config.debug:
            return
        step = self.progress.step
        with self.world.fail_together():
            self._raise_background_error()
            if self.world.is_main:
                self.reporter.sync()
                arguments = self._arguments()
                if self.config.checkpoint.background and step < self.max_steps:
                    live = (arguments[name] for name in ("model", "optimizer", "schedule", "reference"))
                    arguments["tensors"] = checkpoint.Tensors.of(*live).on_host()
                    self._thread = threading.Thread(target=self._write, args=(step, arguments), name="checkpoint")
                    self._thread.start()
                else:
                    self._write(step, arguments)
                    self._raise_background_error()
        self.saved_step = step

    def finish(self) -> None:
        """Wait for a save in the background; if it failed, all ranks raise its error."""
        with self.world.fail_together():
            self._raise_background_error()

    def dry_run(self) -> None:
        """Save once before the first step and delete it, so that a model that cannot be saved or a full disk shows now, not at the end."""
        with self.world.fail_together():
            if self.world.is_main:
                try:
                    checkpoint.dry_run_save(self.config.output_dir, **self._arguments())
                except OSError as error:
                    raise self._explained(0, error) from error

    def rescue(self) -> str | None:
        """After a failure, without the other ranks: save the newest complete step if no checkpoint has it.

        Returns:
            A note for the user; None if there was nothing to do.
        """
        if not self.world.is_main or self.config.debug:
            return None
        error_before = self._background_error()
        if self.progress.mid_update:
            return f"the failure came in the middle of an update, after step {self.progress.step}: checkpoint-{self.saved_step} is the newest"
        if self.progress.step <= self.saved_step and error_before is None:
            return None
        self._write(self.progress.step, self._arguments())
        error = self._background_error()
        return f"{error}" if error else f"saved checkpoint-{self.progress.step}: {how_to_continue(self.config)}"

    def _raise_background_error(self) -> None:
        error = self._background_error()
        if error is not None:
            raise error

    def _background_error(self) -> Exception | None:
        """Wait for the thread; its error, which is then forgotten."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

    def _write(self, step: int, arguments: dict[str, Any]) -> None:
        try:
            checkpoint.save_checkpoint(self.config.output_dir, step, **arguments)
        except Exception as error:  # maybe in a thread: the next vote raises it on all ranks
            self._error = self._explained(step, error)

    def _explained(self, step: int, error: Exception) -> Exception:
        if not isinstance(error, OSError):
            return error
        return OSError(f"checkpoint at step {step} could not be saved in {self.config.output_dir}: {error}")

    def _arguments(self) -> dict[str, Any]:
        saved = dataclasses.asdict(self.progress)
        del saved["mid_update"]
        return dict(
            model=self.policy.model,
            tokenizer=self.policy.tokenizer,
            optimizer=self.optimizer,
            schedule=self.lr_schedule,
            reference=self.reference,
            keep=self.config.checkpoint.keep,
            best_step=self.progress.best and self.progress.best["step"],
            state={
                **saved,
                "wandb_run_id": self.reporter.wandb_run_id,
                "world_size": self.world.size,
                "versions": versions(),
                **self.facts,
                "config": self.config.model_dump(mode="json"),
            },
        )
