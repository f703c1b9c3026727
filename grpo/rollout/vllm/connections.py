"""HTTP connections to one server, which can be cut while requests wait for their answers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import weakref
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3 import HTTPConnectionPool
from urllib3.connection import HTTPConnection

from grpo.rollout.vllm.keeper import is_refused
from grpo.system import first_line

KEEPALIVE = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in
             (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)) if hasattr(socket, name)]  # fmt: skip
"""A connection to a machine that has gone ends after two minutes, also while it waits for an answer."""


class Connections:
    """A pool of connections. Environment variables for proxies have no effect; ``VLLM_API_KEY`` is sent with each request."""

    def __init__(self, most: int):
        """``most``: connections that are kept open."""
        options = [*HTTPConnection.default_socket_options, (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *KEEPALIVE]
        headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("VLLM_API_KEY")) else {}
        self._pool = urllib3.PoolManager(
            num_pools=1, maxsize=most, retries=False, headers=headers, socket_options=options
        )
        self._lock, self._caller = threading.Lock(), threading.local()
        self._opened: weakref.WeakSet[HTTPConnection] = weakref.WeakSet()
        """urllib3 itself only knows the connections that no request uses."""
        kinds = self._pool.pool_classes_by_scheme
        self._pool.pool_classes_by_scheme = {name: self._remembering(kind) for name, kind in kinds.items()}

    def request(
        self,
        method: str,
        url: str,
        body: dict[str, Any] | None,
        *,
        connect_s: float,
        read_s: float | None,
        cancelled: threading.Event | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """One request with a JSON body. Raises urllib3's ``HTTPError`` or ``OSError``.

        Args:
            read_s: longest wait for the answer; None: no limit.
            cancelled: if it is set before :meth:`cut` is called, the request ends then, also if it is only about to connect.
        """
        self._caller.cancelled = cancelled
        timeout = urllib3.Timeout(connect=connect_s, read=read_s)
        return self._pool.request(method, url, json=body, timeout=timeout, retries=False)

    def cut(self) -> None:
        """End all requests in flight: the server stops computing them, and the threads that wait get an error."""
        with self._lock:
            opened = list(self._opened)
        for connection in opened:
            with contextlib.suppress(OSError, AttributeError):  # without a socket it is closed already
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _remembering(self, kind: type[HTTPConnectionPool]) -> type[HTTPConnectionPool]:
        opened, lock, caller = self._opened, self._lock, self._caller

        class Connection(kind.ConnectionCls):
            def connect(self) -> None:
                super().connect()
                with lock:
                    opened.add(self)
                if caller.cancelled is not None and caller.cancelled.is_set():  # too late for a cut
                    self.close()
                    raise ConnectionAbortedError(errno.ECONNABORTED, "cancelled")

        return type(kind.__name__, (kind,), {"ConnectionCls": Connection})


def refuses(address: str) -> bool:
    """True if nothing listens at ``http://host:port``."""
    parts = urlsplit(address)
    return is_refused((parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)))


def reason_of(error: BaseException) -> str:
    """The system's reason inside of urllib3's errors, in a few words."""
    inner: Any = error
    while isinstance(inner, BaseException):
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = (
            inner.__cause__ or inner.__context__ or next((a for a in inner.args if isinstance(a, BaseException)), None)
        )
    return first_line(error)


def message_of(data: bytes) -> str:
    """The server's own message in the body of an answer, in one line."""
    text = data.decode(errors="replace").strip()
    try:
        found = json.loads(text)
        error = found.get("error", found.get("detail", found))
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return first_line(ValueError(text))[:300]
