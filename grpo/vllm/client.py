"""HTTP client of one vLLM server: the routes that are used, their answers as records, and errors of one line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Annotated, Any, Literal

import httpx
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo.system import UserError, first_line

CONNECT_SECONDS, CONNECT_RETRIES = 10.0, 3
HEALTH_SECONDS = 5.0
"""Time between two questions whether a server that computes completions is healthy."""
ANSWER_CHARACTERS = 300
"""Characters of a server's own error message that are shown."""


class ServerError(UserError):
    """A server that does not work; one line with its address and what to do."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _Logprob(_Record):
    # At most 0 but for rounding; vLLM writes -9999 in place of NaN.
    logprob: Annotated[float, Field(gt=-9999, le=1e-3, allow_inf_nan=False)]


class _Token(_Logprob):
    token_id: Annotated[int, Field(ge=0)]


class _Logprobs(_Record):
    content: Annotated[list[_Token], Field(min_length=1)]


class _Version(_Record):
    version: str


class Sampled(_Record):
    """One completion."""

    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    weight_versions: list[_Version]
    """Of the weights that sampled its tokens, one after the other."""

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.logprobs.content]


class Answer(_Record):
    """Of ``/inference/v1/generate``."""

    choices: Annotated[list[Sampled], Field(min_length=1, max_length=1)]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None


class Server:
    """One vLLM server. Its coroutines get a client of :func:`session`."""

    def __init__(self, address: str, timeout_s: float, explain: Callable[[str], str] = lambda problem: problem):
        """
        Args:
            address: ``http://host:port``.
            timeout_s: seconds that it may take to answer one request.
            explain: of a server that the trainer has started (:meth:`grpo.vllm.server.StartedServer.explain`).
        """
        self.address, self.timeout_s, self.explain = address, timeout_s, explain
        self.model = ""
        """The name of its model in requests (:func:`grpo.vllm.check.check_server` asks for it)."""

    def __str__(self) -> str:
        return f"vLLM at {self.address}"

    async def call(self, http: httpx.AsyncClient, method: str, route: str, body: dict[str, Any] | None = None) -> bytes:
        """The answer to one request, which is sent once.

        ServerError if the server cannot be reached, does not answer in time, or answers with an error.
        """
        timeout = httpx.Timeout(self.timeout_s, connect=min(CONNECT_SECONDS, self.timeout_s))
        try:
            answer = await http.request(method, self.address + route, json=body, timeout=timeout)
        except httpx.ReadTimeout:
            reason = f"did not answer {route} within {self.timeout_s:g} s (a third of runtime.timeout_s)"
        except (httpx.HTTPError, OSError) as error:
            reason = f"cannot be reached ({route}: {first_line(error)})"
        else:
            if answer.status_code < 400:
                return answer.content
            reason = f"refuses {route} (status {answer.status_code}): {answer.text[:ANSWER_CHARACTERS].strip()}"
            if answer.status_code == 401:
                reason = "wants another API key: set VLLM_API_KEY in the trainer's environment to the server's"
        await asyncio.sleep(1.0)  # the end of a process may show a moment later
        raise ServerError(f"{self} {self.explain(reason)}") from None

    async def generate(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        """The completion of ``{"token_ids", "sampling_params", ...}``; ServerError for an answer of another form."""
        content = await self.call(http, "POST", "/inference/v1/generate", {"model": self.model} | body)
        try:
            return Answer.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerError(
                f"{self} returned no completion of the form that is known: {where}: {first['msg']}"
            ) from None

    async def prompt_logprobs(self, http: httpx.AsyncClient, ids: Sequence[int], model: str) -> list[float]:
        """Log-probs in nats of ``ids[1:]`` at temperature 1, each given the ids before it."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0}
        answer = await self.generate(http, {"model": model, "token_ids": list(ids), "sampling_params": sampling})
        try:
            return [at[id].logprob for at, id in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
        except (KeyError, TypeError, ValueError):
            raise ServerError(f"{self} returned no log-probs of a prompt") from None

    async def stay_healthy(self, http: httpx.AsyncClient) -> None:
        """ServerError once it is not healthy: after the death of its engine, vLLM may never answer a request."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await self.call(http, "GET", "/health")


@asynccontextmanager
async def session() -> AsyncIterator[httpx.AsyncClient]:
    """A client with the API key of the environment and without the environment's proxies."""
    # A connection is used once: vLLM closes idle ones, and httpx looks through all of them at each answer.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(retries=CONNECT_RETRIES, limits=limits)
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("VLLM_API_KEY")) else {}
    async with httpx.AsyncClient(transport=transport, trust_env=False, headers=headers) as http:
        yield http


class EventLoop:
    """An event loop in a thread of its own: in a notebook this thread has a loop already."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())

    def wait_for(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a coroutine function.

        An exception that a signal handler raises here cancels what is under way, so that servers stop computing it.
        """
        future = self._portal.start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._stack.close()
