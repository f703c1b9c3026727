"""A small HTTP server that answers where wandb's service would be, as far as one run needs it; and
that can be ill."""

import contextlib
import gzip
import http.server
import json
import threading
import time


class Service:
    """``mood``: ``well``, ``refuses`` (403 to everything), ``stalls`` (takes requests, never
    answers), ``dead`` (takes no connection, drops those that are open)."""

    def __init__(self, mood: str):
        self.mood = mood
        self.lines = []
        service = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if service.mood == "stalls":
                    time.sleep(300)
                if service.mood == "dead":
                    self.close_connection = True
                    return
                code, reply = service.reply(self.path, body)
                text = json.dumps(reply).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # wandb breaks connections off
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def reply(self, path: str, body: bytes) -> tuple[int, dict]:
        if self.mood == "refuses":
            return 403, {"error": "no"}
        if path.endswith("/file_stream"):
            sent = (
                json.loads(body)
                .get("files", {})
                .get("wandb-history.jsonl", {"offset": 0, "content": []})
            )
            end = sent["offset"] + len(sent["content"])  # what is there already is written over
            self.lines[sent["offset"] : end] = [json.loads(line) for line in sent["content"]]
            return 200, {}
        if not path.endswith("/graphql"):
            return 200, {}
        asked = json.loads(body)
        given = asked.get("variables") or {}
        operation = asked.get("operationName")
        bucket = {
            "id": "1", "name": given.get("name"), "displayName": "run", "config": "{}", "summaryMetrics": "{}",
            "sweepName": None, "tags": [],
            "project": {"id": "2", "name": "grpo", "entity": {"id": "3", "name": "me"}},
            "historyLineCount": len(self.lines),
            "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": json.dumps({"t": 1}),
            "historyTail": json.dumps([json.dumps(self.lines[-1])] if self.lines else []),
        }  # fmt: skip
        if operation == "RunResumeStatus":
            found = bucket if self.lines else None
            return 200, {"data": {"model": bucket["project"] | {"bucket": found}}}
        if operation == "Viewer":  # asked before the first table
            viewer = {
                "id": "4",
                "entity": "me",
                "username": "me",
                "email": "",
                "flags": "{}",
                "teams": {"edges": []},
            }
            return 200, {"data": {"viewer": viewer}}
        if "createArtifact(" in asked["query"]:  # a table; as if all of it were there already
            artifact = {
                "id": "5",
                "state": "COMMITTED",
                "artifactSequence": {"id": "6", "latestArtifact": None},
            }
            return 200, {"data": {"createArtifact": {"artifact": artifact}}}
        if operation == "UpsertBucket":
            return 200, {"data": {"upsertBucket": {"bucket": bucket, "inserted": not self.lines}}}
        if operation == "CreateRunFiles":
            files = [
                {"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]
            ]
            return 200, {
                "data": {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
            }
        return 200, {"data": {"project": None}}  # is there such an artifact?

    def become(self, mood: str) -> None:
        self.mood = mood
        if mood == "dead":
            threading.Thread(target=self.close).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def service(mood: str):
    running = Service(mood)
    threading.Thread(target=running.server.serve_forever, daemon=True).start()
    try:
        yield running
    finally:
        with contextlib.suppress(OSError):
            running.close()
