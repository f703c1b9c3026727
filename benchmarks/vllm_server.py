"""The engine ``vllm`` for rollout.py: a running server, which gets weights and samples over HTTP as
in training."""

import statistics
import time
from contextlib import ExitStack

from grpo.algorithm.batch import Problem
from grpo.config import RuntimeConfig
from grpo.distributed import start_world
from grpo.model import Policy
from grpo.rollout import SamplingParams
from grpo.vllm.client import Server
from grpo.vllm.engine import VLLMEngine


class ForcedLengths(VLLMEngine):
    """Completion g of problem u ends at ``lengths_UG[u, g]`` and nowhere else. The problems are
    those of all ``u``, in order."""

    def _sample_all(self, requests, *args):
        lengths = self.lengths_UG.flatten().tolist()
        for (_, settings), length in zip(requests, lengths, strict=True):
            settings.update(max_tokens=length, stop_token_ids=[])
        return super()._sample_all(requests, *args)


class Served:
    """A server; a call samples once, with the weights of the last :meth:`sync`."""

    def __init__(
        self,
        address: str,
        policy: Policy,
        threads: int,
    ):
        world = start_world(RuntimeConfig(device=policy.device.type, threads_per_rank=threads))
        self.engine = ForcedLengths(
            policy,
            [Server(address, 600.0)],
            world=world,
            weights_folder="/dev/shm",
            root=policy.model,
            probe_ids=(),
        )
        self.inside = ExitStack()
        self.seconds = []

    def sync(self) -> None:
        """Load the current weights into the server."""
        self.inside.close()
        start = time.perf_counter()
        self.inside.enter_context(self.engine.weights())
        self.seconds.append(time.perf_counter() - start)

    def __call__(self, _, prompts_UL, lengths_UG, T) -> int:
        problems = [Problem(u, "", tuple(row)) for u, row in enumerate(prompts_UL.tolist())]
        self.engine.lengths_UG = lengths_UG.cpu()
        groups = self.engine.generate(
            problems,
            SamplingParams(lengths_UG.shape[1], T),
            seed_key=(0, "benchmark", 0),
        )
        return sum(len(c.ids) for group in groups for c in group.completions)

    def stop(self) -> float:
        """Returns the median seconds of a weight sync."""
        self.inside.close()
        self.engine.close()
        return statistics.median(self.seconds[1:])
