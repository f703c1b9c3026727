"""Reward functions, built-in and the user's own, in worker processes that can be killed. The package imports no torch: they import it."""

from grpo.rewards.extract import completion_text
from grpo.rewards.registry import BUILTIN, load_reward
from grpo.rewards.result import RewardContractError, RewardResult, RewardSpec
from grpo.rewards.runner import RewardRunner

__all__ = [
    "BUILTIN", "RewardContractError", "RewardResult", "RewardRunner", "RewardSpec", "completion_text", "load_reward",
]  # fmt: skip
