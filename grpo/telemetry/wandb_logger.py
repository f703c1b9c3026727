"""Sends a run to Weights & Biases: metrics, histograms and tables. The only file that imports wandb, and only if it is switched on.
wandb never stops training: each kind of failure is one printed warning, and ``metrics.jsonl`` has every metric in any case.
"""

import contextlib
import math
import os
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo.config import Config
from grpo.system import first_line
from grpo.telemetry.dashboard import Dashboard
from grpo.telemetry.metrics_file import json_safe
from grpo.telemetry.samples import read_samples

TIMEOUTS = {"login_timeout": 30, "init_timeout": 20, "finish_timeout": 20}
"""Seconds to wait for a key to be typed in, for the server at the start, and for the upload at the end. wandb's own defaults have no
limit; torchrun kills a process 30 seconds after it asked the process to stop."""
TABLE_TIMEOUT = 8
"""wandb asks the server before it accepts a table, and training waits for the answer: seconds to wait at most."""
SLOW_TABLE, TABLE_TIME_SHARE = 5.0, 0.05
"""After a table that took more than ``SLOW_TABLE`` seconds, tables pause until they take no more than this share of the time."""
TABLE_ROWS = 1000
"""The table of completions has its newest rows. Each time, all rows are sent."""
NO_BEST, LOW_IS_BEST = ("mean_length",), ("truncated",)
"""Evaluation metrics whose names end with these: of a length no value is the best, of cut-off completions the lowest is."""


