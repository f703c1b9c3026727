"""Processes that run code of the user or of the model, and may be killed at any time (docs/rewards.md, docs/tools.md).

:class:`Pool` has the worker processes and the objects that they load, :class:`Request` and :class:`Answer` are what is
said between them and the trainer. :mod:`grpo.workers.sandbox` runs programs that the model wrote. Nothing here knows
what the objects are for: rewards and tools stand on it. The workers import this package too, so it imports no torch.
"""

from grpo.workers.host import Answer, Request, then
from grpo.workers.pool import Here, Pool, Worker

__all__ = ["Answer", "Here", "Pool", "Request", "Worker", "then"]
