"""HTTP client of one vLLM server: its routes, retries, and errors of one line."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from urllib3.exceptions import HTTPError

from grpo.rollout.vllm.connections import Connections, message_of, reason_of, refuses
from grpo.rollout.vllm.keeper import KeptLog
from grpo.system import UserError

OLDEST = (0, 32)
"""The oldest version of vLLM that was tested."""
OLDEST_NAME = ".".join(map(str, OLDEST))
IS_IT_VLLM = f"is it vLLM {OLDEST_NAME} or later?"
MAX_REQUESTS = 512
"""Most requests in flight from one rank, each with a connection of its own (a process may have 1,024 files open on many systems)."""
CONNECT_SECONDS = 10.0
MAX_PAUSE_SECONDS = 2.0
"""Longest wait between two attempts."""
RESET_SECONDS = 60.0
"""Longest wait for the requests that hold the prefix cache."""


class ServerError(UserError):
    """A server that does not work; one line with its address and what to do."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status
        """Of the server's answer; None: there was none, or it has another fault."""


class NotAnswered(ServerError):
    """One request was not answered, or with a 5xx status, and may be sent again."""


class Unreachable(ServerError):
    """No answer for the server's ``timeout_s``, however often it was asked."""


class UnknownModel(ServerError):
    """The server has no model, or no adapter, of the name that a request gave."""


class Cancelled(Exception):
    """The caller no longer needs the answer."""


class Sampled(NamedTuple):
    """The answer to one request for a completion."""

    ids: list[int]
    logprobs: list[float]
    """As many as ids, in nats; empty if they were not asked for."""
    finish_reason: str


