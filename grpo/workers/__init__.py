"""Worker processes run code that may hang or crash, and can be killed without harm to the run.

A reward, a tool or an environment is loaded as an *object* by a worker process, and stays there.
The trainer does not call it directly. It sends a :class:`Request`, which names the object, the
method and the arguments, and gets an :class:`Answer`: the result, or the way in which the call
failed. This is the only protocol, and nothing here knows what an object is for.

::

    trainer's process    callers          send requests to a worker: grpo.rewards and grpo.turns
                         Pool             several workers, and the recipes of their objects
                         Worker           a thread; starts a process, and later another if need be
                         WorkerProcess    sends requests, waits, kills a process that is late
                           | a socket
    worker process       Host             loads objects, calls their methods, sends answers
                         object           a reward function with its settings, for example;
                                          convert_result() lets the user's function be
                                          sync or async

A process that does not answer in time is killed, with all processes of its process group: a call
that hangs in Python cannot be stopped in another way. The answer says ``"timeout"``, the objects of
the process are lost, and the next request starts a new process, which loads each object again
before the first request to it. However the trainer ends, its workers end with it.

A worker protects the run from mistakes, not from malice: it has all rights of the user. Code that
the model wrote runs in a *sandbox* (:func:`grpo.workers.sandbox.run_python`), where the kernel
denies access to the machine's files, its network and its other processes.

Read ``protocol.py``, ``pool.py``, ``process.py`` and ``host.py`` in this order. The sandbox uses
none of them: read ``sandbox.py``, ``sandbox_driver.py`` and ``sandbox_linux.py``. A worker process
imports this package when it starts, so nothing here imports torch.
"""

from grpo.workers.host import convert_result
from grpo.workers.pool import InProcessWorker, Pool, Worker
from grpo.workers.protocol import Answer, Request

__all__ = [
    "Answer",
    "InProcessWorker",
    "Pool",
    "Request",
    "Worker",
    "convert_result",
]
