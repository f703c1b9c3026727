"""The reporter shows the steps of a run on the console and on dashboards, and writes them to
files."""

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
"""Approximate number of times in a run that dashboards show completions."""


class Reporter:
    """Reporter of a run's steps. All ranks may call its methods, but only the main rank reports.

    Args:
        first_step: number of steps that are already done; 0 for a new run.
        max_steps: number of steps of the whole run.
        newest_line: metrics of the last step that is done. If a kill has kept them out of
            ``metrics.jsonl``, they are written now.
        wandb_run_id: wandb's id of the interrupted run. Default: wandb gets a new id.
    """

    def __init__(
        self,
        config: Config,
        *,
        is_main: bool,
        first_step: int,
        max_steps: int,
        newest_line: dict[str, Any] | None,
        wandb_run_id: str | None,
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
        """Records of completions that are not yet on dashboards."""
        self._unsent: dict[str, Any] = {}
        """Metrics of the last step that dashboards do not have yet. They are sent in one record
        with the evaluation after that step."""
        self.hints = Hints()
        """Hints of the run so far. Only the main rank collects them."""
        if not is_main:
            return

        # The run continues in its files as if it had not been interrupted.
        folder = Path(config.output_dir)
        self._completions_folder = folder / "completions"
        self._completions_folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / "metrics.jsonl"
        self._intervals = folder / "intervals.jsonl"
        # A run that starts at step 0 makes the evaluation before training again, so the line of
        # step 0 is removed too.
        last_step = first_step or -1
        remove_steps_after(self._intervals, last_step)
        lines = remove_steps_after(self._metrics, last_step)
        if newest_line is not None:
            self._unsent = computed(newest_line)
            if newest_line["step"] not in (line["step"] for line in lines):
                append_line(self._metrics, newest_line)
                lines.append(newest_line)
        # The interrupted run has printed the hints of these steps, so they are not printed again.
        for line in lines:
            self.hints.update(line)

        if logging.wandb != "disabled":
            self.wandb_run_id = wandb_run_id or uuid4().hex[:8]
            self._start(Wandb, config, self.wandb_run_id, self.print)
        if logging.trackio:
            self._start(Trackio, config, last_step >= 0)
        if logging.tensorboard:
            self._start(TensorBoard, config, last_step + 1)

    def print(self, text: str) -> None:
        """Print a line on the console, above the progress bars."""
        if self.is_main:
            # Completions may hold control characters, which could rewrite the terminal.
            tqdm.write(printable(text))
            sys.stdout.flush()

    def step(self, metrics: dict[str, Any], *, evaluation_follows: bool = False) -> None:
        """Write a step to ``metrics.jsonl``, show it on the console and on dashboards, and print
        hints.

        Console and dashboards show only steps for which :meth:`is_due` is True, and only metrics
        that were computed.

        Args:
            evaluation_follows: True if dashboards get the step later, in :meth:`evaluation`.
        """
        if not self.is_main:
            return
        step = metrics["step"]
        append_line(self._metrics, metrics)
        self._unsent = {}
        if self.is_due(step):
            self._unsent = computed(metrics)
            self.print(console_line(self._unsent, self.max_steps))
            # wandb ignores a second call for a step that an interrupted run has sent. So a step and
            # its evaluation go in one call.
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
        """Add an evaluation to its step in ``metrics.jsonl``, and show it on the console and on
        dashboards.

        Args:
            step: number of the step after which the weights were evaluated; 0 before training.
            metrics: metrics of the evaluation.
            intervals: 95% interval of each metric, for ``intervals.jsonl`` and the report.
            seconds: duration of the evaluation.
        """
        if not self.is_main:
            return
        line = {"step": step}
        # time/eval is a phase of a step, and the evaluation before training belongs to no step.
        if step > 0:
            line["time/eval"] = seconds
        line |= metrics
        add_to_step(self._metrics, line)
        add_to_step(self._intervals, {"step": step} | intervals)

        shown = computed(line)
        self.print(evaluation_line(shown, self.max_steps))
        self._show(step, self._unsent | shown)

    def is_due(self, step: int) -> bool:
        """True if a step is shown, and some of its completions are written to a file. The answer is
        the same on all ranks."""
        return step % self._every == 0 or step == self.max_steps

    def completions(self, step: int, records: list[dict[str, Any]]) -> None:
        """Write records of :mod:`grpo.telemetry.samples` to ``completions/step_<step>.parquet``,
        and keep them for the dashboards."""
        if self.is_main and records:
            path = self._completions_folder / f"step_{step:06d}.parquet"
            write_samples(path, records)
            self._completions = records

    def close(self) -> None:
        """End the dashboards, after each has sent its remaining data."""
        for name, dashboard in list(self._dashboards.items()):
            self._guard(name, dashboard.finish)

    def _show(self, step: int, metrics: dict[str, Any]) -> None:
        """Send a step to the dashboards. Some steps are sent with completions."""
        # Dashboards get the step as a separate number. As a metric it would be one more chart.
        metrics = {name: value for name, value in metrics.items() if name != "step"}
        rows = []
        if step % self._completions_every == 0 or step == self.max_steps:
            rows = [table_row(record) for record in self._completions]
        self._completions = []
        # The loop runs over a copy, since a dashboard that fails is removed.
        for name, dashboard in list(self._dashboards.items()):
            self._guard(name, dashboard.log, step, metrics, rows)

    def _start(self, dashboard_class: type, *arguments: Any) -> None:
        """Start a dashboard. A dashboard that fails to start is left out."""
        name = dashboard_class.__name__
        dashboard = self._guard(name, dashboard_class, *arguments)
        if dashboard is not None:
            self._dashboards[name] = dashboard

    def _guard(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``call(*arguments)`` of a dashboard. If the call fails, print a warning, remove
        the dashboard and return None."""
        # A failure (no package, no server, a full disk) ends the dashboard, not the training.
        try:
            return call(*arguments)
        except Exception as error:
            self.print(
                f"warning: {name} stopped ({first_line(error)}); "
                "metrics.jsonl still gets every metric"
            )
            self._dashboards.pop(name, None)
