"""Writes a run's state to disk: on schedule, on request, for the best evaluation, in the background, or after a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import platform
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from grpo.config import Config
from grpo.distributed import World
from grpo.model import write_merged
from grpo.run import checkpoint
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
    unwritten_line: dict[str, Any] | None = None
    """Metrics of the last step while they are not in ``metrics.jsonl`` yet, because the step's evaluation comes first."""
    tokens_per_microbatch: int | None = None
    """The value that a dry run chose because the default of ``optim.tokens_per_microbatch`` does not fit in memory; None: not chosen."""
    tokens_in_flight: int | None = None
    """The same for ``rollout.tokens_in_flight``."""
    mid_update: bool = False
    """True from the first change of the weights to the end of the step: the state in memory is between two steps. Never saved as True."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """The progress saved in a checkpoint's state; missing names keep their defaults."""
        return cls(**{f.name: state[f.name] for f in dataclasses.fields(cls) if f.name in state})

    def forget_chosen(self, config: Config) -> None:
        """Drop the chosen values of keys that the user has set."""
        for key, name in CHOSEN.items():
            section, _, leaf = key.partition(".")
            settings = getattr(config, section)
            if leaf in settings.model_fields_set and getattr(settings, leaf) is not None:
                setattr(self, name, None)

    def complete_step(self, line: dict[str, Any]) -> None:
        """Record that all updates of a step are done; its metrics are written later."""
        self.step, self.num_tokens = line["step"], line["num_tokens"]
        self.unwritten_line, self.mid_update = line, False


