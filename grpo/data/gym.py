"""Problems of the package reasoning-gym (``data.dataset=reasoning_gym:<task>``), which is imported only when a task is used."""

import difflib
from typing import Any

from grpo.algorithm.seeding import derive_seed
from grpo.data.task import EVAL_SHARE, split_of_problem
from grpo.system import import_extra

PREFIX = "reasoning_gym:"
NUM_ROWS = {"train": 2048, "eval": 256}
MAX_DRAWS_WITHOUT_NEW_ROW = 2000
"""After so many draws in a row without a new problem, the task is taken to have no more problems."""

SYSTEM_PROMPT = (
    "Solve the problem. Think step by step between <think> and </think>, then write the answer alone, in the form the problem "
    "asks for, between <answer> and </answer>."
)
"""The system prompt unless the configuration sets one: the reward reads the answer between the tags."""


def rows(setting: str, split: str, seed: int, limit: int | None) -> list[dict[str, Any]]:
    """Different problems of one split, ``train`` or ``eval``. The same seed gives the same rows, and no problem is in both splits.

    Args:
        setting: key and value that name the task, ``data.dataset=reasoning_gym:chain_sum``.
        limit: the largest number of rows; none: ``NUM_ROWS``. A small task may have fewer.

    Returns:
        Rows with ``prompt``, ``answer`` and ``metadata`` (what the task's scorer needs besides the two).

    Raises:
        ValueError: if the package is not installed, or has no such task.
    """
    task = setting.partition(PREFIX)[2]
    library = import_extra("reasoning_gym", "gym", setting)
    tasks = library.factory.DATASETS
    if task not in tasks:
        similar = difflib.get_close_matches(task, tasks, n=3) or sorted(tasks)[:5]
        others = f"it has {len(tasks)} tasks, such as {', '.join(similar)}"
        raise ValueError(f"{setting}: reasoning-gym has no such task; {others}")
    count = min(limit or NUM_ROWS[split], NUM_ROWS[split])
    max_draws = 2 * EVAL_SHARE * count + MAX_DRAWS_WITHOUT_NEW_ROW
    task_seed = derive_seed(seed, f"reasoning_gym/{task}/{split}") % 2**31
    dataset = library.create_dataset(task, size=max_draws, seed=task_seed)
    found: dict[str, dict[str, Any]] = {}
    draws_without_new_row = 0
    for number in range(max_draws):
        entry = dataset[number]
        question = entry["question"]
        is_new = question not in found and split_of_problem(task, question) == split
        draws_without_new_row = 0 if is_new else draws_without_new_row + 1
        if is_new:
            found[question] = {"prompt": question, "answer": entry["answer"], "metadata": entry["metadata"]}
        if len(found) == count or draws_without_new_row == MAX_DRAWS_WITHOUT_NEW_ROW:
            break
    return list(found.values())
