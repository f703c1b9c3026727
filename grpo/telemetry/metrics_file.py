"""Files with one JSON object per step: ``metrics.jsonl``, and ``intervals.jsonl`` beside it."""

import json
import math
import os
from pathlib import Path
from typing import Any

from grpo.system import open_regular, write_atomically


class MetricsFile:
    """Opens the file for appending, after removing the lines of steps after ``last_kept_step``, which a resumed run writes again.

    Lines that cannot be read are removed too: a process that was killed may leave half a line, a power cut anything.
    """

    def __init__(self, path: str | Path, *, last_kept_step: int):
        self.path = Path(path)
        self.kept: list[dict[str, Any]] = []
        """The objects that stayed in the file."""
        self.newest_earlier_step = -1
        """The newest step that was in the file, kept or not; -1 if the file is new."""
        if self.path.exists():
            self._remove_steps_after(last_kept_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def write(self, metrics: dict[str, Any]) -> None:
        """Append the object of one step. The message of an ``OSError`` (the disk is full, for example) names the file."""
        try:
            self._file.write(json.dumps(json_safe(metrics)) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error}") from error

    def sync(self) -> None:
        """Wait until the disk has what was written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _remove_steps_after(self, last_kept_step: int) -> None:
        kept_lines = []
        with open_regular(self.path) as file:
            text = file.read().decode(errors="replace")
        for line in text.splitlines(keepends=True):
            try:
                record = json.loads(line)
                self.newest_earlier_step = max(self.newest_earlier_step, record["step"])
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            if record["step"] <= last_kept_step and line.endswith("\n"):
                kept_lines.append(line)
                self.kept.append(record)
        write_atomically(self.path, "".join(kept_lines))


def json_safe(value: Any) -> Any:
    """A copy in which NaN and infinity, which JSON does not have, are None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value
