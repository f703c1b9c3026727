"""HTTP client of one vLLM server: the routes that are called, their answers as records, and errors
of one line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field

from grpo.system import UserError


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


class Sampled(_Record):
    """One completion."""

    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    weight_versions: list[dict[str, Any]]
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

    def __init__(self, address: str, timeout_s: float):
        """``address``: ``http://host:port``; ``timeout_s``: to answer one request."""
        self.address = address
        self.timeout_s = timeout_s
        self.explain: Callable[[str], str] = lambda problem: problem
        """Of a server that the trainer has started:
        :meth:`grpo.vllm.server.StartedServer.explain`."""
        self.model = ""
        """The name of its model in requests, which the engine asks for."""

    def __str__(self) -> str:
        return f"vLLM at {self.address}"

    async def call(
        self,
        http: httpx.AsyncClient,
        method: str,
        route: str,
        body: dict[str, Any] | None = None,
    ) -> httpx.Response:
        """The answer to one request, which is sent once.

        ServerError if the server cannot be reached, does not answer in time, or answers with an
        error.
        """
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        try:
            answer = await http.request(method, self.address + route, json=body, timeout=timeout)
            if answer.status_code < 400:
                return answer
            problem = f"refuses {route} (status {answer.status_code}): {answer.text[:300].strip()}"
        except (httpx.HTTPError, OSError) as error:
            problem = f"does not answer {route} within {self.timeout_s:g} s (a third of runtime.timeout_s): {error!r}"
        await asyncio.sleep(1.0)  # the end of a process may show a moment later
        raise ServerError(f"{self} {self.explain(problem)}")

    async def generate(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        """The completion of ``{"token_ids", "sampling_params", ...}``."""
        body = {"model": self.model} | body
        answer = await self.call(http, "POST", "/inference/v1/generate", body)
        return Answer.model_validate_json(answer.content)

    async def prompt_logprobs(
        self,
        http: httpx.AsyncClient,
        ids: Sequence[int],
        *,
        model: str,
        version: str,
    ) -> list[float]:
        """Log-probs in nats of ``ids[1:]`` at temperature 1, each after the ids before it.

        Args:
            model: its name, or that of an adapter.
            version: of the weights, which keeps what the prefix cache holds of others out of use.
        """
        body = {
            "model": model,
            "token_ids": list(ids),
            "sampling_params": {
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
                "logprobs": 0,
            },
            "cache_salt": version,
        }
        answer = await self.generate(http, body)
        logprobs = []
        for id, at in zip(ids[1:], answer.prompt_logprobs[1:], strict=True):
            logprobs.append(at[id].logprob)
        return logprobs


@asynccontextmanager
async def session() -> AsyncIterator[httpx.AsyncClient]:
    """A client with the API key of the environment and without the environment's proxies."""
    # A connection is used once: vLLM closes idle ones, and httpx looks through all of them at each
    # answer.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(retries=3, limits=limits)
    headers = {}
    if "VLLM_API_KEY" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
    async with httpx.AsyncClient(transport=transport, trust_env=False, headers=headers) as http:
        yield http
