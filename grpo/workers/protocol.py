"""The messages between the trainer and its worker processes.

The trainer sends a list of :class:`Request` and a time limit in seconds. The worker process sends
back a list with one :class:`Answer` for each request. Both lists are pickled.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import cloudpickle

HOST_KEY = "host"
"""Key of the :class:`grpo.workers.host.Host`, which is an object itself: its method ``load`` loads
another one."""


@dataclass(frozen=True)
class Factory:
    """A recipe for an object. A process loads it by ``make(objects, *arguments, user_object)``.

    ``objects`` holds all objects of that process by their keys, so that a reward can use an
    environment.
    """

    make: Callable
    arguments: tuple
    user_object: Any = None
    """A function or class of the user's program; bytes, once it is pickled. Default: none."""

    def __reduce__(self) -> tuple:
        # Pickled within the pickled message: if the worker cannot unpickle it, this request fails,
        # and the connection can still be used.
        data = None if self.user_object is None else cloudpickle.dumps(self.user_object)
        return Factory, (self.make, self.arguments, data)


@dataclass(frozen=True)
class Request:
    """A call of one method of a loaded object."""

    key: Hashable
    """Key of the object."""
    method: str
    arguments: tuple = ()


@dataclass(frozen=True)
class Answer:
    """The result of one request, or the reason why it has none."""

    status: str = "ok"
    """``"ok"``, ``"error"`` (the method raised), ``"timeout"``, ``"died"`` (the worker process
    ended) or ``"skipped"`` (the request was not sent)."""
    value: Any = None
    """Result of the method. For an error: the exception, if it is a
    :class:`grpo.system.UserError`."""
    message: str = ""
    """Text of an exception, or the cause of a timeout or a death."""
    error: str = ""
    """Type and message of an exception, in one line."""
    trace: str = ""
    """Traceback of an exception, from the user's code on."""
    is_worker_lost: bool = False
    """True if the worker process has ended, so that the state of its objects is gone."""
