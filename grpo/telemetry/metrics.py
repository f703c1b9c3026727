"""What a run reports: accumulated as (sum, count), reduced over ranks once a step, written to console, JSONL and wandb."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from grpo.distributed import World
from grpo.telemetry.console import console_line, evaluation_line, postfix
from grpo.telemetry.hints import Health
from grpo.telemetry.samples import read_samples, write_samples
from grpo.telemetry.terminal import AboveBars

WANDB_SECONDS = {"login_timeout": 30, "init_timeout": 20, "finish_timeout": 20}
"""Longest waits for a key typed in, for the server at the start, and for the upload at the end (torchrun's grace is 30): wandb's own have
no end."""
TABLE_SECONDS, SLOW_TABLE, TABLE_SHARE = 8, 5.0, 0.05
"""wandb asks the server before it takes a table, and training waits for the answer: at most so long. Where it took longer than
``SLOW_TABLE``, tables are tried so much less often that they take no larger share of the run."""
TABLE_ROWS, TABLES_PER_RUN = 1000, 50
"""The table of completions in wandb: its newest rows, and how often it is sent (each time whole)."""


class Accumulator:
    """Means, minima and maxima over rows, micro-batches and ranks, without unweighted means of means."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._totals: set[str] = set()
        self._extremes: dict[str, float] = {}
        self._minima: set[str] = set()
        self.histograms: dict[str, list[float]] = {}
        """Totals over ranks of what was added as a vector; there after :meth:`reduce`."""

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float = 1.0) -> None:
        """Add a sum and the number of things summed; the metric is the ratio of the totals over all ranks. A vector: counts by bin."""
        total = torch.as_tensor(total, dtype=torch.float64)
        count = torch.as_tensor(count, dtype=torch.float64, device=total.device)
        pair = torch.stack([total, count.expand_as(total)])
        self._sums[name] = self._sums[name] + pair.to(self._sums[name].device) if name in self._sums else pair

    def total(self, name: str, value: torch.Tensor | float) -> None:
        """Add to a sum that is reported as it is, over micro-batches and ranks."""
        self.add(name, value, 0.0)
        self._totals.add(name)

    def add_values(self, name: str, values: torch.Tensor) -> None:
        """Add the mean of finite values; NaN ones are left out."""
        finite = values[torch.isfinite(values)].double()
        self.add(name, finite.sum(), float(finite.numel()))

    def add_all(self, stats: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for name, (total, count) in stats.items():
            self.add(name, total, count)

    def maximum(self, name: str, value: float) -> None:
        self._extremes[name] = max(value, self._extremes.get(name, -float("inf")))

    def minimum(self, name: str, value: float) -> None:
        self._extremes[name] = min(value, self._extremes.get(name, float("inf")))
        self._minima.add(name)

    def mean(self, name: str) -> float:
        """So far, of this rank; NaN where nothing was counted."""
        total, count = self._sums[name].tolist()
        return total / count if count else math.nan

    def reduce(self, world: World) -> dict[str, float]:
        """One sum and one maximum over ranks; the names must be the same on all of them."""
        names = sorted(self._sums)
        metrics: dict[str, float] = {}
        if names:
            parts = [self._sums[name].cpu().view(2, -1) for name in names]
            sums = world.sum(torch.cat(parts, dim=1)).split([part.shape[1] for part in parts], dim=1)
            for name, (total, count) in zip(names, sums, strict=True):
                if self._sums[name].dim() > 1:
                    self.histograms[name] = total.tolist()
                else:
                    total, count = total.item(), count.item()
                    metrics[name] = total if name in self._totals else total / count if count else 0.0
        names = sorted(self._extremes)
        if names:
            signs = torch.tensor([-1.0 if name in self._minima else 1.0 for name in names], dtype=torch.float64)
            values = torch.tensor([self._extremes[name] for name in names], dtype=torch.float64)
            values = world.max(values * signs) * signs
            metrics |= dict(zip(names, values.tolist(), strict=True))
        return metrics


class Reporter:
    """Console, ``metrics.jsonl``, ``completions/`` and wandb, on the main rank; on the others it does nothing."""

    def __init__(
        self,
        output_dir: str | Path,
        *,
        is_main: bool,
        first_step: int,
        max_steps: int,
        redo_line: bool = False,
        every: int = 1,
        wandb_mode: str = "disabled",
        project: str = "grpo",
        run_name: str | None = None,
        wandb_run_id: str | None = None,
        config: dict[str, Any] | None = None,
    ):
        self.output_dir, self.is_main, self.every, self.max_steps = Path(output_dir), is_main, every, max_steps
        self.wandb_run_id = wandb_run_id
        self._wandb = None
        self._above = AboveBars(sys.stderr, is_main=is_main) if sys.stderr.isatty() else None
        if not is_main:
            return
        (self.output_dir / "completions").mkdir(parents=True, exist_ok=True)
        self._jsonl_path = self.output_dir / "metrics.jsonl"
        kept, self._newest_written = self._drop_steps_from(first_step, redo_line)
        self._health = Health()
        for metrics in kept:  # what was said before the interruption is not said again
            self._health.look(metrics)
        self._jsonl = open(self._jsonl_path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._bar = self.bar("steps", max_steps, "step", initial=first_step, leave=True)
        if wandb_mode != "disabled":
            self._pending: dict[str, Any] = {}  # what belongs to the next point, beside its metrics
            self._table_rows = self._earlier_completions(first_step)
            self._evaluations = [metrics for metrics in kept if "eval/greedy_accuracy" in metrics]
            self._no_table_before, self._said_slow = -math.inf, False
            self._wandb = self._start_wandb(wandb_mode, project, run_name or self.output_dir.name, config or {})

    def say(self, text: str) -> None:
        """A line on the console, above the bars."""
        if self.is_main:
            with tqdm.external_write_mode(file=self._above):
                print(text, flush=True)

    def bar(self, description: str, total: int, unit: str = "tok", *, initial: int = 0, leave: bool = False):
        """A short-lived bar for a phase; its ``update`` takes what has been done since the last call."""
        stream = self._above.stream if self._above and self.is_main else None
        return tqdm(
            total=total, desc=description, unit=unit, initial=initial, leave=leave, disable=stream is None, file=stream, dynamic_ncols=True
        )  # fmt: skip

    def through(self, description: str, items: Sequence[Any]) -> Iterator[Any]:
        """The items, with a short-lived bar that counts those that are done."""
        with self.bar(description, len(items), "part") as bar:
            for item in items:
                yield item
                bar.update(1)

    def step(self, metrics: dict[str, Any]) -> None:
        """Write one step (1-based ``step``) to JSONL, and every N steps to the console and wandb."""
        if not self.is_main:
            return
        try:
            self._jsonl.write(json.dumps(json_safe(metrics)) + "\n")
            self._jsonl.flush()
        except OSError as error:  # a full disk, say: it does not name the file itself
            raise OSError(f"{self._jsonl_path} cannot be written: {error}") from error
        self._bar.set_postfix(postfix(metrics), refresh=False)
        self._bar.update(metrics["step"] - self._bar.n)
        if self.is_logged(metrics["step"]) or "eval/greedy_accuracy" in metrics:
            if "reward" in metrics:
                self.say(console_line(metrics, self.max_steps))
            if "eval/greedy_accuracy" in metrics:
                self.say(evaluation_line(metrics, self.max_steps))
            if self._wandb is not None:
                self._log_to_wandb(metrics)
        for hint in self._health.look(metrics):
            self.say(f"hint: {hint} (docs/metrics.md)")

    def sync(self) -> None:
        """What was written is on the disk, also after a power cut."""
        if self.is_main:
            os.fsync(self._jsonl.fileno())

    def is_logged(self, step: int) -> bool:
        """Whether this rank shows a step on the console and in wandb, and keeps some of its completions."""
        return self.is_main and (step % self.every == 0 or step == self.max_steps)

    def histogram(self, name: str, values: torch.Tensor | tuple[Sequence[float], Sequence[float]]) -> None:
        """Values of the whole step, or how many lie between edges as ``(counts, edges)``, to the next point in wandb."""
        if self._wandb is not None:
            self._pending[f"histograms/{name}"] = values.flatten() if isinstance(values, torch.Tensor) else values

    def completions(self, step: int, records: list[dict[str, Any]]) -> None:
        """A few completions of a step to ``completions/step_<step>.parquet`` (see ``grpo.telemetry.samples``)."""
        if not self.is_main or not records:
            return
        write_samples(self.output_dir / "completions" / f"step_{step:06d}.parquet", records)
        if self._wandb is not None:
            self._table_rows = [*self._table_rows, *records][-TABLE_ROWS:]

    def close(self) -> None:
        if self.is_main:
            self._bar.close()
        if self._above:
            self._above.close()
        if not self.is_main:
            return
        self._jsonl.close()
        if self._wandb is not None:
            try:
                self._wandb.finish(exit_code=0 if sys.exc_info()[0] is None else 1)  # closed by a failure: a failed run
            except Exception as error:  # the service may have gone away
                print(
                    f"warning: wandb could not finish ({_first_line(error)}); metrics.jsonl has everything; to send it: "
                    f"wandb sync --no-skip-online {Path(self._wandb.dir).parent}",
                    flush=True,
                )

    def _drop_steps_from(self, first_step: int, redo_line: bool) -> tuple[list[dict[str, Any]], int]:
        """Forget lines of steps that a resumed run will do (or, with ``redo_line``, write) again, and a last line that a kill cut short.

        Returns:
            What is kept, and the newest step that was there.
        """
        if not self._jsonl_path.exists():
            return [], -1
        kept, records, newest = [], [], -1
        for line in self._jsonl_path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
            try:
                record = json.loads(line)
                newest = max(newest, record["step"])
            except (ValueError, TypeError, KeyError):  # a power cut may leave anything
                continue
            if record["step"] <= first_step - redo_line and line.endswith("\n") and first_step > 0:
                kept.append(line)
                records.append(record)
        temporary = self._jsonl_path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self._jsonl_path)
        return records, newest

    def _earlier_completions(self, first_step: int) -> list[dict[str, Any]]:
        """The completions that a resumed run has written, for a table that is whole after it."""
        rows: list[dict[str, Any]] = []
        for path in sorted((self.output_dir / "completions").glob("step_*.parquet"), reverse=True):
            if first_step >= int(path.stem.removeprefix("step_")) and len(rows) < TABLE_ROWS:
                with contextlib.suppress(OSError, ValueError):  # damaged: the table lacks them
                    rows = read_samples(path) + rows
        return rows

    def _start_wandb(self, mode: str, project: str, name: str, config: dict[str, Any]):
        """A wandb run, or None with a warning: a missing package, key or server never stops training."""
        os.environ.setdefault("WANDB_HTTP_TIMEOUT", str(TABLE_SECONDS))  # read at the import
        # The service of a process that started us holds on to a run that it could not begin, and what kills it kills ours: we have our own.
        os.environ.pop("WANDB_SERVICE", None)
        try:
            import wandb

            self.wandb_run_id = self.wandb_run_id or secrets.token_hex(4)
            settings = wandb.Settings(silent=True, finish_timeout_raises=True, **WANDB_SECONDS)
            options = dict(project=project, name=name, id=self.wandb_run_id, config=config, dir=str(self.output_dir))
            try:
                run = wandb.init(mode=mode, resume="allow" if mode == "online" else None, settings=settings, **options)
            except Exception as error:  # the service may be away, or refuse us
                if mode == "offline":
                    raise
                self.say(f"warning: wandb online failed ({_first_line(error)}); going on offline")
                wandb.teardown()  # what is left of the attempt still holds the run's id
                run = wandb.init(mode="offline", settings=settings, **options)
            # Our own axis: wandb drops points whose step is not above the last one, which a resumed run's are not.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:
            self.say(f"warning: no wandb ({_first_line(error)}); metrics.jsonl has everything")
            return None

    def _log_to_wandb(self, metrics: dict[str, Any]) -> None:
        step = metrics["step"]
        pending, self._pending = self._pending, {}
        if self._wandb.offline and step <= self._newest_written:
            return  # an earlier part of this run has this point in its own folder; `wandb sync` would add it twice
        histograms, tables = self._media(step, metrics, pending)
        try:
            if tables and time.monotonic() >= self._no_table_before:
                self._log_tables(step, tables)
            # wandb's own counter is the step too: the service drops points that it has, which a resumed run sends again.
            self._wandb.log(metrics | histograms, step=step, commit=True)
        except Exception as error:  # the service may have gone away
            self.say(f"warning: wandb stopped ({_first_line(error)}); metrics.jsonl has everything")
            self._wandb = None

    def _log_tables(self, step: int, tables: dict[str, Any]) -> None:
        """Add tables to the point; a server that does not answer costs some time now and little later."""
        began, error = time.monotonic(), None
        try:
            self._wandb.log(tables, step=step, commit=False)
        except Exception as failed:  # no answer, or not one that wandb takes; metrics do not wait for one
            error = failed
        took = time.monotonic() - began
        if error or took > SLOW_TABLE:
            self._no_table_before = time.monotonic() + max(took, SLOW_TABLE) / TABLE_SHARE
            if not self._said_slow:
                reason = f" ({_first_line(error)})" if error else ""
                self.say(f"note: wandb kept a table waiting for {took:.0f} s{reason}: metrics go on, tables less often")
            self._said_slow = True

    def _media(
        self, step: int, metrics: dict[str, Any], pending: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Histograms of this point, and the tables of completions and evaluations."""
        import wandb

        histograms, tables = {}, {}
        for name, values in pending.items():
            if isinstance(values, tuple):
                histograms[name] = wandb.Histogram(np_histogram=values)
            elif len(finite := values[torch.isfinite(values)]):
                histograms[name] = wandb.Histogram(finite.tolist())
        if "eval/greedy_accuracy" in metrics:
            self._evaluations.append(metrics)
            names = ["step", *(name for name in metrics if name.startswith("eval/"))]
            rows = [[evaluation.get(name) for name in names] for evaluation in self._evaluations]
            tables["tables/evaluations"] = wandb.Table(columns=names, data=rows)
        is_time = (
            step == self.max_steps or step // self.every % max(self.max_steps // self.every // TABLES_PER_RUN, 1) == 0
        )
        if self.is_logged(step) and self._table_rows and is_time:
            rewards = list(self._table_rows[-1]["rewards"])
            names = ["step", "prompt", "completion", "reward", "advantage", "length", "finished"]
            rows = [
                [record[name] if name != "prompt" else str(record[name]) for name in names]
                + [json_safe(record["rewards"].get(name)) for name in rewards]
                for record in json_safe(self._table_rows)
            ]
            tables["completions"] = wandb.Table(columns=[*names, *(f"rewards/{name}" for name in rewards)], data=rows)
        return histograms, tables


def json_safe(value: Any) -> Any:
    """NaN and infinity have no JSON; null stands for them."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