def versions() -> dict[str, str]:
    """The versions that the bits of a run depend on, beside its configuration."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def how_to_continue(config: Config) -> str:
    """The last words of a message about a checkpoint: the command that continues the run."""
    setting = " with checkpoint.resume=auto" if config.checkpoint.resume == "never" else ""
    return f"the same command{setting} continues from there"


@dataclass
class Saver:
    """Writes checkpoints of one run, always of a complete step: never while ``progress.mid_update`` is true."""

    config: Config
    world: World
    parts: dict[str, Any]
    """``model``, ``tokenizer``, ``optimizer``, ``schedule`` and ``reference``, the arguments of :func:`checkpoint.save_checkpoint`."""
    reporter: Reporter
    progress: Progress
    max_steps: int
    facts: dict[str, Any]
    """JSON-serialisable facts that a continued run is compared with (fingerprint of the data, digests of files, origin)."""
    saved_step: int = field(init=False)
    """The step of the newest save that was begun, or of the start; the same on all ranks."""
    written_step: int = field(init=False)
    """The step of the newest checkpoint on disk, or of the start; known to the main rank."""

    def __post_init__(self) -> None:
        self.saved_step = self.written_step = self.progress.step
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        """Held while a save begins or is written, which the thread of :meth:`rescue_while_busy` may do beside the main thread."""

    def save_if_due(self, line: dict[str, Any]) -> None:
        """Save at the last step, every ``save_steps`` steps, or if ``line`` has the best evaluation so far."""
        settings, step, best = self.config.checkpoint, self.progress.step, self.progress.best
        value = line.get(settings.keep_best)
        is_best = value is not None and math.isfinite(value) and (best is None or value > best["value"])
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
        with self.world.timed("save", {}), self.world.fail_together():
            if self.world.is_main:
                with self._lock:
                    self._raise_background_error()
                    self.reporter.sync()
                    arguments = self._arguments()
                    if self.config.checkpoint.background and step < self.max_steps:
                        arguments["tensors"] = self._copy_of_tensors()
                        self._thread = threading.Thread(target=self._write, args=(step, arguments), name="checkpoint")
                        self._thread.start()
                    else:
                        self._write(step, arguments)
                        self._raise_background_error()
        self.saved_step = step

    def save_newest(self) -> None:
        """At the end: write the newest complete step if the disk does not have it, also after a save in the background failed.

        Raises:
            OSError, OtherRankFailed: on all ranks, if it cannot be written.
        """
        with self.world.fail_together():
            if self.world.is_main:
                with self._lock:
                    if error := self._background_error():
                        self.reporter.print(f"warning: {error}; trying again")
                    self._write_newest()
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
        """After a failure, without the other ranks: save the newest complete step if no checkpoint has it; returns a note for the user."""
        step = self.progress.step
        if self.config.debug:
            return None
        if not self.world.is_main:
            lost = f"; otherwise the steps after {self.saved_step} are lost" if step > self.saved_step else ""
            return f"rank 0 saves step {step}, the last complete one, if it can{lost}" if lost else None
        with self._lock:
            self._background_error()  # waits for the thread; what it could not write is tried again below
            if self.progress.mid_update:
                return self._cannot_save(step)
            return self._note(step) if self._write_newest() else None

    def rescue_while_busy(self) -> str | None:
        """The same in another thread, while the main thread waits for a rank that has ended, or is slow to finish an update.

        Until an update changes the weights, they are those of the newest complete step. If that happens while they are copied, the copy
        is dropped. On CUDA they are copied in a stream of their own, since the main thread's may wait for the other rank.
        """
        if not self.world.is_main or self.config.debug:
            return None
        with self._lock:
            self._background_error()
            step, device = self.progress.step, self.world.device
            if self.progress.mid_update:
                return self._cannot_save(step)
            if step <= self.written_step:
                return None
            with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext():
                arguments = self._arguments() | {"tensors": self._copy_of_tensors()}
            if self.progress.mid_update or self.progress.step != step:
                return self._cannot_save(step)
            self._write(step, arguments)
            return self._note(step)

    def _cannot_save(self, step: int) -> str:
        """Why the weights are no longer, or not yet, those of a complete step, and what is lost."""
        lost = f"and the steps after it are lost: {how_to_continue(self.config)}"
        return (
            f"an update after step {step} has changed the weights: checkpoint-{self.written_step} is the newest, {lost}"
        )

    def _note(self, step: int) -> str:
        """A note for the user that this step is saved, or the error that prevented it."""
        error = self._background_error()
        return f"{error}" if error else f"saved checkpoint-{step}: {how_to_continue(self.config)}"

    def _copy_of_tensors(self) -> checkpoint.Tensors:
        live = (self.parts[name] for name in ("model", "optimizer", "schedule", "reference"))
        return checkpoint.Tensors.of(*live).on_host()

    def _write_newest(self) -> bool:
        """Write the newest complete step, unless the disk has it: then False."""
        step = self.progress.step
        if step <= self.written_step or self.config.debug:
            return False
        self._write(step, self._arguments())
        return True

    def _raise_background_error(self) -> None:
        if error := self._background_error():
            raise error

    def _background_error(self) -> Exception | None:
        """Wait for the thread; return its error, and clear the error."""
        if self._thread is not None:
            self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

    def _write(self, step: int, arguments: dict[str, Any]) -> None:
        try:
            checkpoint.save_checkpoint(self.config.output_dir, step, **arguments)
            self.written_step = step
        except Exception as error:  # maybe in a thread: the next vote raises it on all ranks
            self._error = self._explained(step, error)

    def _explained(self, step: int, error: Exception) -> Exception:
        if not isinstance(error, OSError):
            return error
        return OSError(f"checkpoint at step {step} could not be saved in {self.config.output_dir}: {error}")

    def _arguments(self) -> dict[str, Any]:
        state = dataclasses.asdict(self.progress)
        del state["mid_update"]
        state |= {"wandb_run_id": self.reporter.wandb_run_id, "world_size": self.world.size, "versions": versions()}
        state["threads_per_rank"] = torch.get_num_threads()
        state |= {**self.facts, "config": self.config.for_writing()}
        merge = functools.partial(write_merged, trust_remote_code=self.config.model.trust_remote_code)
        best_step = self.progress.best and self.progress.best["step"]
        return self.parts | {
            "keep": self.config.checkpoint.keep,
            "best_step": best_step,
            "state": state,
            "merge": merge if self.config.checkpoint.merge else None,
        }
