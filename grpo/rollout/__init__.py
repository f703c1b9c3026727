"""Problems to groups of sampled completions."""

from grpo.rollout.draw import Sampling
from grpo.rollout.engine import generate, waves

__all__ = ["Sampling", "generate", "waves"]
