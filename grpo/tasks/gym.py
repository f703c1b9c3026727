"""Problems of the library reasoning-gym (``data.dataset=reasoning_gym:<task>``), imported only when one is asked for."""

from __future__ import annotations

import difflib
import hashlib
from typing import Any

from grpo.seeding import derive_seed
from grpo.tasks.task import EVAL_SHARE

PREFIX = "reasoning_gym:"
NUM_ROWS = {"train": 2048, "eval": 256}
MAX_FRUITLESS = 2000
"""Draws in a row that bring no new problem, after which a small task is held to be used up."""

SYSTEM_PROMPT = (
    "Solve the problem. Think step by step between <think> and </think>, then write the answer alone, in the form the problem "
    "asks for, between <answer> and </answer>."
)
"""What the model is told unless the configuration says otherwise: the scorer reads the answer between the tags."""


def rows(what: str, split: str, seed: int, limit: int | None) -> list[dict[str, Any]]:
    """Different problems of one split, the same for the same seed; no problem is in both splits.

    Args:
        what: key and value that name the task, ``data.dataset=reasoning_gym:chain_sum``.
        split: ``train`` or ``eval``.
        seed: of the run.
        limit: at most so many; none: 2048 to train on, 256 to evaluate on, or what a small task has.

    Returns:
        Rows with ``prompt``, ``answer`` and ``metadata`` (what the scorer needs beside them).

    Raises:
        ValueError: if the library is missing, or knows no such task.
    """
    task = what.partition(PREFIX)[2]
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(f"{what} needs the library reasoning-gym ({error}): pip install -e '.[gym]'") from None
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:5]
        raise ValueError(f"{what}: reasoning-gym has no such task; it has {len(DATASETS)}, such as {', '.join(near)}")
    count = min(limit or NUM_ROWS[split], NUM_ROWS[split])
    most = 2 * EVAL_SHARE * count + MAX_FRUITLESS
    source = reasoning_gym.create_dataset(
        task, size=most, seed=derive_seed(seed, f"reasoning_gym/{task}/{split}") % 2**31
    )
    found: dict[str, dict[str, Any]] = {}
    fruitless = 0
    for number in range(most):
        entry = source[number]
        question = entry["question"]
        if question in found or side(task, question) != split:
            fruitless += 1
        else:
            fruitless = 0
            found[question] = {"prompt": question, "answer": entry["answer"], "metadata": entry["metadata"]}
        if len(found) == count or fruitless == MAX_FRUITLESS:
            break
    return list(found.values())


def side(task: str, question: str) -> str:
    """``train`` or ``eval``, by a hash of the question alone: no seed or number moves a problem."""
    digest = hashlib.blake2b(f"{task}:{question}".encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_SHARE == 0 else "train"
