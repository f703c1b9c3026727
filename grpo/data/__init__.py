"""Datasets: read rows, turn them into problems, and assign the problems to steps and ranks."""

from grpo.data.problems import ProblemSet, Rows, count_shared, fingerprint, load_rows, make_problems
from grpo.data.prompts import render
from grpo.data.schedule import Schedule, check_enough
from grpo.data.source import GIVEN_ROWS, rows_of

__all__ = [
    "GIVEN_ROWS", "ProblemSet", "Rows", "Schedule", "check_enough", "count_shared", "fingerprint", "load_rows", "make_problems",
    "render", "rows_of",
]  # fmt: skip
