"""The vLLM engine: each rollout gives the policy's weights to vLLM servers and samples from them
over HTTP.

One request per completion, with the seed of that completion, token ids in and token ids out.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
from torch import nn

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.algorithm.seeding import derive_seed
from grpo.distributed import World, full_trained_weights, is_sharded
from grpo.model import Policy
from grpo.rollout import SamplingParams, Stops
from grpo.rollout.interface import ROWS_PER_CALL, Replies, grouped
from grpo.vllm.client import Sampled, Server, ServerError, session
from grpo.vllm.weights import Probe, WeightsFolder

MAX_REQUESTS = 512
"""Most requests in flight over all ranks and servers, each with a connection of its own."""
FULL_MODEL = "grpo-whole-"
ADAPTER = "grpo-adapter-"
"""Beginnings of the versions of weights that replace a server's, and of adapters beside these."""
LOWEST_TEMPERATURE = 0.01
"""vLLM computes with this one in place of lower ones."""


class VLLMEngine:
    """Samples completions of problems from vLLM servers
    (:class:`grpo.rollout.interface.Engine`)."""

    communicates = True
    rows_per_call = ROWS_PER_CALL

    def __init__(
        self,
        policy: Policy,
        servers: Sequence[Server],
        *,
        world: World,
        weights_folder: str,
        root: nn.Module | None = None,
        probe_ids: Sequence[int] = (),
    ):
        """All ranks build it together, with the same servers; arguments as of
        :func:`grpo.vllm.build_engine`.

        ServerError, on all ranks, if a server does not answer or cannot sample for this policy.
        """
        self.policy = policy
        self.servers = list(servers)
        self.world = world
        self.on_close: Callable[[], None] = lambda: None
        """Called by :meth:`close`: ends servers that were started for this engine."""
        self.probe = Probe(policy, root or policy.model, probe_ids)
        self.version: str | None = None
        """A name for the weights that the servers have, used once; None outside of
        :meth:`weights`."""
        self._adapter: Path | None = None
        """The files of the adapter that the servers have."""
        self.folder = WeightsFolder(weights_folder)
        self.loop = asyncio.new_event_loop()
        # In a thread of its own: in a notebook this thread has a loop already.
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        with world.fail_together():
            self.wait_for(self._for_all(self._check))

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Give the policy's weights to the servers, now, for all calls of :meth:`generate` inside
        the block.

        ServerError, on all ranks, if a server does not load them.
        """
        if self.version is not None:
            yield
            return
        # Under FSDP the forward pass and the gathering are collectives.
        with nullcontext() if is_sharded(self.probe.root) else self.world.fail_together():
            self.probe.update()
            unreached = self.policy.unreached.values()
            weights = full_trained_weights(self.policy.trained, unreached)
        kind = ADAPTER if self.policy.adapter else FULL_MODEL
        version = kind + uuid.uuid4().hex
        with self.world.fail_together():
            if self.world.is_main:
                files = self.folder.write(self.policy, weights, version)
                self.wait_for(self._for_all(self._load, files, version))
                done = files
                if self.policy.adapter:
                    # vLLM may read an adapter's files until the next one is loaded.
                    done = self._adapter
                    self._adapter = files
                if done is not None:
                    shutil.rmtree(done, ignore_errors=True)
        self.version = self.world.from_main(version)
        try:
            yield
        finally:
            self.version = None

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
        replies: Replies | None = None,
    ) -> list[Group]:
        """See :meth:`grpo.rollout.interface.Engine.generate`; ``on_tokens`` is called when a
        completion has arrived.

        ServerError if a server does not answer in time, or does not return what was asked for.
        """
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise ServerError(
                f"vLLM samples at temperatures of {LOWEST_TEMPERATURE} or above, or greedily at 0"
            )
        stops = Stops(self.policy, sampling.stop)
        bodies = []
        for problem in problems:
            for g in range(sampling.num_generations):
                seed = derive_seed(*seed_key, problem.index, g)
                bodies.append(_request(problem, seed, sampling, stops))
        with self.weights():
            rows = self._sample_all(bodies, stops, on_tokens, replies)
            completions = self.wait_for(rows)
        if sampling.is_greedy:
            completions = [replace(c, sampling_logprobs=()) for c in completions]
        return grouped(problems, completions, stops)

    def dry_run(self, *_: Any) -> None:
        """Do nothing: a server has its own memory, and bounds what it takes of it."""

    def close(self) -> None:
        """Delete the weights, and end the servers if they were started for this engine."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        shutil.rmtree(self.folder.path, ignore_errors=True)
        self.on_close()

    def wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Its result. An exception that a signal handler raises here cancels it, so that servers
        stop computing.

        Replies are called in this thread meanwhile, as by the built-in engine: a tool may refuse
        other threads.
        """
        self.calls = SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        future.add_done_callback(self.calls.put)
        try:
            while (call := self.calls.get()) is not future:
                call()
            return future.result()
        finally:
            future.cancel()

    async def _for_all(self, call: Callable[..., Coroutine], *args: Any) -> None:
        async with session() as http:
            await asyncio.gather(*[call(server, http, *args) for server in self.servers])

    async def _check(self, server: Server, http: httpx.AsyncClient) -> None:
        """Give the server the name of its model. ServerError if its log-probs would be wrong."""
        models = await server.call(http, "GET", "/v1/models")
        server.model = models.json()["data"][0]["id"]
        info = await server.call(http, "GET", "/server_info?config_format=json")
        settings = info.json()["vllm_config"]
        if settings["model_config"]["logprobs_mode"] != "processed_logprobs":
            raise ServerError(
                f"{server} returns other log-probs: start it with --logprobs-mode processed_logprobs"
            )
        weights = await server.call(http, "GET", "/weight_info")
        if self.policy.adapter and weights.json()["weight_version"].startswith(FULL_MODEL):
            raise ServerError(
                f"{server} has the weights of another run, which an adapter is not for: start it again"
            )

    async def _load(
        self,
        server: Server,
        http: httpx.AsyncClient,
        folder: Path,
        version: str,
    ) -> None:
        await server.call(http, "POST", "/update_weight_version", {"new_version": version})
        if self.policy.adapter is None:
            model = server.model
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await server.call(http, "POST", "/collective_rpc", body)
        else:
            model = version
            body = {"lora_name": model, "lora_path": str(folder)}
            await server.call(http, "POST", "/v1/load_lora_adapter", body)
            if self._adapter is not None:
                body = {"lora_name": self._adapter.name}
                await server.call(http, "POST", "/v1/unload_lora_adapter", body)

        ids = self.probe.ids
        found = await server.prompt_logprobs(http, ids, model=model, version=version)
        if problem := self.probe.compare(server, found):
            raise ServerError(
                f"{server} does not compute with the policy's weights: {problem}; is it another "
                "model, or its --dtype not runtime.precision?"
            )

    async def _sample_all(
        self,
        bodies: Sequence[dict[str, Any]],
        stops: Stops,
        on_tokens: Callable[[int], None] | None,
        replies: Replies | None,
    ) -> list[Completion]:
        """The completions of all requests, in order; each server gets the same number of them."""
        in_flight = asyncio.Semaphore(max(MAX_REQUESTS // self.world.size, 1))

        async def complete(row: int, body: dict[str, Any]) -> Completion:
            server = self.servers[row % len(self.servers)]
            settings = body["sampling_params"]
            ids = []
            logprobs = []
            mask = []
            while True:
                turn_settings = settings | {"max_tokens": settings["max_tokens"] - len(ids)}
                if ids:
                    turn_settings["seed"] = derive_seed(settings["seed"], "turn", len(ids))
                request = {
                    "token_ids": body["token_ids"] + ids,
                    "sampling_params": turn_settings,
                }
                async with in_flight:
                    sampled = await self._sample(server, http, request)
                if on_tokens is not None:
                    on_tokens(len(sampled.ids))
                end = stops.first_end(sampled.ids) if stops.strings else None
                turn = sampled.ids[:end]
                finished = end is not None or sampled.finish_reason == "stop"
                ids += turn
                mask += [True] * len(turn)
                logprobs += [token.logprob for token in sampled.logprobs.content[:end]]

                answer = None
                if replies and finished:
                    asked = Future()
                    self.calls.put(partial(_ask, asked, replies, row, turn))
                    future = await asyncio.wrap_future(asked)
                    answer = await asyncio.wrap_future(future)
                if answer is None:
                    return Completion(
                        tuple(ids),
                        "",
                        finished,
                        tuple(logprobs),
                        loss_mask=() if all(mask) else tuple(mask),
                    )
                ids += answer
                mask += [False] * len(answer)
                logprobs += [0.0] * len(answer)

        async with session() as http:
            tasks = [asyncio.ensure_future(complete(*request)) for request in enumerate(bodies)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _sample(
        self,
        server: Server,
        http: httpx.AsyncClient,
        body: dict[str, Any],
    ) -> Sampled:
        """One completion; ServerError if it is not what was asked for, or of other weights."""
        # A salt keeps what the prefix cache holds of other weights out of use.
        body["cache_salt"] = self.version
        if self.policy.adapter:
            body["model"] = self.version
        answer = await server.generate(http, body)
        (sampled,) = answer.choices
        length = len(sampled.ids)
        most = body["sampling_params"]["max_tokens"]
        if length > most or (length < most and sampled.finish_reason == "length"):
            raise ServerError(
                f"{server} ended a completion after {length} of {most} tokens: raise --max-model-len"
            )
        versions = {weights["version"] for weights in sampled.weight_versions}
        if versions != {self.version}:
            raise ServerError(
                f"{server} has lost this step's weights: it was started again, or another run uses it"
            )
        return sampled


def _request(
    problem: Problem,
    seed: int,
    sampling: SamplingParams,
    stops: Stops,
) -> dict[str, Any]:
    """The body of the request for one completion."""
    settings = {
        "max_tokens": sampling.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # A server takes what a request leaves out from the checkpoint's generation_config.json.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": stops.strings,
        "stop_token_ids": stops.ids,
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "ignore_eos": True,  # the policy's own EOS ids are among the stop tokens
        "seed": seed,
        "logprobs": 0,
    }
    return {"token_ids": list(problem.prompt_ids), "sampling_params": settings}


def _ask(asked: Future, replies: Replies, row: int, turn: list[int]) -> None:
    asked.set_result(replies(row, turn))
