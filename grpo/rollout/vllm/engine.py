"""The vLLM engine: each rollout gives the policy's weights to vLLM servers and samples from them over HTTP.

One request per completion, with the seed of that completion. Token ids are taken as the server returns them; their text is decoded here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from grpo.batch import Completion, Group, Problem
from grpo.config import RolloutConfig
from grpo.distributed import World
from grpo.model import Policy
from grpo.rollout.decode_loop import Prompts
from grpo.rollout.draw import SamplingParams
from grpo.rollout.stops import Stops
from grpo.rollout.vllm.client import Sampled, Server, ServerError
from grpo.rollout.vllm.keeper import KeptLog
from grpo.rollout.vllm.requests import Request, complete_all
from grpo.rollout.vllm.verify import probe_tokens
from grpo.rollout.vllm.weight_sync import Servers
from grpo.rollout.vllm.weights import WeightsFolder
from grpo.seeding import derive_seed


class VLLMEngine:
    """Samples completions of problems from vLLM servers (:class:`grpo.rollout.interface.Engine`)."""

    communicates = True
    may_capture = False

    def __init__(
        self,
        policy: Policy,
        servers: Sequence[str],
        *,
        world: World,
        rollout: RolloutConfig,
        root: nn.Module | None = None,
        probe_ids: Sequence[int] = (),
        uses: Sequence[tuple[int, Any]] | None = None,
        logs: Sequence[KeptLog] = (),
        warn: Callable[[str], None] = print,
    ):
        """All ranks build it together.

        Args:
            policy: its model, or its adapter, is what the servers get; under FSDP the sharded model.
            servers: their addresses, the same on all ranks, which share them.
            rollout: the section of the configuration.
            root: under FSDP the sharded module that holds the model; None: ``policy.model``.
            probe_ids: a prompt; its first tokens check that a server computes with the weights it was given.
            uses: for each kind of sampling to come, the tokens of its longest prompt and its :class:`SamplingParams`, which the servers must
                allow; None: ``rollout``, after a prompt of any length.
            logs: of servers that the trainer has started, in the order of ``servers``; on this machine.
            warn: called with a line of text if a server does not answer or has lost its weights.

        Raises:
            ServerError: on all ranks, if a server does not answer or cannot sample for this policy.
            ValueError: on all ranks, if the weights folder cannot be written.
        """
        self.policy, self.world = policy, world
        self.on_close: Callable[[], None] = lambda: None
        """Called by :meth:`close`: ends servers that were started for this engine."""
        self.vocabulary = policy.model.get_input_embeddings().weight.shape[0]
        pairs = zip(servers, logs or [None] * len(servers), strict=True)
        vllm = [Server(address, rollout.server_timeout_s, warn, log) for address, log in pairs]
        self.folder = WeightsFolder(rollout.weights_folder, world)
        probe_ids = probe_tokens(probe_ids, self.vocabulary)
        self.servers = Servers(
            vllm,
            policy,
            root=root or policy.model,
            folder=self.folder,
            probe_ids=probe_ids,
            world=world,
            warn=warn,
            weight_transfer=rollout.weight_transfer,
        )
        try:
            self.servers.check([(0, rollout)] if uses is None else uses)
        except BaseException:
            self.close()
            raise
        self.num_stale = 0
        """Completions that were sampled with other weights than the policy's, since the last call of :meth:`metrics`. None is used."""
        self._has_weights = False
        """True inside :meth:`weights`."""

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Sync the policy's weights to the servers, now, for all calls of :meth:`generate` inside the block. All ranks enter it together."""
        if self._has_weights:
            yield
            return
        self.servers.sync()
        self._has_weights = True
        try:
            yield
        finally:
            self._has_weights = False

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        address: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Group]:
        """See :meth:`grpo.rollout.interface.Engine.generate`. Completion g of a problem is requested with the seed ``derive_seed(*address, problem.index, g)``, and
        ``on_tokens`` is called when a completion has arrived.

        Raises:
            ServerError: if a server does not answer for ``server_timeout_s``, or does not return what was asked for.
        """
        G, stops = sampling.num_generations, Stops(self.policy.tokenizer, sampling.stop)
        own = self.servers.own
        longest = max((len(problem.prompt_ids) for problem in problems), default=0)
        for server in own:
            self.servers.check_use(server, longest, sampling)
        with nullcontext() if self._has_weights else self.weights():
            requests = [
                Request(own[p % len(own)], self._body(problem, g, sampling, stops, address))
                for p, problem in enumerate(problems)
                for g in range(G)
            ]
            answers, num_stale = complete_all(requests, self.servers, on_tokens)
        self.num_stale += num_stale
        pairs = zip(requests, answers, strict=True)
        completions = self._completions(
            [self._checked(r.server, a, sampling, stops) for r, a in pairs], sampling, stops
        )
        return [Group(problem, tuple(completions[p * G : (p + 1) * G])) for p, problem in enumerate(problems)]

    def dry_run(self, prompts: Prompts, sampling: SamplingParams) -> None:
        """Nothing: the servers have the KV cache."""

    def kept_bytes(self) -> int:
        """0: the servers have the weights that sample, and the KV cache."""
        return 0

    def metrics(self) -> dict[str, float]:
        """``sampling/stale_completions``: see :attr:`num_stale`."""
        num_stale, self.num_stale = self.num_stale, 0
        return {"sampling/stale_completions": float(num_stale)}

    def close(self) -> None:
        """Delete the weights folder, and end the servers if they were started for this engine."""
        self.folder.close()
        self.on_close()

    def __str__(self) -> str:
        """``vLLM 0.32.0 at http://host:8000``."""
        versions = sorted({facts.version for facts in self.servers.facts.values()})
        return f"vLLM {', '.join(versions)} at {', '.join(server.address for server in self.servers.all)}"

    def _body(self, problem: Problem, g: int, sampling: SamplingParams, stops: Stops, address) -> dict[str, Any]:
        """Of the request for completion ``g``. Every value is given: the server would take the others from ``generation_config.json``."""
        body = {
            "prompt": list(problem.prompt_ids),
            "max_tokens": sampling.max_completion_length,
            "min_tokens": 0,
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": stops.strings,
            "stop_token_ids": [*self.policy.eos_ids, *stops.ids],
            "include_stop_str_in_output": True,
            "skip_special_tokens": True,
            "ignore_eos": True,  # the policy's own EOS ids are among the stop tokens
            "return_token_ids": True,
        }
        if not sampling.is_greedy:
            body |= {"seed": derive_seed(*address, problem.index, g), "logprobs": 0}
        return body

    def _checked(self, server: Server, answer: Sampled, sampling: SamplingParams, stops: Stops) -> Sampled:
        """The answer, without tokens behind the first end that :class:`Stops` finds; ServerError if the ids cannot be a completion."""
        ids = answer.ids
        if len(ids) > sampling.max_completion_length:
            raise ServerError(
                f"{server} returned {len(ids)} tokens where {sampling.max_completion_length} were asked for at most"
            )
        if not all(isinstance(id, int) and 0 <= id < self.vocabulary for id in ids):
            raise ServerError(
                f"{server} returned token ids outside of the vocabulary of {self.vocabulary}: start it with the model that is trained"
            )
        if answer.finish_reason == "length" and len(ids) < sampling.max_completion_length:
            raise ServerError(
                f"{server} ended a completion after {len(ids)} tokens where {sampling.max_completion_length} were asked for: start it without "
                "max_new_tokens in --generation-config and --override-generation-config"
            )
        end = stops.first_end(ids, 0) if stops.strings else None
        return answer if end is None else Sampled(ids[:end], answer.logprobs[:end], "stop")

    def _completions(self, answers: list[Sampled], sampling: SamplingParams, stops: Stops) -> list[Completion]:
        ends = {*self.policy.eos_ids, *stops.ids}
        texts = self.policy.tokenizer.batch_decode([answer.ids for answer in answers], skip_special_tokens=True)
        return [
            Completion(tuple(a.ids), text, a.finish_reason == "stop" or a.ids[-1] in ends, tuple(a.logprobs))
            for a, text in zip(answers, texts, strict=True)
        ]
