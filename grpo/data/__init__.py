"""Datasets: read rows, turn them into problems, and assign the problems to steps and ranks."""

from grpo.data.problems import ProblemSet, Rows, count_shared, fingerprint, load_rows, make_problems, render
from grpo.data.rows import PYTHON_ROWS, rows_of
from grpo.data.schedule import Schedule, check_enough

__all__ = [
    "PYTHON_ROWS", "ProblemSet", "Rows", "Schedule", "check_enough", "count_shared", "fingerprint", "load_rows",
    "make_problems", "render", "rows_of",
]  # fmt: skip