class WandbLogger(Dashboard):
    """One run in wandb. After a failure :meth:`log` does nothing.

    Args:
        run_id: wandb's id of the interrupted run that goes on; None draws a new one.
        environment: facts about this start, stored in wandb beside the configuration.
        first_step: steps that are already done.
        earlier: the metrics of the steps that the interrupted run has shown and that this run does not compute again.
        newest_earlier_step: the newest step that the interrupted run has computed; -1 for a new run.
    """

    def __init__(
        self, config: Config, *, run_id: str | None, environment: dict[str, Any], max_steps: int, first_step: int,
        earlier: Sequence[dict[str, Any]], newest_earlier_step: int, print_line: Callable[[str], None],
    ):  # fmt: skip
        super().__init__(config, max_steps=max_steps, print_line=print_line)
        self.run_id = run_id
        """Continues this run in wandb when it is given to a later start."""
        self._newest_earlier_step = newest_earlier_step
        self._completions = _earlier_completions(Path(config.output_dir) / "completions", first_step)
        self._evaluations = [metrics for metrics in earlier if "eval/greedy_accuracy" in metrics]
        self._best: dict[str, float] = {}
        for metrics in earlier:
            self._add_best(metrics)
        self._tables_pause_until = -math.inf
        self._slow_table_reported = False
        self._run = self._start(config, environment)
        if self._run is not None:
            self._print(f"wandb     {self._place()}")

    def add_completions(self, records: Sequence[dict[str, Any]]) -> None:
        self._completions = [*self._completions, *records][-TABLE_ROWS:]

    def log(self, metrics: dict[str, Any]) -> None:
        if self._run is None:
            return
        step, values = metrics["step"], self._take_histograms()
        if "eval/greedy_accuracy" in metrics:
            self._evaluations.append(metrics)
        if self._run.offline and step <= self._newest_earlier_step:
            return  # the interrupted run has this step in its own offline folder; `wandb sync` would send the step twice
        try:
            histograms, tables = self._wandb_histograms(values), self._wandb_tables(metrics)
            if tables and time.monotonic() >= self._tables_pause_until:
                self._log_tables(step, tables)
            # wandb's own counter is the step too: the server then ignores the steps that a resumed run sends again.
            named = {self.shown_name(name): value for name, value in metrics.items()}
            self._run.log(named | histograms, step=step, commit=True)
            if self._add_best(metrics):
                self._run.summary.update(self._best)
        except Exception as error:  # for example, wandb's process was killed
            self._print(f"warning: wandb stopped ({first_line(error)}); metrics.jsonl still gets every metric")
            self._run = None

    def finish(self) -> None:
        """Wait for the upload, within limits. While an exception is being handled, wandb shows the run as failed."""
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
            if self._run.offline:
                self._print(f"wandb     {self._place()}")
        except Exception as error:  # for example, the server no longer answers
            again = f"send the run again with: wandb sync --no-skip-online {Path(self._run.dir).parent}"
            self._print(
                f"warning: wandb could not finish ({first_line(error)}); metrics.jsonl has every metric; {again}"
            )

    def _start(self, config: Config, environment: dict[str, Any]) -> Any:
        """A wandb run, or None after a warning (no package, no key, no server)."""
        os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(TABLE_TIMEOUT))  # wandb reads the variable when it is imported
        # If a process that uses wandb started this one, its wandb service would be shared: a run that fails to start blocks that
        # service, and when the other process ends the service, this run ends too. Without the variable wandb starts a new service.
        os.environ.pop("WANDB_SERVICE", None)
        mode = config.logging.wandb
        try:
            import wandb

            self._wandb = wandb
            self.run_id = self.run_id or secrets.token_hex(4)
            name = config.logging.run_name or Path(config.output_dir).name
            options = dict(
                project=config.logging.project, name=name, id=self.run_id, dir=str(config.output_dir),
                config=config.for_writing() | {"environment": environment},
                settings=wandb.Settings(silent=True, finish_timeout_raises=True, **TIMEOUTS),
            )  # fmt: skip
            try:
                run = wandb.init(mode=mode, resume="allow" if mode == "online" else None, **options)
            except Exception as error:  # no server, or the server refuses the key
                if mode == "offline":
                    raise
                advice = "going on offline: send the run later with `wandb sync`"
                self._print(f"warning: wandb online failed ({first_line(error)}); {advice}")
                wandb.teardown()  # otherwise the failed attempt keeps the run's id in use
                run = wandb.init(mode="offline", **options)
            # Our own x axis: wandb drops points whose step is not above the last one, as those of a resumed run may be.
            axis = self.shown_name("step")
            run.define_metric(axis)
            run.define_metric("*", step_metric=axis)
            run.summary.update(self._best)
            return run
        except Exception as error:
            self._print(f"warning: no wandb ({first_line(error)}); metrics.jsonl still gets every metric")
            return None

    def _place(self) -> str:
        """The address of the run's page; of an offline run the command that sends its folders, one for each start."""
        if not self._run.offline:
            return self._run.url
        folders = sorted(Path(self._run.dir).parent.parent.glob(f"offline-run-*-{self.run_id}"))
        return f"offline; send this run with: {shlex.join(['wandb', 'sync', *map(str, folders)])}"

    def _add_best(self, metrics: dict[str, Any]) -> bool:
        """True if a step improves the best reward or the best value of an evaluation metric."""
        improved = False
        for name, value in metrics.items():
            known = self._best.get(key := f"best/{name}")
            has_best = name == "reward" or (name.startswith("eval/") and not name.endswith(NO_BEST))
            if has_best and value is not None and math.isfinite(value):
                best = (min if name.endswith(LOW_IS_BEST) else max)(value, value if known is None else known)
                improved |= best != known
                self._best[key] = best
        return improved

    def _log_tables(self, step: int, tables: dict[str, Any]) -> None:
        """Add tables to a step. A server that answers late or not at all delays training once; then tables pause."""
        started, reason = time.monotonic(), ""
        try:
            self._run.log(tables, step=step, commit=False)
        except Exception as error:  # the metrics are sent all the same
            reason = f" ({first_line(error)})"
        seconds = time.monotonic() - started
        if not reason and seconds <= SLOW_TABLE:
            return
        self._tables_pause_until = time.monotonic() + max(seconds, SLOW_TABLE) / TABLE_TIME_SHARE
        if not self._slow_table_reported:
            waited = f"wandb kept a table waiting for {seconds:.0f} s{reason}"
            self._print(f"note: {waited}: metrics are still sent, tables less often")
        self._slow_table_reported = True

    def _wandb_histograms(self, values_by_name: dict[str, Any]) -> dict[str, Any]:
        histograms = {}
        for name, values in values_by_name.items():
            if isinstance(values, tuple):
                histograms[name] = self._wandb.Histogram(np_histogram=values)
            else:
                histograms[name] = self._wandb.Histogram(values.tolist())
        return histograms

    def _wandb_tables(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The table of evaluations if this step has one; the table of completions when it is due."""
        tables, step = {}, metrics["step"]
        if "eval/greedy_accuracy" in metrics:
            names = ["step", *(name for name in metrics if name.startswith("eval/"))]
            rows = [[evaluation.get(name) for name in names] for evaluation in self._evaluations]
            tables["tables/evaluations"] = self._wandb.Table(columns=names, data=rows)
        if self._completions and self._shows_completions(step):
            rewards = list(self._completions[-1]["rewards"])
            logged = list(dict.fromkeys(name for record in self._completions for name in record.get("logged", ())))
            has_answers = any(record.get("answer") is not None for record in self._completions)
            answer = ["answer"] if has_answers else []
            names = ["step", "prompt", "completion", *answer, "reward", "advantage", "length", "finished"]
            rows = [
                [
                    *(record.get(name) for name in names),
                    *(record["rewards"].get(name) for name in rewards),
                    *(str(record.get("logged", {}).get(name)) for name in logged),  # in wandb a column has one type
                ]
                for record in (row | {"prompt": str(row["prompt"])} for row in json_safe(self._completions))
            ]
            columns = [*names, *(f"rewards/{name}" for name in rewards), *logged]
            tables["completions"] = self._wandb.Table(columns=columns, data=rows)
        return tables


def _earlier_completions(folder: Path, first_step: int) -> list[dict[str, Any]]:
    """The newest completions that an interrupted run has written up to ``first_step``, for the table."""
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("step_*.parquet"), reverse=True):
        if int(path.stem.removeprefix("step_")) <= first_step and len(rows) < TABLE_ROWS:
            with contextlib.suppress(OSError, ValueError):  # a damaged file is left out
                rows = read_samples(path) + rows
    return rows
