"""Processes that run code of the user or of the model, and may be killed at any time.

:class:`Pool` has the worker processes and knows the objects that they load. A :class:`Request` is a
call of such an object, an :class:`Answer` is its result. Nothing here knows what the objects are
for: rewards and tools stand on it (docs/rewards.md, docs/tools.md). :mod:`grpo.workers.sandbox`
runs programs that the model wrote. The workers import this package too, so it imports no torch.
"""

from grpo.workers.host import Answer, Request, then
from grpo.workers.pool import Here, Pool, Worker

__all__ = ["Answer", "Here", "Pool", "Request", "Worker", "then"]
