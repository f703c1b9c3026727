"""Built-in tasks, which need no download, and the tiny model that is trained on them."""

from grpo.data.arithmetic import Arithmetic
from grpo.data.countdown import Countdown
from grpo.data.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Arithmetic, Countdown)}


def load_task(name: str) -> Task:
    """The built-in task called ``name``. ``ValueError`` lists the tasks if there is none of that name."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the built-in tasks are {', '.join(sorted(TASKS))}")
    return TASKS[name]()


__all__ = ["TASKS", "Task", "load_task"]
