"""Reward functions: the built-in ones and the user's. Most of them run in worker processes.

``runner.py`` scores a batch by requests to workers, ``calls.py`` answers them there, and
``functions.py`` finds the functions. ``builtin.py``, ``answers.py`` and ``code.py`` are the
built-in rewards. ``scores.py`` turns the trainer's groups into a batch. See ``docs/rewards.md``.

The worker processes import this package too, so it imports no torch.
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
