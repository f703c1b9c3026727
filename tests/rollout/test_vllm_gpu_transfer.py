"""Weights to servers without files. There is no GPU in these tests: NCCL is replaced by a queue, the rest is real.

The fields of the requests are compared with vLLM's own classes where vLLM is installed.
"""

import json
import os
import queue
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from vllm_server import vllm_python

from grpo.rollout.vllm import Server, ServerError, gpu_transfer
from grpo.rollout.vllm.gpu_transfer import NCCLTransfer, description, in_parts

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5, -2.0]), "c": torch.ones(4, 4)}


class Worker(ThreadingHTTPServer):
    """Answers vLLM's weight-transfer routes, and receives what is broadcast."""

    daemon_threads = True

    def __init__(self, fails_at: str | None = None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fails_at, self.calls, self.received, self.broadcasts = fails_at, [], {}, queue.Queue()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, {"world_size": 2})

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or "null")
        self.server.calls.append((self.path, body))
        if self.path == self.server.fails_at:
            return self.answer(500, {"error": {"message": "no such weight"}})
        if self.path == "/update_weights":
            info = body["update_info"]
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                sent = self.server.broadcasts.get(timeout=60)
                assert (str(sent.dtype), list(sent.shape)) == (f"torch.{dtype}", shape)
                self.server.received[name] = sent
        return self.answer(200, {"success": True})

    def answer(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def workers(monkeypatch):
    """Two servers of two GPUs each, of which one queue stands for the workers of one server."""
    found = [Worker(), Worker()]

    class Queues:
        """The functions of torch.cuda.nccl that are used."""

        unique_id = staticmethod(lambda: bytes(range(128)))
        init_rank = staticmethod(lambda size, unique_id, rank: ("communicator", size, rank))
        all_reduce = staticmethod(lambda inputs, comms: None)

        @staticmethod
        def broadcast(inputs, root, comms):
            assert (root, comms) == (0, [("communicator", 5, 0)])
            for worker in found:
                worker.broadcasts.put(inputs[0].clone())

    class Done:
        record = query = lambda self: True

    monkeypatch.setattr(gpu_transfer, "nccl", Queues)
    monkeypatch.setattr(torch.cuda, "Event", Done)
    yield found
    for worker in found:
        worker.shutdown()
        worker.server_close()


def sent(workers, weights=WEIGHTS, dtype=torch.bfloat16, version="v.1"):
    transfer = NCCLTransfer([Server(w.address, timeout_s=60) for w in workers], torch.device("cpu"))
    transfer.send(weights.items(), {name: w.shape for name, w in weights.items()}, dtype, version)
    return transfer


def test_every_server_receives_every_weight_between_pause_and_resume(workers):
    transfer = sent(workers)
    transfer.send(WEIGHTS.items(), {n: w.shape for n, w in WEIGHTS.items()}, torch.bfloat16, "v.2")
    update = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    update.append("/reset_prefix_cache")
    for number, worker in enumerate(workers):
        assert [path for path, _ in worker.calls] == ["/init_weight_transfer_engine", *update, *update]
        init = worker.calls[0][1]["init_info"]
        # The trainer is rank 0; the first server's GPUs are ranks 1 and 2, the second's 3 and 4.
        assert (init["rank_offset"], init["world_size"]) == (1 + 2 * number, 5)
        assert [body for path, body in worker.calls if path == "/finish_weight_update"] == [
            {"weight_version": "v.1"}, {"weight_version": "v.2"},
        ]  # fmt: skip
        assert worker.received.keys() == WEIGHTS.keys()
        for name, weight in WEIGHTS.items():
            assert torch.equal(worker.received[name], weight.bfloat16())


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights"])
def test_a_server_that_refuses_ends_the_transfer(workers, monkeypatch, route):
    workers[1].fails_at = route
    refused = threading.Event()  # as NCCL does, the trainer waits for a worker that never joins
    monkeypatch.setattr(
        gpu_transfer.nccl, "init_rank", lambda *_: refused.wait(60 if "init" in route else 0) or ("communicator", 5, 0)
    )
    with pytest.raises(ServerError, match="no such weight") as caught:
        sent(workers)
    refused.set()
    assert "\n" not in str(caught.value)


def test_parts_are_as_large_as_allowed():
    # In bf16: 12, 4 and 32 bytes.
    names = [list(part) for part in in_parts(WEIGHTS.items(), torch.bfloat16, 16)]
    assert names == [["a", "b"], ["c"]]
    assert [list(part) for part in in_parts(WEIGHTS.items(), torch.bfloat16, 15)] == [["a"], ["b"], ["c"]]
    assert [list(part) for part in in_parts(WEIGHTS.items(), torch.bfloat16, 100)] == [["a", "b", "c"]]


@pytest.mark.slow
def test_the_requests_have_the_fields_of_vllms_own_classes():
    update = description({"a": torch.Size([2, 3]), "b": torch.Size([2])}, torch.bfloat16)
    init = dict(rank_offset=1, world_size=3, packed=False)
    code = f"""
import base64, pickle
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
update, init = {update!r}, {init!r}
init["nccl_unique_id_b64"] = base64.b64encode(bytes(128)).decode()
assert NCCLWeightTransferInitInfo(**init).nccl_unique_id_bytes == bytes(128)
assert NCCLWeightTransferUpdateInfo(**update).shapes == [[2, 3], [2]]
IPCWeightTransferInitInfo(packed=False)
handles = base64.b64encode(pickle.dumps([{{"GPU": ()}}, {{"GPU": ()}}])).decode()
assert len(IPCWeightTransferUpdateInfo(**update, ipc_handles_pickled=handles).ipc_handles) == 2
print("accepted")
"""
    environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    done = subprocess.run([vllm_python(), "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("accepted"), done.stderr[-2000:]
