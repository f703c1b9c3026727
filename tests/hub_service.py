"""A Hugging Face Hub on this machine: what ``datasets`` and ``transformers`` need to find and read
files.

They are pointed at it by ``HF_ENDPOINT``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import datasets

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path
    asked: list[str]

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.asked.append(f"{self.command} /{path}")
        api = path.startswith("api/")
        kind, *rest = path.removeprefix("api/").split("/")
        if kind not in ("datasets", "models"):
            # /me/model/resolve/...: models have no prefix there
            kind, rest = (
                "models",
                [kind, *rest],
            )
        folder = self.root / kind / "/".join(rest[:2])
        verb = rest[2] if len(rest) > 2 else ""
        inside = "/".join(rest[4:])
        if len(rest) < 2 or not folder.is_dir():
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if not api:
            file = folder / inside
            if verb != "resolve" or not file.is_file():
                return self.send(
                    404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
                )
            content = file.read_bytes()
            etag = hashlib.sha1(content).hexdigest()
            return self.send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        if verb in ("", "revision"):
            siblings = [{"rfilename": str(file.relative_to(folder))} for file in files]
            found = {
                "id": "/".join(rest[:2]),
                "sha": COMMIT,
                "private": False,
                "tags": [],
                "siblings": siblings,
            }
        elif verb == "tree":
            if not (folder / inside).is_dir():
                return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            deep = "recursive=true" in self.path.lower()
            found = [
                _entry(path, folder)
                for path in sorted((folder / inside).glob("**/*" if deep else "*"))
            ]
        elif verb == "paths-info":
            wanted = json.loads(sent)["paths"]
            found = [_entry(folder / name, folder) for name in wanted if (folder / name).exists()]
        else:
            return self.send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        return self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    do_GET = do_HEAD = do_POST = answer

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


def _entry(path: Path, folder: Path) -> dict:
    entry = {"path": str(path.relative_to(folder)), "oid": COMMIT, "size": 0, "type": "directory"}
    return entry | ({"type": "file", "size": path.stat().st_size} if path.is_file() else {})


@contextlib.contextmanager
def hub(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve ``root/datasets/<owner>/<name>`` and ``root/models/...``; the endpoint, and what has
    been asked of it."""
    asked: list[str] = []
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Here", (Handler,), {"root": root, "asked": asked})
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


def publish(root, train: list[dict], test: list[dict]) -> None:
    """``openai/gsm8k`` as it lies on the Hub: Parquet, two configurations, a card that says which
    files are whose."""
    folder = root / "datasets" / "openai" / "gsm8k"
    for path, rows in {"main/train": train, "main/test": test, "socratic/train": train[:1]}.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{path}-00000-of-00001.parquet")
    (folder / "README.md").write_text(CARD)


def pointed_at(endpoint: str, cache) -> dict[str, str]:
    """Nothing but this Hub and an empty cache, whatever the machine is set to."""
    proxies = ("http_proxy", "https_proxy", "all_proxy")
    found = {name: "" for proxy in proxies for name in (proxy, proxy.upper())}
    return found | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "0",
        "no_proxy": "127.0.0.1",
    }
