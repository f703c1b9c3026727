"""Requests for completions, many at a time, each repeated until it was sampled with the weights that were asked for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.rollout.vllm.client import Cancelled, NotAnswered, Sampled, Server, UnknownModel
from grpo.rollout.vllm.weight_sync import Servers

WAIT_SECONDS = 0.2
"""Time after which the waiting thread looks at signals and at the servers' silence again."""
SENDER = "vllm-request"
"""Name of the threads that send requests."""
SILENT_SECONDS = 2.0
"""Silence after which it is tested whether a server still listens."""
RETRY_SECONDS = 0.5
"""Time before a request that was not answered is sent again."""


@dataclass(frozen=True)
class Request:
    """One completion."""

    server: Server
    body: dict[str, Any]
    """Of ``/v1/completions``, without the model."""


def complete_all(
    requests: Sequence[Request], servers: Servers, on_tokens: Callable[[int], None] | None
) -> tuple[list[Sampled], int]:
    """The answers, in order, and the number of completions that were sampled again because the server had other weights.

    Threads send the requests. After an exception, also one that a signal handler raises, the requests in flight are cut, so that the
    servers stop computing them.
    """
    answers: list[Sampled | None] = [None] * len(requests)
    waiting: dict[Server, queue.SimpleQueue] = {}
    done: queue.SimpleQueue = queue.SimpleQueue()
    cancelled, num_stale = threading.Event(), 0
    for index, request in enumerate(requests):
        waiting.setdefault(request.server, queue.SimpleQueue()).put((index, request))
    for server, own in waiting.items():
        server.reset_silence()
        # Daemons: an exit does not wait for a server that does not answer.
        for _ in range(min(own.qsize(), servers.most_requests(server, _longest_prompt(requests)))):
            threading.Thread(target=_work, args=(own, done, servers, cancelled), name=SENDER, daemon=True).start()
    try:
        num_missing, checked_at = len(requests), time.monotonic()
        while num_missing:
            if time.monotonic() - checked_at > WAIT_SECONDS:
                _check_silence(requests, answers)
                checked_at = time.monotonic()
            try:
                index, answer, stale = done.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if isinstance(answer, BaseException):
                raise answer
            answers[index], num_missing, num_stale = answer, num_missing - 1, num_stale + stale
            if on_tokens is not None:
                on_tokens(len(answer.ids))
    except BaseException:
        cancelled.set()
        for server in waiting:
            server.cut()
        raise
    return answers, num_stale


def _longest_prompt(requests: Sequence[Request]) -> int:
    return max(len(request.body["prompt"]) for request in requests)


def _work(waiting: queue.SimpleQueue, done: queue.SimpleQueue, servers: Servers, cancelled: threading.Event) -> None:
    """A thread: send one waiting request after the other; ``done`` gets ``(index, answer or error, number of stale answers before it)``."""
    while not cancelled.is_set():
        try:
            index, request = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            done.put((index, *_complete(request, servers, cancelled)))
        except Cancelled:
            return
        except BaseException as error:  # the thread that waits for the answer raises it
            done.put((index, error, 0))


def _check_silence(requests: Sequence[Request], answers: Sequence[Sampled | None]) -> None:
    """ServerError if a server with open requests has not answered anything for its ``timeout_s``, or is not started again.

    vLLM whose engine has died listens no longer, but does not end while clients wait: then the requests are cut, and sent again.
    """
    for server in {request.server for request, answer in zip(requests, answers, strict=True) if answer is None}:
        if server.silent_s() > SILENT_SECONDS:
            server.cut_if_refusing()
        if server.silent_s() > server.timeout_s or server.has_ended():
            raise server.no_answer_error()


def _complete(request: Request, servers: Servers, cancelled: threading.Event) -> tuple[Sampled, int]:
    """One completion, and how often it was sampled with other weights before."""
    server, num_stale, failed_at = request.server, 0, None
    while True:
        version = servers.expected_version(server)
        answer = None
        try:
            answer = server.complete(request.body | {"model": servers.model_name(server)}, cancelled)
        except UnknownModel:  # the server was started again and has no adapter
            _restore(server, version, servers, cancelled)
            continue
        except NotAnswered:
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > server.timeout_s:
                raise server.no_answer_error() from None
            if cancelled.wait(RETRY_SECONDS):
                raise Cancelled from None
        # Also after a failure: a server that was started again answers, but with the weights of its start.
        if servers.has_version(server, version):
            if answer is not None:
                return answer, num_stale
            continue
        num_stale += answer is not None
        _restore(server, version, servers, cancelled)
        failed_at = None


def _restore(server: Server, version: str, servers: Servers, cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise Cancelled
    servers.restore(server, version)
