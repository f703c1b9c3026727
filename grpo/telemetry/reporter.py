"""Shows and writes the steps of a run: console, progress bars, metrics.jsonl, hints, completions/,
dashboards."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from tqdm import tqdm

from grpo.config import Config
from grpo.system import first_line, printable
from grpo.telemetry.console import console_line, evaluation_line
from grpo.telemetry.dashboards import TensorBoard, Trackio, Wandb, table_row
from grpo.telemetry.hints import Hints
from grpo.telemetry.records import add_to_step, append_line, computed, remove_steps_after
from grpo.telemetry.samples import write_samples

COMPLETIONS_PER_RUN = 50
"""About how often dashboards show completions."""


class Reporter:
    """Works on the main rank; on the other ranks its methods do nothing.

    Args:
        first_step: steps that are already done; 0 for a new run.
        newest_line: metrics of the last step, written if ``metrics.jsonl`` lacks them.
        wandb_run_id: wandb's id of the interrupted run, if it had one.
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
    ):
        self.is_main = is_main
        self.max_steps = max_steps
        self.wandb_run_id = wandb_run_id
        logging = config.logging
        self._every = logging.every
        shown_steps = max_steps // logging.every
        self._completions_every = logging.every * max(shown_steps // COMPLETIONS_PER_RUN, 1)
        self._dashboards: dict[str, Wandb | Trackio | TensorBoard] = {}
        self._completions: list[dict[str, Any]] = []
        self._unsent: dict[str, Any] = {}
        """Metrics of the last step, for the dashboards, until its evaluation is made."""
        self.hints = Hints()
        """Sees the steps on the main rank alone."""
        if not is_main:
            return

        folder = Path(config.output_dir)
        self._completions_folder = folder / "completions"
        self._completions_folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / "metrics.jsonl"
        self._intervals = folder / "intervals.jsonl"
        last_step = first_step or -1  # the evaluation before training is made again
        remove_steps_after(self._intervals, last_step)
        lines = remove_steps_after(self._metrics, last_step)
        if newest_line is not None:
            self._unsent = computed(newest_line)
            if newest_line["step"] not in (line["step"] for line in lines):
                append_line(self._metrics, newest_line)
                lines.append(newest_line)
        for line in lines:
            self.hints.update(line)  # the interrupted run has printed these

        if logging.wandb != "disabled":
            self.wandb_run_id = wandb_run_id or uuid4().hex[:8]
            self._start(Wandb, config, self.wandb_run_id, self.print)
        if logging.trackio:
            self._start(Trackio, config, last_step >= 0)
        if logging.tensorboard:
            self._start(TensorBoard, config, last_step + 1)

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
    ) -> tqdm:
        """A progress bar, shown on a terminal only. ``bar.update(n)`` adds n."""
        return tqdm(
            total=total,
            desc=description,
            unit=unit,
            leave=False,
            disable=None if self.is_main else True,  # None: shown if stderr is a terminal
        )

    def step(self, metrics: dict[str, Any], *, evaluation_follows: bool = False) -> None:
        """Write a step to ``metrics.jsonl``, show it on the console and on dashboards, and print
        hints.

        Console and dashboards show the steps of :meth:`is_due`. There a metric that was not
        computed is left out.

        Args:
            evaluation_follows: dashboards get the step together with its evaluation: wandb takes
                nothing more for a step that an interrupted run has sent.
        """
        if not self.is_main:
            return
        step = metrics["step"]
        append_line(self._metrics, metrics)
        self._unsent = {}
        if self.is_due(step):
            self._unsent = computed(metrics)
            self.print(console_line(self._unsent, self.max_steps))
            if not evaluation_follows:
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
        add_to_step(self._metrics, timed)
        add_to_step(self._intervals, {"step": step, **intervals})
        timed = computed(timed)
        self.print(evaluation_line(timed, self.max_steps))
        self._show(step, self._unsent | timed)

    def is_due(self, step: int) -> bool:
        """True if the main rank shows a step, and keeps some completions; the same on every
        rank."""
        return step % self._every == 0 or step == self.max_steps

    def completions(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write some completions of a step to ``completions/step_<step>.parquet`` (see
        ``grpo.telemetry.samples``)."""
        if self.is_main and records:
            write_samples(self._completions_folder / f"step_{step:06d}.parquet", records)
            self._completions = records

    def close(self) -> None:
        for name, dashboard in list(self._dashboards.items()):
            self._guard(name, dashboard.finish)

    def _show(self, step: int, metrics: dict[str, Any]) -> None:
        """Send a step to the dashboards, with the completions that belong to it."""
        metrics = {name: value for name, value in metrics.items() if name != "step"}
        rows = []
        if step % self._completions_every == 0 or step == self.max_steps:
            rows = [table_row(record) for record in self._completions]
        self._completions = []
        for name, dashboard in list(self._dashboards.items()):
            self._guard(name, dashboard.log, step, metrics, rows)

    def _start(self, kind: type, *arguments: Any) -> None:
        name = kind.__name__
        dashboard = self._guard(name, kind, *arguments)
        if dashboard is not None:
            self._dashboards[name] = dashboard

    def _guard(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a dashboard. A failure (no package, no server, a full disk) ends the dashboard, not
        the training."""
        try:
            return call(*arguments)
        except Exception as error:
            self.print(
                f"warning: {name} stopped ({first_line(error)}); metrics.jsonl still gets every metric"
            )
            self._dashboards.pop(name, None)