class Server:
    """One vLLM server. All methods may be called from several threads.

    A request that cannot connect, or that the server answers with a 5xx status, is sent again until ``timeout_s`` seconds have passed since
    its first attempt. A 4xx status is a :class:`ServerError` at once.
    """

    def __init__(self, address: str, timeout_s: float, warn: Callable[[str], None] = print, log: KeptLog | None = None):
        """``address``: ``http://host:port``. ``warn`` gets a line of text when the server first does not answer. ``log``: of a server with a keeper."""
        self.address, self.timeout_s, self.warn = address.rstrip("/"), timeout_s, warn
        self.model = ""
        """Name of the model in requests (:func:`grpo.rollout.vllm.check.check_server` asks for it)."""
        self.answered_at = time.monotonic()
        """Time of the last answer that was no 5xx status."""
        self.last_error = ""
        self.log = log
        self._connections = Connections(MAX_REQUESTS)

    def __str__(self) -> str:
        return self.address

    # Sampling and scoring

    def complete(self, body: dict[str, Any], cancelled: threading.Event) -> Sampled:
        """One completion of ``body`` (``/v1/completions``, with ``return_token_ids``). It has no timeout of its own: see :attr:`answered_at`.

        Raises:
            NotAnswered: if the connection ends, or the server answers with a 5xx status or was told to abort its requests.
            ServerError: if the answer lacks something, or the server refuses the request.
            Cancelled: if the event is set.
        """
        if cancelled.is_set():
            raise Cancelled
        answer = self.request("POST", "/v1/completions", body, bounded=False, retry=False, cancelled=cancelled)
        sampled = self._sampled(answer, with_logprobs="logprobs" in body)
        if sampled.finish_reason not in ("stop", "length"):
            raise NotAnswered(f"{self} ended a completion with {sampled.finish_reason}")
        return sampled

    def _sampled(self, answer: Any, *, with_logprobs: bool) -> Sampled:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1:
            found = len(choices) if isinstance(choices, list) else "no"
            raise ServerError(f"{self} returned {found} completions where 1 was asked for: {IS_IT_VLLM}")
        choice = choices[0]
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if not ids or not isinstance(ids, list):
            raise ServerError(f"{self} returned a completion without token ids: {IS_IT_VLLM}")
        if not with_logprobs:
            return Sampled(ids, [], reason)
        is_complete = len(logprobs) == len(ids) and all(
            isinstance(p, int | float) and math.isfinite(p) for p in logprobs
        )
        if not is_complete:
            raise ServerError(
                f"{self} returned {len(ids)} tokens without a finite log-prob for each ({len(logprobs)} values): its model computes NaN, or "
                f"it is older than vLLM {OLDEST_NAME}"
            )
        return Sampled(ids, logprobs, reason)

    def prompt_logprobs(self, ids: Sequence[int], model: str | None = None) -> list[float]:
        """Log-probs in nats of ``ids[1:]`` at temperature 1, each given the ids before it. ``model``: the name of an adapter."""
        body = {"model": model or self.model, "prompt": list(ids), "max_tokens": 1}
        body |= {"temperature": 0.0, "prompt_logprobs": 0}
        answer = self.request("POST", "/v1/completions", body)
        try:
            found = answer["choices"][0]["prompt_logprobs"][1:]
            return [float(at[str(id)]["logprob"]) for at, id in zip(found, ids[1:], strict=True)]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ServerError(f"{self} returned no log-probs of a prompt: {IS_IT_VLLM}") from None

    # What the server is

    def version(self) -> str:
        """vLLM's version."""
        return str(self._get("/version", "version"))

    def models(self) -> list[dict[str, Any]]:
        """The model, then its adapters: ``id``, ``root``, ``max_model_len``."""
        return self._get("/v1/models", "data")

    def info(self) -> dict[str, Any]:
        """vLLM's own configuration (``vllm_config``) and environment (``vllm_env``)."""
        return self.request("GET", "/server_info?config_format=json")

    # Weights

    def weight_version(self) -> str:
        """The string that :meth:`set_weight_version` set last, or vLLM's own after a start."""
        return self._get("/weight_info", "weight_version")

    def set_weight_version(self, version: str, *, retry: bool = True) -> None:
        self.request("POST", "/update_weight_version", {"new_version": version}, retry=retry)

    def reload(self, folder: str) -> None:
        """Load all weights from the safetensors files of a folder.

        It is sent once: after a failure vLLM's engine does not work any more, and the next request ends the process.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.request("POST", "/collective_rpc", body, retry=False)

    def load_adapter(self, name: str, folder: str) -> None:
        """Sent once: vLLM answers 500 to adapters that it cannot load."""
        self.request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, retry=False)

    def unload_adapter(self, name: str) -> None:
        self.request("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each weight by vLLM's name of it, behind the ranks that hold it: ``dp0:pp0:pcp0:tp0:model.norm.weight``."""
        answer = self.request("POST", "/weight_checker", {"action": "checksum"})
        return self._item(answer, "checksums", "/weight_checker")

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; waits for requests that hold parts of it."""
        started = time.monotonic()
        while not self._item(self.request("POST", "/reset_prefix_cache"), "success", "/reset_prefix_cache"):
            if time.monotonic() - started > min(self.timeout_s, RESET_SECONDS):
                raise ServerError(
                    f"{self} cannot empty its prefix cache: other programs use this server; give the run one of its own"
                )
            time.sleep(0.1)

    # Requests

    def cut(self) -> None:
        """End all requests in flight: the server stops computing them, and :meth:`complete` raises :class:`NotAnswered`."""
        self._connections.cut()

    def cut_if_refusing(self) -> None:
        """:meth:`cut` if the server takes no new connections: it is ending, and may wait for those that it has."""
        if refuses(self.address):
            self.cut()

    def reset_silence(self) -> None:
        """Count the server's silence from now on."""
        self.answered_at = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self.answered_at

    def has_ended(self) -> bool:
        """True if the trainer started the server, and does not start it again."""
        return self.log is not None and self.log.end() is not None

    def no_answer_error(self) -> Unreachable:
        """The error of a server that no longer answers."""
        if self.log is not None and (end := self.log.end()):
            return Unreachable(f"{self} {end}: see {self.log.path}, and start the run again")
        reason = f" ({self.last_error})" if self.last_error else ""
        return Unreachable(
            f"{self} has not answered for {self.timeout_s:g} s{reason}: look at the server's log, start it again, or raise "
            "rollout.server_timeout_s"
        )

    def request(
        self,
        method: str,
        route: str,
        body: dict[str, Any] | None = None,
        *,
        bounded: bool = True,
        retry: bool = True,
        cancelled: threading.Event | None = None,
    ) -> Any:
        """The JSON that a route answers.

        Args:
            bounded: wait ``timeout_s`` for the answer, over all attempts. False: as long as the connection stands.
            retry: send the request again after failures.
            cancelled: with :meth:`cut`, see :meth:`grpo.rollout.vllm.connections.Connections.request`.
        """
        started, wait = time.monotonic(), 0.1
        while True:
            status, left = None, max(started + self.timeout_s - time.monotonic(), 0.1)
            limits = {"connect_s": min(CONNECT_SECONDS, left), "read_s": left if bounded else None}
            try:
                answer = self._connections.request(method, self.address + route, body, **limits, cancelled=cancelled)
                if answer.status < 500:
                    self.answered_at, self.last_error = time.monotonic(), ""
                    return self._content(answer, route)
                status = answer.status
                self.last_error = f"{method} {route}: status {status}, {message_of(answer.data)}"
            except (HTTPError, OSError) as error:
                self.last_error = f"{method} {route}: {reason_of(error)}"
            if not retry:
                raise NotAnswered(f"{self}: {self.last_error}", status)
            left = started + self.timeout_s - time.monotonic()
            if left <= 0 or self.has_ended():
                raise self.no_answer_error()
            if wait > 1.0 and time.monotonic() - self.answered_at > 5.0:
                self._warn_once()
            time.sleep(min(wait, left))
            wait = min(2 * wait, MAX_PAUSE_SECONDS)

    _warned_at = -math.inf

    def _warn_once(self) -> None:
        """Say that the server is waited for, once for each time it goes away."""
        if self._warned_at < self.answered_at:
            self._warned_at = time.monotonic()
            self.warn(
                f"waiting for {self} ({self.last_error}), at most {self.timeout_s:g} s (rollout.server_timeout_s) ..."
            )

    def _content(self, answer: Any, route: str) -> Any:
        if answer.status == 401:
            raise ServerError(
                f"{self} wants another API key: set VLLM_API_KEY in the trainer's environment to the server's"
            )
        if answer.status >= 400:
            kind = UnknownModel if answer.status == 404 and route == "/v1/completions" else ServerError
            problem = f"{self} refuses {route.partition('?')[0]} (status {answer.status}): {message_of(answer.data)}"
            raise kind(problem, answer.status)
        if not answer.data or "lora_adapter" in route:  # whose answer is a sentence
            return None
        try:
            return json.loads(answer.data)
        except ValueError:
            raise ServerError(f"{self} answers {route} with something that is not JSON: is it a vLLM server?") from None

    def _get(self, route: str, key: str) -> Any:
        return self._item(self.request("GET", route), key, route)

    def _item(self, answer: Any, key: str, route: str) -> Any:
        if not isinstance(answer, dict) or key not in answer:
            raise ServerError(f"{self} answers {route} without {key}: {IS_IT_VLLM}")
        return answer[key]
