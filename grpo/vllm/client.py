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
    """Error for a vLLM server that this run cannot use. The message is one line with the server's
    address."""


class _Record(BaseModel):
    # Strict: a token id that is a string or a fraction is an error, not a number. Fields that are
    # not listed are ignored.
    model_config = ConfigDict(strict=True, frozen=True)


class _Logprob(_Record):
    # A log-prob is at most 0, up to rounding. vLLM writes -9999 in place of NaN.
    logprob: Annotated[float, Field(gt=-9999, le=1e-3, allow_inf_nan=False)]


class _Token(_Logprob):
    token_id: Annotated[int, Field(ge=0)]


class _Logprobs(_Record):
    content: Annotated[list[_Token], Field(min_length=1)]


class Sampled(_Record):
    """Tokens that the server has sampled for one request: a completion or, with tools, one turn of
    a completion."""

    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    weight_versions: list[dict[str, Any]]
    """Versions of the weights that sampled the tokens. There are several if weights were replaced
    meanwhile."""

    @property
    def ids(self) -> list[int]:
        """Ids of the sampled tokens, including the token that ended the completion."""
        return [token.token_id for token in self.logprobs.content]


class Answer(_Record):
    """The answer of ``/inference/v1/generate`` to a request for one completion."""

    choices: tuple[Sampled]
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    """Dictionary from the id to the log-prob of each prompt token. None for the first token."""


class Server:
    """A vLLM server at an address.

    Its coroutines send requests with an HTTP client of :func:`session`, which all requests of a
    rollout share.
    """

    def __init__(self, address: str, timeout_s: float):
        """``address`` is ``http://host:port``; ``timeout_s`` limits the seconds until each
        answer."""
        self.address = address
        self.timeout_s = timeout_s
        self.explain: Callable[[str], str] = lambda problem: problem
        """Function that adds facts about the server to the text of a problem. If the trainer has
        started the server, it is :meth:`grpo.vllm.server.StartedServer.explain`. Default: the text
        stays as it is."""
        self.model = ""
        """Name of the model in requests. The engine asks the server for this name."""

    def __str__(self) -> str:
        return f"vLLM at {self.address}"

    async def call(
        self,
        http: httpx.AsyncClient,
        method: str,
        route: str,
        body: dict[str, Any] | None = None,
    ) -> httpx.Response:
        """Send a request once, and return the server's answer.

        Raises:
            ServerError: if the server cannot be reached, does not answer in time, or answers with
                an error.
        """
        # Rollouts may take long, but a host that is down shows in seconds.
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        # No request is sent twice: a server that is slow would load or sample the same again.
        try:
            answer = await http.request(method, self.address + route, json=body, timeout=timeout)
            if answer.status_code < 400:
                return answer
            problem = f"refuses {route} (status {answer.status_code}): {answer.text[:300].strip()}"
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
        """Return the answer to ``body``, which has ``token_ids`` and ``sampling_params``.

        Raises:
            ServerError: see :meth:`call`.
            pydantic.ValidationError: if the answer is not a valid completion, for example an
                aborted one.
        """
        # If the body names a model already, that name stays. To vLLM an adapter is a model.
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
            model: name of the model or adapter that computes the log-probs.
            version: name of the weights. It is the salt of the prefix cache, so that cached keys
                and values of other weights are not used.
        """
        body = {
            "model": model,
            "token_ids": list(ids),
            "sampling_params": {
                # vLLM samples at least one token, which is ignored here.
                "max_tokens": 1,
                "temperature": 0.0,
                # 0 asks for the log-probs of the given tokens, and for no alternatives.
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
    # Each connection is used once: vLLM closes idle ones, and httpx would look through all of them
    # at each answer.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    # httpx retries only to connect, before it sends a request.
    transport = httpx.AsyncHTTPTransport(retries=3, limits=limits)
    headers = {}
    if "VLLM_API_KEY" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['VLLM_API_KEY']}"
    # Without trust_env the proxies of the environment, which are for other hosts, have no effect.
    async with httpx.AsyncClient(transport=transport, trust_env=False, headers=headers) as http:
        yield http
