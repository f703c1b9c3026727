"""Everything that a run shows or writes about its steps: console, progress bars, metrics.jsonl, hints, completions/ and dashboards."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from grpo.algorithm.choices import equal_rewards_have_gradient
from grpo.config import Config
from grpo.system import printable
from grpo.telemetry.console import TimeLeft, console_line, evaluation_line, progress_values
from grpo.telemetry.dashboard import Dashboard
from grpo.telemetry.hints import Hints
from grpo.telemetry.metrics_file import MetricsFile
from grpo.telemetry.samples import write_samples
from grpo.telemetry.tensorboard_logger import TensorBoardLogger
from grpo.telemetry.terminal import stderr_above_bars
from grpo.telemetry.wandb_logger import WandbLogger


class Reporter:
    """Works on the main rank; on the other ranks its methods do nothing.

    Args:
        first_step: steps that are already done; 0 for a new run.
        rewrite_first_step: this run writes the line of ``first_step``, because the interrupted run had not finished its evaluation.
        wandb_run_id: wandb's id of the interrupted run, if it had one.
        environment: facts about this start (see ``grpo.telemetry.environment``).
    """

    def __init__(
        self, config: Config, *, is_main: bool, first_step: int, max_steps: int, rewrite_first_step: bool = False,
        wandb_run_id: str | None = None, environment: dict[str, Any] | None = None,
    ):  # fmt: skip
        self.is_main, self.max_steps, self._every = is_main, max_steps, config.logging.every
        self.wandb_run_id = wandb_run_id
        self.time_left = TimeLeft(max_steps, config.eval.every)
        self._dashboards: list[Dashboard] = []
        self._redirected_stderr = contextlib.ExitStack()
        self._bar_stream = sys.stderr if is_main and sys.stderr.isatty() else None
        if sys.stderr.isatty():
            self._redirected_stderr.enter_context(stderr_above_bars(is_main=is_main))
        if not is_main:
            return
        output_dir = Path(config.output_dir)
        self._completions_dir = output_dir / "completions"
        self._completions_dir.mkdir(parents=True, exist_ok=True)
        last_kept_step = first_step - 1 if first_step == 0 or rewrite_first_step else first_step
        self._metrics_file = MetricsFile(output_dir / "metrics.jsonl", last_kept_step=last_kept_step)
        self._intervals_file = MetricsFile(output_dir / "intervals.jsonl", last_kept_step=last_kept_step)
        no_hint = equal_rewards_have_gradient(config.algorithm.baseline, config.algorithm.scale)
        self._hints = Hints(without=("equal rewards",) if no_hint else ())
        for metrics in self._metrics_file.kept:  # the interrupted run has printed these hints
            self._hints.update(metrics)
        self._steps_bar = self.bar("steps", max_steps, "step", initial=first_step, leave=True)
        if config.logging.wandb != "disabled":
            earlier = [metrics for metrics in self._metrics_file.kept if self._is_shown(metrics)]
            wandb = WandbLogger(
                config, run_id=wandb_run_id, environment=environment or {}, max_steps=max_steps, first_step=first_step,
                earlier=earlier, newest_earlier_step=self._metrics_file.newest_earlier_step, print_line=self.print,
            )  # fmt: skip
            self.wandb_run_id = wandb.run_id
            self._dashboards.append(wandb)
        if config.logging.tensorboard:
            self._dashboards.append(
                TensorBoardLogger(config, max_steps=max_steps, first_step=last_kept_step + 1, print_line=self.print)
            )

    def print(self, text: str) -> None:
        """Print a line on the console, above the bars."""
        if self.is_main:
            with tqdm.external_write_mode(file=self._bar_stream):
                print(printable(text), flush=True)

    def bar(self, description: str, total: int, unit: str = "tok", *, initial: int = 0, leave: bool = False) -> tqdm:
        """A progress bar, shown on a terminal only. ``bar.update(n)`` adds n."""
        where = dict(file=self._bar_stream, disable=self._bar_stream is None, dynamic_ncols=True)
        return tqdm(total=total, desc=description, unit=unit, initial=initial, leave=leave, **where)

    def progress(self, description: str, items: Sequence[Any]) -> Iterator[Any]:
        """Iterate over items with a progress bar."""
        with self.bar(description, len(items), "item") as bar:
            for item in items:
                yield item
                bar.update(1)

    def step(self, metrics: dict[str, Any]) -> None:
        """Report one step: ``metrics["step"]`` counts from 1, 0 is the evaluation before training.

        ``metrics.jsonl`` and the hints see each step; console and dashboards those of :meth:`is_logged`, and steps
        with an evaluation.
        """
        if not self.is_main:
            return
        self._metrics_file.write(metrics)
        left = self.time_left.after(metrics)
        self._steps_bar.set_postfix(progress_values(metrics), refresh=False)
        self._steps_bar.update(metrics["step"] - self._steps_bar.n)
        if self._is_shown(metrics):
            if "reward" in metrics:
                self.print(console_line(metrics, self.max_steps, left if self._bar_stream is None else None))
            if _has_evaluation(metrics):
                self.print(evaluation_line(metrics, self.max_steps))
            for dashboard in self._dashboards:
                dashboard.log(metrics)
        for hint in self._hints.update(metrics):
            self.print(f"hint: {hint} (see docs/metrics.md)")

    def intervals(self, step: int, intervals: dict[str, tuple[float, float]]) -> None:
        """Write the 95% interval of each metric of an evaluation to ``intervals.jsonl``, for the report."""
        if self.is_main:
            self._intervals_file.write({"step": step, **intervals})

    def sync(self) -> None:
        """Wait until the disk has the steps reported so far."""
        if self.is_main:
            self._metrics_file.sync()
            self._intervals_file.sync()

    def is_logged(self, step: int) -> bool:
        """True if this rank shows a step on the console and on dashboards, and keeps some of its completions."""
        return self.is_main and self.is_due(step)

    def is_due(self, step: int) -> bool:
        """True if the main rank does; the same on every rank."""
        return step % self._every == 0 or step == self.max_steps

    def histogram(self, name: str, values: torch.Tensor | tuple[Sequence[float], Sequence[float]]) -> None:
        """Add a histogram to the next step on the dashboards: its values, or ``(counts, edges)`` of bins."""
        for dashboard in self._dashboards:
            dashboard.add_histogram(name, values)

    def completions(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write some completions of a step to ``completions/step_<step>.parquet`` (see ``grpo.telemetry.samples``)."""
        if not self.is_main or not records:
            return
        write_samples(self._completions_dir / f"step_{step:06d}.parquet", records)
        for dashboard in self._dashboards:
            dashboard.add_completions(records)

    def close(self) -> None:
        if self.is_main:
            self._steps_bar.close()
        self._redirected_stderr.close()
        if self.is_main:
            self._metrics_file.close()
            self._intervals_file.close()
        for dashboard in self._dashboards:
            dashboard.finish()

    def _is_shown(self, metrics: dict[str, Any]) -> bool:
        return self.is_logged(metrics["step"]) or _has_evaluation(metrics)


def _has_evaluation(metrics: dict[str, Any]) -> bool:
    return "eval/greedy_accuracy" in metrics
