"""Reward functions, built in or written by the user. Most of them run in worker processes.

``runner.py`` scores a batch: it sends requests to worker processes. ``calls.py`` answers the
requests in a worker process. ``functions.py`` loads a function by its name. ``builtin.py``,
``answers.py`` and ``code.py`` are the built-in rewards. ``scores.py`` passes the trainer's groups
of completions to ``runner.py``. ``docs/rewards.md`` is the page for users.

The worker processes import this package too, so importing the package does not import torch.
"""

from grpo.rewards.answers import completion_text
from grpo.rewards.calls import RewardContractError
from grpo.rewards.functions import BUILTIN_REWARDS, load_reward
from grpo.rewards.runner import RewardResult, RewardRunner, RewardSpec

__all__ = [
    "BUILTIN_REWARDS",
    "RewardContractError",
    "RewardResult",
    "RewardRunner",
    "RewardSpec",
    "completion_text",
    "load_reward",
]
