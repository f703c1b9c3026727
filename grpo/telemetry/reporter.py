"""Shows and writes the steps of a run: console, progress bars, metrics.jsonl, hints, completions/, dashboards."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from grpo.config import Config
from grpo.system import first_line, printable, sync
from grpo.telemetry.console import console_line, evaluation_line
from grpo.telemetry.dashboards import TensorBoard, Trackio, Wandb
from grpo.telemetry.hints import hints_for
from grpo.telemetry.records import add_to_step, append_step, is_computed, remove_steps_after
from grpo.telemetry.samples import write_samples

COMPLETIONS_PER_RUN = 50
"""About how often dashboards show completions."""


class Reporter:
    """Works on the main rank; on the other ranks its methods do nothing.

    Args:
        first_step: steps that are already done; 0 for a new run.
        newest_line: metrics of the last step, written if ``metrics.jsonl`` lacks them.
        wandb_run_id: wandb's id of the interrupted run, if it had one.
        environment: facts about this start (see ``grpo.telemetry.records``).
    """

    def __init__(
        self,
        config: Config,
        *,
        is_main: bool,
        first_step: int,
        max_steps: int,
        newest_line: dict[str, Any] | None = None,
        wandb_run_id: str | None = None,
        environment: dict[str, Any] | None = None,
    ):
        self.is_main = is_main
        self.max_steps = max_steps
        self.wandb_run_id = wandb_run_id
        self._every = config.logging.every
        self._first_report: tuple[int, float] | None = None
        """The first step that was reported, and when."""
        self._dashboards: dict[str, Wandb | Trackio | TensorBoard] = {}
        self._histograms: dict[str, torch.Tensor] = {}
        self._completions: list[dict] = []
        self._unsent: dict[str, Any] = {}
        """Metrics of the last step, for the dashboards, until its evaluation is made."""
        algorithm = config.algorithm
        self.hints = hints_for(algorithm.baseline, algorithm.scale, algorithm.advantages)
        """Sees the steps on the main rank alone."""
        if not is_main:
            return

        self._folder = Path(config.output_dir)
        completions = self._folder / "completions"
        completions.mkdir(parents=True, exist_ok=True)
        last_step = first_step or -1  # the evaluation before training is made again
        remove_steps_after(self._folder / "intervals.jsonl", last_step)
        lines = remove_steps_after(self._folder / "metrics.jsonl", last_step)
        if newest_line is not None:
            self._unsent = {name: value for name, value in newest_line.items() if is_computed(value)}
            if newest_line["step"] not in (line["step"] for line in lines):
                append_step(self._folder / "metrics.jsonl", newest_line)
                lines.append(newest_line)
        for line in lines:
            self.hints.update(line)  # the interrupted run has printed these
        self._steps_bar = self.bar(
            "steps",
            max_steps,
            "step",
            initial=first_step,
            leave=True,
        )

        facts = environment or {}
        if config.logging.wandb != "disabled":
            self._start(
                "wandb",
                lambda: Wandb(config, wandb_run_id, facts, self.print),
            )
            started = self._dashboards.get("wandb")
            self.wandb_run_id = getattr(started, "run_id", wandb_run_id)
        if config.logging.trackio:
            self._start(
                "trackio",
                lambda: Trackio(config, last_step >= 0, facts),
            )
        if config.logging.tensorboard:
            self._start(
                "TensorBoard",
                lambda: TensorBoard(config, last_step + 1, self.print),
            )

    def print(self, text: str) -> None:
        """Print a line on the console, above the bars."""
        if self.is_main:
            tqdm.write(printable(text))
            sys.stdout.flush()

    def bar(
        self,
        description: str,
        total: int,
        unit: str = "tok",
        *,
        initial: int = 0,
        leave: bool = False,
    ) -> tqdm:
        """A progress bar, shown on a terminal only. ``bar.update(n)`` adds n."""
        return tqdm(
            total=total,
            desc=description,
            unit=unit,
            initial=initial,
            leave=leave,
            disable=None if self.is_main else True,  # None: shown if stderr is a terminal
            dynamic_ncols=True,
        )

    def step(self, metrics: dict[str, Any], *, evaluation_follows: bool = False) -> None:
        """Write a step to ``metrics.jsonl``, show it on the console and on dashboards, and print hints.

        Console and dashboards show the steps of :meth:`is_due`. There a metric that was not computed
        is left out.

        Args:
            evaluation_follows: dashboards get the step together with its evaluation: wandb takes
                nothing more for a step that an interrupted run has sent.
        """
        if not self.is_main:
            return
        step = metrics["step"]
        append_step(self._folder / "metrics.jsonl", metrics)
        left = self._time_left(step)
        self._steps_bar.update(step - self._steps_bar.n)
        self._unsent = {}
        if self.is_due(step):
            self._unsent = {name: value for name, value in metrics.items() if is_computed(value)}
            self.print(console_line(self._unsent, self.max_steps, left, _terminal_width()))
        if self._unsent and not evaluation_follows:
            self._show(step, self._unsent)
        for hint in self.hints.update(metrics):
            self.print(f"hint: {hint} (see docs/metrics.md)")

    def evaluation(
        self,
        step: int,
        metrics: dict[str, float],
        intervals: dict[str, tuple[float, float]],
        seconds: float,
    ) -> None:
        """Add an evaluation to the line of its step, and show it on the console and on dashboards.

        Args:
            intervals: the 95% interval of each metric, for ``intervals.jsonl`` and the report.
        """
        if not self.is_main:
            return
        timed: dict[str, Any] = {"step": step}
        if step > 0:  # the evaluation before training is a phase of no step
            timed["time/eval"] = seconds
        timed |= metrics
        add_to_step(self._folder / "metrics.jsonl", timed)
        add_to_step(self._folder / "intervals.jsonl", {"step": step, **intervals})
        computed = {name: value for name, value in timed.items() if is_computed(value)}
        self.print(evaluation_line(computed, self.max_steps, _terminal_width()))
        self._show(step, self._unsent | computed)

    def sync(self) -> None:
        """Wait until the disk has the steps reported so far."""
        for name in ("metrics.jsonl", "intervals.jsonl") if self.is_main else ():
            if (self._folder / name).exists():
                sync(self._folder / name)

    def is_due(self, step: int) -> bool:
        """True if the main rank shows a step, and keeps some completions; the same on every rank."""
        return step % self._every == 0 or step == self.max_steps

    def histogram(self, name: str, values: torch.Tensor) -> None:
        """Add a histogram to the next step on the dashboards; NaN and infinity are left out."""
        values = values[torch.isfinite(values)]
        if len(values):
            self._histograms[f"histograms/{name}"] = values

    def completions(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write some completions of a step to ``completions/step_<step>.parquet`` (see ``grpo.telemetry.samples``)."""
        if self.is_main and records:
            write_samples(self._folder / "completions" / f"step_{step:06d}.parquet", records)
            self._completions = records

    def close(self) -> None:
        if self.is_main:
            self._steps_bar.close()
        failed = sys.exc_info()[0] is not None  # an exception is being handled
        for name, dashboard in list(self._dashboards.items()):
            self._guard(name, lambda dashboard=dashboard: dashboard.finish(failed=failed))

    def _show(self, step: int, metrics: dict[str, Any]) -> None:
        """Send a step to the dashboards, with the histograms and completions that belong to it."""
        metrics = {name: value for name, value in metrics.items() if name != "step"}
        interval = self._every * max(self.max_steps // self._every // COMPLETIONS_PER_RUN, 1)
        completions = self._completions if step == self.max_steps or step % interval == 0 else []
        for name, dashboard in list(self._dashboards.items()):
            self._guard(name, lambda dashboard=dashboard: dashboard.log(step, metrics, self._histograms, completions))
        self._histograms = {}
        self._completions = []

    def _start(self, name: str, dashboard: Callable[[], Wandb | Trackio | TensorBoard]) -> None:
        self._guard(name, lambda: self._dashboards.update({name: dashboard()}))

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        """Call a dashboard. A failure (no package, no server, a full disk) ends the dashboard, not the training."""
        try:
            call()
        except Exception as error:
            self.print(f"warning: {name} stopped ({first_line(error)}); metrics.jsonl still gets every metric")
            self._dashboards.pop(name, None)

    def _time_left(self, step: int) -> str | None:
        """The time until the last step, at the pace since the first report; None if it is unknown or over."""
        now = time.monotonic()
        first_step, started = self._first_report = self._first_report or (step, now)
        if not first_step < step < self.max_steps:
            return None
        return tqdm.format_interval((now - started) / (step - first_step) * (self.max_steps - step))


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
