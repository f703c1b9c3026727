"""Whether the Hugging Face Hub answers. Without a network its client retries for 23 seconds before it says so."""

from __future__ import annotations

import functools
import socket
import urllib.parse
import urllib.request

import huggingface_hub

SECONDS = 5.0


@functools.cache
def hub_answers() -> bool:
    """Try once in a process to connect; if that fails, switch the client to what its cache holds.

    Behind a proxy it is taken to answer: what the proxy can reach is not ours to guess.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    url = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    if {url.scheme, "all"} & set(urllib.request.getproxies()):
        return True
    try:
        socket.create_connection((url.hostname, url.port or {"http": 80}.get(url.scheme, 443)), SECONDS).close()
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return False
    return True
