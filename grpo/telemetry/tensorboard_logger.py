"""Writes a run's metrics, histograms and some completions to TensorBoard's event files, in ``output_dir/tensorboard``. The only file
that imports TensorBoard's writer, and only if it is switched on. A failure to write is one printed warning.
"""

import itertools
import shlex
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo.config import Config
from grpo.system import first_line, import_extra
from grpo.telemetry.dashboard import Dashboard

FOLDER = "tensorboard"
"""The folder of the event files in ``output_dir``."""


def check_tensorboard(config: Config) -> None:
    """ValueError, with the command that installs it, if ``logging.tensorboard`` is on and the package is missing."""
    if config.logging.tensorboard:
        import_extra("tensorboard", "tensorboard", needed_by="logging.tensorboard")


class TensorBoardLogger(Dashboard):
    """The event file of one start of a run. After a failure :meth:`log` does nothing.

    Args:
        first_step: the first step that this start logs. TensorBoard hides steps from here on that an interrupted run has written.
    """

    def __init__(self, config: Config, *, max_steps: int, first_step: int, print_line: Callable[[str], None]):
        super().__init__(config, max_steps=max_steps, print_line=print_line)
        self._completions: list[dict[str, Any]] = []
        self._writer: Any = None
        folder = Path(config.output_dir) / FOLDER
        try:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step)
            settings = yaml.safe_dump(config.for_writing(), sort_keys=False, allow_unicode=True)
            self._writer.add_text("config", _verbatim(settings), first_step)
            self._writer.flush()
            self._print(f"dashboard tensorboard --logdir {shlex.quote(str(folder))}")
        except Exception as error:
            self._stop(error)

    def add_completions(self, records: Sequence[dict[str, Any]]) -> None:
        self._completions = list(records)

    def log(self, metrics: dict[str, Any]) -> None:
        histograms, step = self._take_histograms(), metrics["step"]
        if self._writer is None:
            return
        try:
            for name, value in metrics.items():
                if name != "step":
                    self._writer.add_scalar(self.shown_name(name), value, step)
            for name, values in histograms.items():
                self._add_histogram(name, values, step)
            if self._completions and self._shows_completions(step):
                self._writer.add_text("completions", "\n\n---\n\n".join(map(_completion_text, self._completions)), step)
            self._writer.flush()  # the file has the step, and an error of the disk shows here
        except Exception as error:  # for example, the disk is full
            self._stop(error)

    def finish(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except Exception as error:
            self._stop(error)

    def _add_histogram(
        self, name: str, values: torch.Tensor | tuple[Sequence[float], Sequence[float]], step: int
    ) -> None:
        if isinstance(values, torch.Tensor):
            self._writer.add_histogram(name, values, step)
            return
        counts, edges = values
        middles = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        moments = [sum(n * middle**power for n, middle in zip(counts, middles, strict=True)) for power in (1, 2)]
        self._writer.add_histogram_raw(
            name, edges[0], edges[-1], sum(counts), *moments, bucket_limits=list(edges[1:]), bucket_counts=list(counts),
            global_step=step,
        )  # fmt: skip

    def _stop(self, error: Exception) -> None:
        self._print(f"warning: TensorBoard stopped ({first_line(error)}); metrics.jsonl still gets every metric")
        self._writer = None


def _completion_text(record: dict[str, Any]) -> str:
    """A completion as Markdown: its rewards, prompt, text, and the reference answer if the record has it."""
    rewards = "".join(f", {name} {value:g}" for name, value in record["rewards"].items() if value is not None)
    end = "" if record["finished"] else ", truncated"
    title = (
        f"**reward {record['reward']:g}**{rewards}, advantage {record['advantage']:.3g}, {record['length']} tokens{end}"
    )
    parts = [title, "prompt", _verbatim(str(record["prompt"])), "completion", _verbatim(record["completion"])]
    if record.get("answer") is not None:
        parts += ["reference answer", _verbatim(record["answer"])]
    return "\n\n".join(parts)


def _verbatim(text: str) -> str:
    """Markdown that shows a text as it is, with ``?`` for broken Unicode, which an event file cannot hold."""
    return textwrap.indent(text.encode("utf-8", "replace").decode("utf-8"), "    ", lambda line: True)
