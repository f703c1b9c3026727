"""An HTTP server that speaks vLLM's routes, with faults that a test switches on.

It computes real log-probs of prompts and real checksums with the weights that it was given. Its completions are a fixed function of the
seed: they show which request was answered, not what the model samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import select
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


class NoAnswer(Exception):
    """The connection ends without an answer."""


class HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # connections that wait to be accepted: behind more, a client waits a second


class FaultyServer:
    """In this process, on a port of its own."""

    def __init__(self, folder: Path, **changes: Any):
        """``folder``: of the model. ``changes``: of ``/server_info``, by the names of vLLM's settings."""
        self.folder, self.changes = folder, changes
        self.vllm_version = "0.32.0"
        self.dev_mode = True
        self.api_key = ""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.vocabulary = self.model.config.vocab_size
        self.start_state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.forget()
        self.bodies: list[dict] = []
        """Of all requests for completions that were answered or refused by :attr:`on_completion`."""
        self.num_reloads = self.num_adapters_refused = 0
        self.applies_weights = True
        self.on_completion: Callable[[int], None] = lambda number: None
        """Called with the number of the request, from 0, before each completion; may raise :class:`NoAnswer` or change this server."""
        self.change_answer: Callable[[dict], None] = lambda answer: None
        self.status: Callable[[str], int] = lambda route: 200
        """Route -> the status it is answered with."""
        self._lock, self._current = threading.Lock(), threading.local()
        self._http: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self, weight_version: str = "default") -> None:
        """Have the weights of a start, under their version or another."""
        self.weight_version, self.adapters = weight_version, []
        with torch.no_grad():
            self.model.load_state_dict(self.start_state)

    def start(self) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                server.handle(self, None)

            def do_POST(self):
                length = int(self.headers.get("Content-Length") or 0)
                server.handle(self, json.loads(self.rfile.read(length) or b"null"))

            def log_message(self, *args):
                pass

        self._http = HTTPServer(("127.0.0.1", self.port), Handler)
        self._http.handle_error = lambda *args: None
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """End all connections, now, and listen no longer."""
        if self._http is not None:
            http, self._http = self._http, None
            http.shutdown()
            http.server_close()

    def wait_for_client(self, seconds: float) -> None:
        """In :attr:`on_completion`: return when the client of this request has ended its connection."""
        assert select.select([self._current.connection], [], [], seconds)[0]

    def restart(self, seconds: float = 0.2) -> None:
        """Die, and come back later with the weights of a start."""
        self.stop()
        self.forget()
        threading.Timer(seconds, self.start).start()

    def handle(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        is_answered, self._current.connection = True, request.connection
        try:
            route = request.path.partition("?")[0]
            status = self.status(route)
            if (
                self.api_key
                and route.startswith("/v1")
                and request.headers["Authorization"] != f"Bearer {self.api_key}"
            ):
                status = 401
            answer = self.answer(route, body) if status == 200 else (status, {"error": {"message": "made to fail"}})
            status, content = answer if isinstance(answer, tuple) else (200, answer)
        except NoAnswer:
            is_answered = False
        if not is_answered or request.server is not self._http:
            request.close_connection = True
            with contextlib.suppress(OSError):
                request.connection.shutdown(socket.SHUT_RDWR)
            return
        data = json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def answer(self, route: str, body: Any) -> Any:
        dev = (
            "/server_info",
            "/weight_info",
            "/update_weight_version",
            "/collective_rpc",
            "/weight_checker",
            "/reset_prefix_cache",
        )
        if route in dev and not self.dev_mode:
            return 404, {"detail": "Not Found"}
        if route == "/v1/completions":
            return self.completion(body)
        with self._lock:
            return getattr(self, route.strip("/").replace("v1/", "").replace("/", "_"))(body)

    def version(self, body):
        return {"version": self.vllm_version}

    def models(self, body):
        ids = [str(self.folder), *self.adapters]
        return {
            "data": [
                {"id": id, "root": str(self.folder), "max_model_len": self.changes.get("max_model_len", 256)}
                for id in ids
            ]
        }

    def server_info(self, body):
        changes = self.changes
        model = {"dtype": "torch.float32", "logprobs_mode": "raw_logprobs", "quantization": None}
        lora = {"max_lora_rank": changes["max_lora_rank"]} if "max_lora_rank" in changes else None
        return {
            "vllm_config": {
                "model_config": {name: changes.get(name, value) for name, value in model.items()},
                "parallel_config": {"tensor_parallel_size": 1},
                "scheduler_config": {
                    "enable_chunked_prefill": True,
                    "max_num_batched_tokens": changes.get("max_num_batched_tokens", 2048),
                },
                "device_config": {"device": "cpu"},
                "lora_config": lora,
            },
            "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": lora is not None},
        }

    def load_lora_adapter(self, body):
        """Refuse, as vLLM refuses an adapter of layers that it does not adapt."""
        self.num_adapters_refused += 1
        return 500, {"error": {"message": "no such layer"}}

    def weight_info(self, body):
        return {"weight_version": self.weight_version}

    def update_weight_version(self, body):
        self.weight_version = body["new_version"]
        return {"success": True}

    def collective_rpc(self, body):
        folder = Path(body["kwargs"]["weights_path"])
        if not folder.is_dir():
            return 500, {"error": {"message": f"Cannot find any model weights with {folder}"}}
        self.num_reloads += 1
        if self.applies_weights:
            state = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
            with torch.no_grad():
                self.model.load_state_dict(state, strict=False)
        return {"results": [None]}

    def reset_prefix_cache(self, body):
        return {"success": True}

    def weight_checker(self, body):
        found = {}
        for name, tensor in self.model.state_dict().items():
            if "embed_tokens" in name or name == "lm_head.weight":
                tensor = torch.cat([tensor, tensor.new_zeros(-len(tensor) % 64, tensor.shape[1])])
            if "proj.weight" in name:
                tensor = tensor.new_zeros(0)
            found[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        return {"checksums": found}

    @torch.no_grad()
    def completion(self, body):
        if body["model"] not in (str(self.folder), *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if max(body["prompt"]) >= self.vocabulary:
            return 400, {"error": {"message": f"Token id {max(body['prompt'])} is out of vocabulary"}}
        if "prompt_logprobs" in body:
            with self._lock:
                logprobs_SV = self.model(torch.tensor([body["prompt"]])).logits[0].log_softmax(dim=-1)
            pairs = enumerate(body["prompt"][1:])
            found = [None, *({str(id): {"logprob": float(logprobs_SV[at, id])}} for at, id in pairs)]
            return {"choices": [{"prompt_logprobs": found}]}
        if "return_token_ids" in body:
            with self._lock:
                number = len(self.bodies)
                self.bodies.append(body)
            self.on_completion(number)
        rng = random.Random(body.get("seed", 0))
        length = rng.randint(1, body["max_tokens"])
        ids = [rng.randrange(3, self.vocabulary) for _ in range(length)]
        reason = "length" if length == body["max_tokens"] else "stop"
        if reason == "stop":
            ids[-1] = (body.get("stop_token_ids") or [1])[0]
        logprobs = {"token_logprobs": [-1.0] * length} if "logprobs" in body else None
        answer = {"choices": [{"token_ids": ids, "finish_reason": reason, "logprobs": logprobs}]}
        self.change_answer(answer)
        return answer


def never_answer() -> None:
    """Keep the connection without an answer, for longer than any test waits."""
    time.sleep(600)
