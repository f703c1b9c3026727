"""An HTTP server that speaks the routes of vLLM that are used, with faults that a test switches on.

It computes real log-probs of prompts with the weights that it was given. Its completions are a
fixed function of the seed: they show which request was answered, not what the model samples."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

SETTINGS = {
    "model_config": {"logprobs_mode": "processed_logprobs"},
    "device_config": {"device": "cpu"},
}


class HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        512  # connections that wait to be accepted: behind more, a client waits a second
    )


class FaultyServer:
    """In this process, on a port of its own."""

    def __init__(self, folder: Path):
        self.folder, self.settings = str(folder), copy.deepcopy(SETTINGS)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.weight_version, self.num_loads, self.applies_weights = "default", 0, True
        self.bodies: list[dict] = []
        """Of all requests for completions."""
        self.probes: list[dict] = []
        """Of all requests for log-probs of a prompt."""
        self.headers: list[dict] = []
        self.change_answer: Callable[[dict], Any] = lambda answer: answer
        """Changes the JSON of a completion; or raises, then the connection ends without an
        answer."""
        self.status: Callable[[str], int] = lambda route: 200
        """Route -> the status it is answered with."""
        self._lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                server.handle(self, None)

            def do_POST(self):
                server.handle(
                    self, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                )

            def log_message(self, *args):
                pass

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda *args: None
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Listen no longer."""
        self._http.shutdown()
        self._http.server_close()

    def handle(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        route = request.path.partition("?")[0]
        status = self.status(route)
        answer = self.answer(route, body, request) if status == 200 else {"error": "made to fail"}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def answer(self, route: str, body: Any, request: BaseHTTPRequestHandler) -> Any:
        if route == "/inference/v1/generate":
            with self._lock:
                self.headers.append(dict(request.headers))
                if "prompt_logprobs" in body["sampling_params"]:
                    self.probes.append(body)
                    return self.prompt_logprobs(body["token_ids"])
                self.bodies.append(body)
            return self.change_answer(self.completion(body["sampling_params"]))
        if route == "/update_weight_version":
            self.weight_version = body["new_version"]
        if route == "/collective_rpc":
            self.load(Path(body["kwargs"]["weights_path"]))
        named = {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": self.folder}]},
            "/server_info": {"vllm_config": self.settings},
            "/weight_info": {"weight_version": self.weight_version},
        }
        return named.get(route, {})

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        self.num_loads += 1
        if self.applies_weights:
            self.model.load_state_dict(load_file(folder / "model.safetensors"))

    @torch.no_grad()
    def prompt_logprobs(self, ids: list[int]) -> dict:
        logprobs_SV = self.model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        found = [
            {str(id): {"logprob": float(logprobs_SV[at, id])}} for at, id in enumerate(ids[1:])
        ]
        return self.completion({"max_tokens": 1}) | {"prompt_logprobs": [None, *found]}

    def completion(self, sampling: dict) -> dict:
        rng = random.Random(sampling.get("seed", 0))
        length = rng.randint(1, sampling["max_tokens"])
        ids = [rng.randrange(3, self.model.config.vocab_size) for _ in range(length)]
        is_cut = length == sampling["max_tokens"]
        if not is_cut:
            ids[-1] = sampling["stop_token_ids"][0]
        content = [{"token_id": id, "logprob": -1.0, "rank": 1, "top_logprobs": []} for id in ids]
        versions = [{"version": self.weight_version, "start": 0, "end": length}]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "length" if is_cut else "stop"}
        return {
            "choices": [choice | {"logprobs": {"content": content}, "weight_versions": versions}]
        }
