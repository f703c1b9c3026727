"""Rollout: sample a group of completions for each problem.

An engine (:class:`Engine`) samples by ``generate(problems, sampling, *, address, on_tokens=None) -> list[Group]``. It
takes prompts (token ids), :class:`SamplingParams`, and ``address``, which sets the seeds. It returns token ids, the
sampler's log-probabilities, and whether each completion finished or was cut. :class:`BuiltinEngine` is the engine in
the training process; :mod:`grpo.vllm` asks vLLM servers.
"""

from grpo.rollout.check import check_sampling
from grpo.rollout.draw import SamplingParams
from grpo.rollout.engine import BuiltinEngine, split_into_waves
from grpo.rollout.interface import Engine, sampling_weights
from grpo.rollout.stops import Stops, split_stop

__all__ = [
    "BuiltinEngine",
    "Engine",
    "SamplingParams",
    "Stops",
    "check_sampling",
    "sampling_weights",
    "split_into_waves",
    "split_stop",
]
