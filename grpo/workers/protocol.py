"""The messages between the trainer and its worker processes.

The trainer sends a list of :class:`Request` and a time limit in seconds. The worker process sends
back a list with one :class:`Answer` for each request. Both lists are pickled.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import cloudpickle

HOST_KEY = "host"
"""Key of the :class:`grpo.workers.host.Host` among its own objects. A request with this key and the
method ``load`` makes the Host load an object."""


@dataclass(frozen=True)
class Factory:
    """A recipe for an object: a process makes it by ``make(objects, *arguments, user_object)``.

    ``objects`` holds all objects of that process by their keys, so that a reward can use an
    environment.
    """

    make: Callable
    arguments: tuple
    """Names and settings."""
    user_object: Any = None
    """The user's function or class, around which ``make`` builds the object. Default: none.

    In a worker process: its pickled bytes, which :meth:`grpo.workers.host.Host.load` unpickles.
    """

    def __reduce__(self) -> tuple:
        # Unpickling the user's function may import modules that the worker lacks. If it were a
        # plain part of the message, the worker could not read the message and would end. As bytes,
        # it is unpickled in Host.load(), and only this request fails. `make` and `arguments` need
        # no such care: `make` is a class of grpo, and `arguments` holds built-in types.
        data = None if self.user_object is None else cloudpickle.dumps(self.user_object)
        return Factory, (self.make, self.arguments, data)


@dataclass(frozen=True)
class Request:
    """A call of one method of a loaded object."""

    key: Hashable
    """Key under which the object was loaded."""
    method: str
    arguments: tuple = ()


@dataclass(frozen=True)
class Answer:
    """The result of one request, or the reason why it has none."""

    status: str = "ok"
    """One of these:

    - ``"ok"``: the method returned ``value``.
    - ``"error"``: the method, loading the object, or pickling a message raised an exception.
    - ``"timeout"``: there was no result in time. Either an awaitable was cancelled and the process
      lives (``is_worker_lost`` is False), or the process was killed (``is_worker_lost`` is True).
    - ``"died"``: the worker process ended for another reason, or its worker is being closed.
      ``is_worker_lost`` is True.
    - ``"skipped"``: the caller did not send the request, and made this answer itself.
    """
    value: Any = None
    """Result of the method. For an error: the exception if it is a :class:`grpo.system.UserError`,
    otherwise None. Callers look at the type: a ``RewardContractError``, for example, ends the run.
    """
    message: str = ""
    """The whole text of an exception, without its type. For the statuses ``"timeout"``, ``"died"``
    and ``"skipped"``: the cause, as a clause about the object, such as ``it did not return within
    5 s``. Callers put it after the object's name."""
    error: str = ""
    """An exception in one line: its type and the first line of its text. Otherwise empty."""
    trace: str = ""
    """Traceback of an exception, without the frames of grpo at its beginning. Otherwise empty."""
    is_worker_lost: bool = False
    """True if the worker process has ended, so that its objects and what they stored are gone."""
