"""HTTP client of a vLLM server: requests, answers as checked records, and errors of one line."""

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
    """A vLLM server does not work for this run. The message is one line with its address."""


class _Record(BaseModel):
    # Strict: a token id that is a string or a fraction is an error, not a number. Fields that are
    # not listed are ignored.
    model_config = ConfigDict(strict=True, frozen=True)


class _Logprob(_Record):
    # At most 0 but for rounding. vLLM writes -9999 in place of NaN.
    logprob: Annotated[float, Field(gt=-9999, le=1e-3, allow_inf_nan=False)]


class _Token(_Logprob):
    token_id: Annotated[int, Field(ge=0)]


class _Logprobs(_Record):
    content: Annotated[list[_Token], Field(min_length=1)]


class Sampled(_Record):
    """One completion as the server has sampled it, or one turn of it."""

    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    weight_versions: list[dict[str, Any]]
    """Versions of the weights that sampled the tokens: several if they were replaced meanwhile."""

    @property
    def ids(self) -> list[int]:
        """Token ids, up to the one that ended the completion."""
        return [token.token_id for token in self.logprobs.content]


class Answer(_Record):
    """The answer of ``/inference/v1/generate`` to a request for one completion."""

    choices: tuple[Sampled]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    """For each token of the prompt its id -> log-prob; None for the first token."""


class Server:
    """One vLLM server. Its coroutines get a client of :func:`session`, which the requests of a
    rollout share."""

    def __init__(self, address: str, timeout_s: float):
        """``address`` is ``http://host:port``; ``timeout_s`` bounds the time of each answer."""
        self.address = address
        self.timeout_s = timeout_s
        self.explain: Callable[[str], str] = lambda problem: problem
        """Adds to the text of a problem what the trainer knows of a server that it has started; see
        :meth:`grpo.vllm.server.StartedServer.explain`."""
        self.model = ""
        """The name of the server's model in requests. The engine asks the server for it."""

    def __str__(self) -> str:
        return f"vLLM at {self.address}"

    async def call(
        self,
        http: httpx.AsyncClient,
        method: str,
        route: str,
        body: dict[str, Any] | None = None,
    ) -> httpx.Response:
        """Send a request once, and return the answer.

        Raises:
            ServerError: if the server cannot be reached, does not answer in time, or answers with
                an error.
        """
        # Rollouts may take long, but a host that is down shows in seconds.
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        # Nothing is sent twice: a server that is slow would load or sample the same again.
        try:
            answer = await http.request(method, self.address + route, json=body, timeout=timeout)
            if answer.status_code < 400:
                return answer
            details = answer.text[:300].strip()
            problem = f"refuses {route} (status {answer.status_code}): {details}"
        except (httpx.HTTPError, OSError) as error:
            problem = (
                f"does not answer {route} within {self.timeout_s:g} s "
                f"(a third of runtime.timeout_s): {error!r}"
            )
        # A server that dies closes its connections first. A moment later explain() has its exit
        # code.
        await asyncio.sleep(1.0)
        raise ServerError(f"{self} {self.explain(problem)}")

    async def generate(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        """The answer to ``body``, which has ``token_ids`` and ``sampling_params``.

        Raises:
            ServerError: see :meth:`call`.
            pydantic.ValidationError: if the answer is no completion, such as one that was aborted.
        """
        # A body that names a model, which an adapter is to vLLM, keeps it.
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
        """Log-probs in nats of ``ids[1:]`` at temperature 1, each given the ids before it.

        Args:
            model: the name of the model or adapter that computes them.
            version: the name of its weights. As the salt of the prefix cache it keeps keys and
                values of other weights out of use.
        """
        body = {
            "model": model,
            "token_ids": list(ids),
            "sampling_params": {
                # vLLM samples at least one token, which is ignored here.
                "max_tokens": 1,
                "temperature": 0.0,
                # Log-probs of the given tokens, without the likeliest ones in their places.
                "prompt_logprobs": 0,
                "logprobs": 0,
            },
            "cache_salt": version,
        }
        answer = await self.generate(http, body)
        pairs = zip(ids[1:], answer.prompt_logprobs[1:], strict=True)
        return [logprob_by_id[id].logprob for id, logprob_by_id in pairs]


@asynccontextmanager
async def session() -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client that sends the API key of the environment (``VLLM_API_KEY``)."""
    # A connection is used once: vLLM closes idle ones, and httpx looks through all of them at each
    # answer.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    # These retries are of connecting alone, before a request is sent.
    transport = httpx.AsyncHTTPTransport(retries=3, limits=limits)
    headers = {}
    if "VLLM_API_KEY" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
    # Without trust_env the proxies of the environment, which are for other hosts, have no effect.
    async with httpx.AsyncClient(transport=transport, trust_env=False, headers=headers) as http:
        yield http
