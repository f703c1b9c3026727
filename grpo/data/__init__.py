"""Datasets: read rows, turn them into problems, and assign the problems to steps and ranks."""

from grpo.data.chat import render
from grpo.data.problems import ProblemSet, count_shared_prompts, make_problems
from grpo.data.rows import PYTHON_ROWS, rows_from_table
from grpo.data.schedule import Schedule, check_enough
from grpo.data.table import Rows, fingerprint, load_rows

__all__ = [
    "PYTHON_ROWS",
    "ProblemSet",
    "Rows",
    "Schedule",
    "check_enough",
    "count_shared_prompts",
    "fingerprint",
    "load_rows",
    "make_problems",
    "render",
    "rows_from_table",
]
