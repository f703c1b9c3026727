"""The engine that loads the policy's weights into vLLM servers before each rollout, and samples
from the servers over HTTP.

Each completion is one request. With tools a completion has turns (tokens up to a tool's answer),
and each turn is one request. Each request has its own seed. Prompts and completions travel as token
ids, because text that is tokenized again may give other tokens.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
from torch import nn

from grpo.algorithm.batch import Group, Problem
from grpo.algorithm.seeding import derive_seed
from grpo.distributed import World, full_trained_weights, is_sharded
from grpo.model import Policy
from grpo.rollout import SamplingParams, Stops
from grpo.rollout.decode_loop import Row, grouped
from grpo.rollout.interface import ROWS_PER_CALL, Replies
from grpo.vllm.client import Sampled, Server, ServerError, session
from grpo.vllm.weights import Probe, WeightsFolder

MAX_REQUESTS = 512
"""Limit on the requests in flight over all ranks and servers. Each request has its own
connection."""
FULL_MODEL_PREFIX = "grpo-whole-"
ADAPTER_PREFIX = "grpo-adapter-"
"""Prefixes of version names. A version with the first prefix replaces the server's weights. A
version with the second prefix is an adapter beside the server's weights."""
MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0 at which vLLM samples. vLLM raises a lower value to this one."""


class VLLMEngine:
    """Engine that samples completions of problems from vLLM servers. The interface is
    :class:`grpo.rollout.interface.Engine`."""

    # All ranks gather and load the weights together.
    uses_collectives = True
    rows_per_call = ROWS_PER_CALL

    def __init__(
        self,
        policy: Policy,
        servers: Sequence[Server],
        *,
        world: World,
        weights_folder: str,
        root: nn.Module,
        probe_ids: Sequence[int],
    ):
        """Connect to the servers. All ranks make this call together, with the same servers.

        Args:
            weights_folder: value of ``rollout.weights_folder``, a folder that the servers can read.
            root: the module that holds the policy's model.
            probe_ids: token ids of a prompt, for :class:`grpo.vllm.weights.Probe`.

        Raises:
            ServerError: on all ranks, if a server does not answer or cannot sample for this policy.
        """
        self.policy = policy
        self.servers = servers
        self.world = world
        self.on_close: Callable[[], None] = lambda: None
        """Function that :meth:`close` calls. It ends the server that was started for this engine,
        if there is one."""
        self.probe = Probe(policy, root, probe_ids)
        self.version: str | None = None
        """Name of the weights in the servers; None outside :meth:`weights`. Each load has a new
        name."""
        self._adapter_folder: Path | None = None
        """Folder of the adapter that the main rank loaded last; None before, and on other ranks."""
        self.folder = WeightsFolder(weights_folder)
        self.loop = asyncio.new_event_loop()
        # The loop has its own thread, since in a notebook the calling thread runs another loop.
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        with world.fail_together():
            self.wait_for(self._for_all(self._check))

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Load the policy's weights into the servers, for all calls of :meth:`generate` inside the
        block.

        All ranks enter the block together. Of two nested blocks, the inner block loads nothing.

        Raises:
            ServerError: on all ranks, if a server does not load the weights.
        """
        if self.version is not None:
            yield
            return
        # Under FSDP the forward pass and the gathering are collectives, which must not be inside
        # fail_together().
        together = self.world.fail_together
        if is_sharded(self.probe.root):
            together = nullcontext
        with together():
            self.probe.update()
            unused_by_text = self.policy.unused_by_text.values()
            weights = full_trained_weights(self.policy.trained_model, unused_by_text)

        prefix = ADAPTER_PREFIX if self.policy.adapter else FULL_MODEL_PREFIX
        version = prefix + uuid.uuid4().hex
        with self.world.fail_together():
            if self.world.is_main:
                folder = self.folder.write(self.policy, weights, version)
                self.wait_for(self._for_all(self._load, folder, version))
                unused = folder
                if self.policy.adapter:
                    # vLLM may read the files of an adapter until the next one is loaded.
                    unused = self._adapter_folder
                    self._adapter_folder = folder
                if unused is not None:
                    shutil.rmtree(unused, ignore_errors=True)
        # Each rank has drawn a version name. The name of the main rank counts, which has loaded the
        # weights.
        self.version = self.world.broadcast_from_main(version)
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
        """Sample completions of problems; see :meth:`grpo.rollout.interface.Engine.generate`.

        ``on_tokens`` is called when a completion, or a turn of a completion, has arrived.

        Raises:
            ServerError: if a server does not answer in time, if a completion has a wrong length or
                comes from other weights, or if the temperature is between 0 and
                :data:`MIN_TEMPERATURE`.
        """
        if 0 < sampling.temperature < MIN_TEMPERATURE:
            raise ServerError(
                f"vLLM samples at temperatures of {MIN_TEMPERATURE} or above, or greedily at 0"
            )
        stops = Stops(self.policy, sampling.stop)
        requests = []
        for problem in problems:
            for g in range(sampling.num_generations):
                seed = derive_seed(*seed_key, problem.index, g)
                row = Row(len(requests), problem.prompt_ids)
                requests.append((row, _settings(seed, sampling, stops)))
        with self.weights():
            rows = self.wait_for(self._sample_all(requests, stops, on_tokens, replies))
        return grouped(problems, rows, sampling, stops)

    def dry_run(self, *_: Any) -> None:
        """Do nothing. Sampling takes memory of the servers alone, which limit it themselves."""

    def close(self) -> None:
        """Delete the files of weights, and end the server that was started for this engine, if
        any."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        shutil.rmtree(self.folder.path, ignore_errors=True)
        self.on_close()

    def wait_for(self, coroutine: Coroutine) -> Any:
        """Run a coroutine in the thread of the event loop, and return its result.

        While the calling thread waits, it calls the function ``replies`` for turns that have ended
        (see :meth:`generate`). So a user's tool runs in the thread that called :meth:`generate`, as
        with the built-in engine: a tool may refuse to run in another thread.
        """
        # The queue is new, since a coroutine that was interrupted may have left calls in the old
        # one.
        self.calls = SimpleQueue()
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        # When the coroutine has ended, its future is the last entry.
        future.add_done_callback(self.calls.put)
        try:
            while (call := self.calls.get()) is not future:
                called, replies, row, turn = call
                called.set_result(replies(row, turn))
            return future.result()
        finally:
            # After an exception, for example from a signal handler, this ends the requests, and the
            # servers stop computing.
            future.cancel()

    async def _for_all(self, call: Callable[..., Coroutine], *args: Any) -> None:
        """Await ``call(server, http, *args)`` for all servers at the same time."""
        async with session() as http:
            await asyncio.gather(*[call(server, http, *args) for server in self.servers])

    async def _check(self, server: Server, http: httpx.AsyncClient) -> None:
        """Ask the server for its model's name and its settings.

        Raises:
            ServerError: if the server would return wrong log-probs, or if the LoRA adapter does not
                belong to the server's weights.
        """
        models = await server.call(http, "GET", "/v1/models")
        server.model = models.json()["data"][0]["id"]
        info = await server.call(http, "GET", "/server_info?config_format=json")
        settings = info.json()["vllm_config"]
        # By default vLLM returns log-probs before temperature and filters, which are not those of
        # the distribution that it samples from.
        if settings["model_config"]["logprobs_mode"] != "processed_logprobs":
            raise ServerError(
                f"{server} returns other log-probs: "
                "start it with --logprobs-mode processed_logprobs"
            )
        # The server adds an adapter to its weights, which must still be the weights that it was
        # started with.
        weights = await server.call(http, "GET", "/weight_info")
        if self.policy.adapter and weights.json()["weight_version"].startswith(FULL_MODEL_PREFIX):
            raise ServerError(
                f"{server} has the weights of another run, which an adapter is not for: "
                "start it again"
            )

    async def _load(
        self,
        server: Server,
        http: httpx.AsyncClient,
        folder: Path,
        version: str,
    ) -> None:
        """Load the weights of a folder into a server, and prove that the server computes with
        them."""
        # The version name changes before the weights: no completion of the new weights may bear the
        # old name.
        await server.call(http, "POST", "/update_weight_version", {"new_version": version})
        if self.policy.adapter is None:
            model = server.model
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await server.call(http, "POST", "/collective_rpc", body)
        else:
            model = version
            body = {"lora_name": model, "lora_path": str(folder)}
            await server.call(http, "POST", "/v1/load_lora_adapter", body)
            # Otherwise the server's list of adapters would grow with every rollout.
            if self._adapter_folder is not None:
                body = {"lora_name": self._adapter_folder.name}
                await server.call(http, "POST", "/v1/unload_lora_adapter", body)

        ids = self.probe.ids
        logprobs = await server.prompt_logprobs(http, ids, model=model, version=version)
        problem = self.probe.compare(server, logprobs)
        if problem is not None:
            raise ServerError(
                f"{server} does not compute with the policy's weights: {problem}; is it another "
                "model, or its --dtype not runtime.precision?"
            )

    async def _sample_all(
        self,
        requests: Sequence[tuple[Row, dict[str, Any]]],
        stops: Stops,
        on_tokens: Callable[[int], None] | None,
        replies: Replies | None,
    ) -> list[Row]:
        """Sample all rows, each with its settings, and return them. Rows go to the servers in
        turn."""
        in_flight = asyncio.Semaphore(max(MAX_REQUESTS // self.world.size, 1))

        async def complete(row: Row, settings: dict[str, Any]) -> Row:
            """Sample a row turn by turn. It is a single turn if the enclosing :meth:`generate` has
            no ``replies``."""
            server = self.servers[row.number % len(self.servers)]
            while True:
                length = len(row.tokens)
                turn_settings = dict(settings)
                turn_settings["max_tokens"] -= length
                if length:
                    # With the seed of the first turn vLLM would draw the same numbers again.
                    turn_settings["seed"] = derive_seed(settings["seed"], "turn", length)
                request = {
                    "token_ids": [*row.prompt, *row.tokens],
                    "sampling_params": turn_settings,
                }
                async with in_flight:
                    sampled = await self._sample(server, http, request)
                if on_tokens is not None:
                    on_tokens(len(sampled.ids))

                # vLLM decodes token by token, and may see a stop string late. The turn is cut where
                # it would end in the built-in engine.
                end = stops.first_end(sampled.ids) if stops.strings else None
                turn = sampled.ids[:end]
                row.finished = end is not None or sampled.finish_reason == "stop"
                row.tokens += turn
                row.is_drawn += [True] * len(turn)
                row.logprobs += [token.logprob for token in sampled.logprobs.content[:end]]

                answer = None
                # A turn that was cut off has used all tokens, and leaves no room for an answer.
                if replies and row.finished:
                    # The thread of wait_for() calls replies(), which itself returns a future.
                    called = Future()
                    self.calls.put((called, replies, row.number, turn))
                    reply = await asyncio.wrap_future(called)
                    answer = await asyncio.wrap_future(reply)
                if answer is None:
                    return row
                # The policy did not sample these tokens: they are context, and not trained on.
                row.append_answer(answer)

        async with session() as http:
            tasks = [asyncio.ensure_future(complete(*request)) for request in requests]
            try:
                return await asyncio.gather(*tasks)
            finally:
                # gather() leaves the other tasks running if one fails.
                for task in tasks:
                    task.cancel()

    async def _sample(
        self,
        server: Server,
        http: httpx.AsyncClient,
        body: dict[str, Any],
    ) -> Sampled:
        """Sample one turn.

        Raises:
            ServerError: if the turn is too short or too long, or if other weights have sampled it.
        """
        # With this salt the prefix cache does not use keys and values of other weights.
        body["cache_salt"] = self.version
        if self.policy.adapter:
            body["model"] = self.version
        answer = await server.generate(http, body)
        (sampled,) = answer.choices
        length = len(sampled.ids)
        max_length = body["sampling_params"]["max_tokens"]
        # A server whose context is too small cuts completions off, and they would look truncated.
        is_cut = length < max_length and sampled.finish_reason == "length"
        if is_cut or length > max_length:
            raise ServerError(
                f"{server} ended a completion after {length} of {max_length} tokens: "
                "raise --max-model-len"
            )
        versions = {weights["version"] for weights in sampled.weight_versions}
        if versions != {self.version}:
            raise ServerError(
                f"{server} has lost this step's weights: "
                "it was started again, or another run uses it"
            )
        return sampled


def _settings(
    seed: int,
    sampling: SamplingParams,
    stops: Stops,
) -> dict[str, Any]:
    """Return vLLM's sampling settings of one completion."""
    return {
        "max_tokens": sampling.max_completion_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # The defaults are written out, since a server takes what a request leaves out from the
        # checkpoint's generation_config.json.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": stops.strings,
        "stop_token_ids": stops.ids,
        "include_stop_str_in_output": True,
        # vLLM looks for stop strings in the text without special tokens, as Stops does.
        "skip_special_tokens": True,
        # The policy's EOS ids are among the stop tokens; the server may know others.
        "ignore_eos": True,
        "seed": seed,
        # 0 asks for the log-prob of each sampled token, and for no alternatives.
        "logprobs": 0,
    }
