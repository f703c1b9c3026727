"""What ``algorithm.name`` stands for."""

from typing import Any

_GRPO = dict(objective="clip", baseline="mean", scale="group", aggregation="response_mean", importance_level="token")
PRESETS: dict[str, dict[str, Any]] = {
    # name -> the keys of `algorithm` that differ from the field defaults; sources in docs/algorithm.md
    "grpo": _GRPO,
    "dr_grpo": _GRPO | dict(scale="none", aggregation="constant", beta=0.0),
    "dapo": _GRPO | dict(aggregation="token_mean", epsilon_high=0.28, beta=0.0, dynamic_sampling=True),
    "gspo": _GRPO | dict(importance_level="sequence", epsilon=3e-4, epsilon_high=4e-4, beta=0.0),
    "cispo": _GRPO | dict(objective="cispo", aggregation="token_mean", epsilon_high=5.0, beta=0.0),
    "rloo": _GRPO | dict(objective="reinforce", baseline="leave_one_out", scale="none", beta=0.0),
    "reinforce": _GRPO | dict(objective="reinforce", baseline="none", scale="none", beta=0.0),
    "reinforce_baseline": _GRPO | dict(objective="reinforce", beta=0.0),
}
