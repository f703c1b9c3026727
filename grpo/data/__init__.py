"""Datasets: read rows, turn them into problems, and assign the problems to steps and ranks."""

from grpo.data.problems import (
    ProblemSet,
    Rows,
    count_shared,
    fingerprint,
    load_rows,
    make_problems,
    render,
    system_prompt_and_instructions,
)
from grpo.data.schedule import Schedule, check_enough
from grpo.data.source import read_rows

__all__ = [
    "ProblemSet",
    "Rows",
    "Schedule",
    "check_enough",
    "count_shared",
    "fingerprint",
    "load_rows",
    "make_problems",
    "read_rows",
    "render",
    "system_prompt_and_instructions",
]
