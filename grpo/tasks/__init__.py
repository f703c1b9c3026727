"""Embedded problems that need no download, and the tiny model they use."""

from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.countdown import Countdown
from grpo.tasks.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Arithmetic, Countdown)}


def load_task(name: str) -> Task:
    """The task called ``name``.

    Raises:
        ValueError: if there is none; the message lists those there are.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the embedded tasks are {', '.join(sorted(TASKS))}")
    return TASKS[name]()


__all__ = ["TASKS", "Task", "load_task"]
