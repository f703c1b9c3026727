"""Reward functions, built-in and the user's own, most of them in worker processes. See
``docs/rewards.md``.

The worker processes import this package too, so it imports no torch.
"""

from grpo.rewards.answers import completion_text
from grpo.rewards.calls import RewardContractError
from grpo.rewards.functions import BUILTIN, load_reward
from grpo.rewards.runner import RewardResult, RewardRunner, RewardSpec

__all__ = [
    "BUILTIN", "RewardContractError", "RewardResult", "RewardRunner", "RewardSpec", "completion_text", "load_reward",
]  # fmt: skip
