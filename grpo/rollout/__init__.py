"""Rollout: an engine (:class:`Engine`) samples a group of completions for each problem.

:class:`BuiltinEngine` samples in the training process. :mod:`grpo.vllm` samples from vLLM servers.
"""

from grpo.rollout.check import check_model
from grpo.rollout.draw import SamplingParams
from grpo.rollout.engine import BuiltinEngine
from grpo.rollout.interface import Engine, engine_with_weights
from grpo.rollout.stops import Stops, split_stop

__all__ = [
    "BuiltinEngine",
    "Engine",
    "SamplingParams",
    "Stops",
    "check_model",
    "engine_with_weights",
    "split_stop",
]
