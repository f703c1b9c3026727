"""The part that wandb and TensorBoard share: names of metrics, histograms of the next step, and how often completions are shown."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo.config import Config

COMPLETIONS_PER_RUN = 50
"""About how often a run shows completions."""


class Dashboard(ABC):
    """A service or folder beside the run's own files that shows metrics. Its failures are printed once and never stop training.

    Args:
        print_line: prints a line on the console.
    """

    def __init__(self, config: Config, *, max_steps: int, print_line: Callable[[str], None]):
        self._prefix, self._max_steps, self._print = config.logging.wandb_prefix, max_steps, print_line
        self._completions_interval = config.logging.every * max(
            max_steps // config.logging.every // COMPLETIONS_PER_RUN, 1
        )
        self._histograms: dict[str, Any] = {}

    def add_histogram(self, name: str, values: torch.Tensor | tuple[Sequence[float], Sequence[float]]) -> None:
        """Add a histogram to the next step that is logged: its values, or ``(counts, edges)`` of bins. NaN and infinity are left out."""
        if isinstance(values, torch.Tensor):
            values = values[torch.isfinite(values)]
        if len(values):
            self._histograms[f"histograms/{name}"] = values

    @abstractmethod
    def add_completions(self, records: Sequence[dict[str, Any]]) -> None:
        """Add completions (records of ``grpo.telemetry.samples``) to the steps that show some."""

    @abstractmethod
    def log(self, metrics: dict[str, Any]) -> None:
        """Show one step, with the histograms added for it, and completions if they are due."""

    @abstractmethod
    def finish(self) -> None:
        """Write or send what is left."""

    def shown_name(self, name: str) -> str:
        """A metric's name with ``logging.wandb_prefix``. Evaluations keep theirs; ``step`` becomes ``global_step``, as in TRL's charts."""
        if not self._prefix or name.startswith("eval/"):
            return name
        return self._prefix + ("global_step" if name == "step" else name)

    def _shows_completions(self, step: int) -> bool:
        return step == self._max_steps or step % self._completions_interval == 0

    def _take_histograms(self) -> dict[str, Any]:
        taken, self._histograms = self._histograms, {}
        return taken
