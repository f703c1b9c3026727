"""Datasets to problems, and problems to each rank's share of a step."""

from grpo.data.problems import (
    ProblemSet,
    Rows,
    count_shared,
    extract,
    fingerprint,
    load_rows,
    make_problems,
    render,
    said_first,
)
from grpo.data.schedule import Schedule, check_enough
from grpo.data.source import read_rows

__all__ = [
    "ProblemSet",
    "Rows",
    "Schedule",
    "check_enough",
    "count_shared",
    "extract",
    "fingerprint",
    "load_rows",
    "make_problems",
    "read_rows",
    "render",
    "said_first",
]
