"""The Hugging Face Hub: whether it can be reached (without a network, its client would retry for 23 seconds), and which commit it gave."""

import functools
import socket
import urllib.parse
import urllib.request
from pathlib import Path

import huggingface_hub

TIMEOUT_SECONDS = 5.0


@functools.cache
def hub_answers() -> bool:
    """True if the Hub can be reached. If not, this process uses only the client's cache from now on (``HF_HUB_OFFLINE``).

    A process tries to connect once. With a proxy the answer is yes, because only the proxy knows what it can reach.
    """
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    url = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    if {url.scheme, "all"} & set(urllib.request.getproxies()):
        return True
    try:
        socket.create_connection((url.hostname, url.port or {"http": 80}.get(url.scheme, 443)), TIMEOUT_SECONDS).close()
    except OSError:
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        return False
    return True


def commit_of(repository: str) -> str | None:
    """The commit of a model that the client's cache holds as the newest of its main branch; None if it is not known."""
    path = huggingface_hub.try_to_load_from_cache(repository, "config.json")
    return Path(path).parent.name if isinstance(path, str) else None


def snapshot_of(repository: str) -> str:
    """The folder of the client's cache that holds a model which has been loaded before."""
    return huggingface_hub.snapshot_download(repository, local_files_only=True)
