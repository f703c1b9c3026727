"""The engine ``vllm`` for rollout.py: a running vLLM server, which gets the weights and samples over HTTP as in training."""

import statistics
import time
from contextlib import ExitStack

from grpo.batch import Problem
from grpo.config import RolloutConfig, RuntimeConfig
from grpo.distributed import start_world
from grpo.model import Policy
from grpo.rollout import SamplingParams
from grpo.rollout.vllm import VLLMEngine


class ForcedLengths(VLLMEngine):
    """Completion g of problem u ends at ``lengths_UG[u, g]`` and nowhere else."""

    def _body(self, problem, g, sampling, stops, address):
        length = int(self.lengths_UG[problem.index, g])
        return super()._body(problem, g, sampling, stops, address) | {"max_tokens": length, "stop_token_ids": []}

    def _checked(self, server, answer, sampling, stops):
        return super()._checked(server, answer._replace(finish_reason="stop"), sampling, stops)


class Served:
    """A server; a call samples once, with the weights of the last :meth:`sync`."""

    def __init__(self, address: str, policy: Policy, threads: int, weights_folder: str):
        world = start_world(RuntimeConfig(device=policy.device.type, threads_per_rank=threads))
        rollout = RolloutConfig(engine="vllm", weights_folder=weights_folder)
        self.engine = ForcedLengths(policy, [address], world=world, rollout=rollout)
        self.inside, self.seconds = ExitStack(), []

    def sync(self) -> None:
        """Load the current weights into the server, which also empties its prefix cache."""
        self.inside.close()
        start = time.perf_counter()
        self.inside.enter_context(self.engine.weights())
        self.seconds.append(time.perf_counter() - start)

    def __call__(self, _, prompts_UL, lengths_UG, T) -> int:
        problems = [Problem(u, "", tuple(row)) for u, row in enumerate(prompts_UL.tolist())]
        self.engine.lengths_UG = lengths_UG.cpu()
        groups = self.engine.generate(problems, SamplingParams(lengths_UG.shape[1], T), address=(0, "benchmark", 0))
        return sum(len(c.ids) for group in groups for c in group.completions)

    def stop(self) -> float:
        """Returns the median seconds of a weight sync."""
        self.inside.close()
        self.engine.close()
        return statistics.median(self.seconds[1:])
