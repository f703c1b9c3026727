"""How far a run has come: the only thing beside weights, optimizer and reference that a checkpoint has to save."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Progress:
    """Changed by the training loop, written into every checkpoint's ``trainer/state.json``."""

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
    mid_update: bool = False
    """True from the first change of the weights to the end of the step: the state in memory is between two steps. Never saved as True."""

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """The progress saved in a checkpoint's state; missing names keep their defaults."""
        return cls(**{field.name: state[field.name] for field in fields(cls) if field.name in state})

    def complete_step(self, step: int, line: dict[str, Any]) -> None:
        """All updates of a step are done; its metrics wait to be written."""
        self.step, self.unwritten_line, self.mid_update = step, line, False
