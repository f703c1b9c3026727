"""Weights to vLLM servers on GPUs, without files: NCCL broadcasts, or CUDA IPC where trainer and server share a GPU.

Both go through vLLM's weight-transfer routes, for servers started with ``--weight-transfer-config '{"backend": "nccl"}'`` (or ``"ipc"``).
Not yet run on a GPU.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.multiprocessing.reductions import reduce_tensor

from grpo.rollout.vllm.client import Server, ServerError

IPC_BYTES = 1 << 30
"""Weights that are copied and shared at a time by :class:`IPCTransfer`."""

NamedTensors = Iterable[tuple[str, Tensor]]


class GPUTransfer(Protocol):
    """Hands weights over to servers to which nothing else is sent meanwhile."""

    name: str
    """The value of ``rollout.weight_transfer``, and vLLM's name of the backend."""

    def send(self, weights: NamedTensors, layout: dict[str, torch.Size], dtype: torch.dtype, version: str) -> None:
        """Send every weight, and give the servers its version.

        Args:
            weights: name in a Hugging Face checkpoint, and tensor; in the order of ``layout``. Read once, a tensor at a time.
            layout: name -> shape.
            dtype: in which the weights travel: the servers' own.

        Raises:
            ServerError: if a server refuses, or does not take the weights in its time limit. Its model does not work any more then.
        """


class NCCLTransfer:
    """Broadcasts from this process, rank 0 of a communicator whose other ranks are the servers' workers."""

    name = "nccl"

    def __init__(self, servers: Sequence[Server], device: torch.device):
        self.servers, self.device = servers, device
        self._communicator: Any = None

    def send(self, weights: NamedTensors, layout: dict[str, torch.Size], dtype: torch.dtype, version: str) -> None:
        if self._communicator is None:
            self._communicator = self._connect()
        update = {"update_info": description(layout, dtype)}
        with updating(self.servers, version):
            # A server answers when it has received all weights.
            answers = [in_thread(post, server, "/update_weights", update) for server in self.servers]
            for _, weight in weights:
                sent = weight.detach().to(self.device, dtype).contiguous()
                nccl.broadcast([sent], root=0, comms=[self._communicator])
                self._wait_for_gpu(answers)
            for answer in answers:
                answer.result()

    def _connect(self) -> Any:
        """The communicator. Every worker joins while its server answers, and begins with a sum over one element."""
        sizes = [server.request("GET", "/get_world_size")["world_size"] for server in self.servers]
        size, unique_id, answers = 1 + sum(sizes), nccl.unique_id(), []
        for number, server in enumerate(self.servers):
            init_info = {
                "rank_offset": 1 + sum(sizes[:number]),
                "world_size": size,
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
                "packed": False,
            }
            body = {"init_info": init_info}
            answers.append(in_thread(post, server, "/init_weight_transfer_engine", body))
        joined = in_thread(self._join, size, unique_id)
        self._wait(joined.done, answers)
        communicator = joined.result()
        nccl.all_reduce([torch.ones(1, device=self.device)], comms=[communicator])
        self._wait_for_gpu(answers)
        for answer in answers:
            answer.result()
        return communicator

    def _join(self, size: int, unique_id: bytes) -> Any:
        """In a thread: it returns when all workers have joined."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        return nccl.init_rank(size, unique_id, 0)

    def _wait_for_gpu(self, answers: list[Future]) -> None:
        done = torch.cuda.Event()
        done.record()
        self._wait(done.query, answers)

    def _wait(self, is_done: Callable[[], bool], answers: list[Future]) -> None:
        """Wait for this process's part of a collective, which never ends if a server has failed: its answer is then an error."""
        deadline = time.monotonic() + min(server.timeout_s for server in self.servers)
        while not is_done():
            for answer in answers:
                if answer.done():
                    answer.result()
            if time.monotonic() > deadline:
                addresses = ", ".join(str(server) for server in self.servers)
                raise ServerError(
                    f"{addresses}: the weights were not received by NCCL within rollout.server_timeout_s: see the server's log, or set "
                    "rollout.weight_transfer=file"
                )
            time.sleep(0.001)


class IPCTransfer:
    """The server maps copies of the weights in this process's GPU memory; it must use the same GPU."""

    name = "ipc"

    def __init__(self, server: Server, device: torch.device):
        self.server, self.device = server, device
        self._is_connected = False

    def send(self, weights: NamedTensors, layout: dict[str, torch.Size], dtype: torch.dtype, version: str) -> None:
        if not self._is_connected:
            post(self.server, "/init_weight_transfer_engine", {"init_info": {"packed": False}})
            self._is_connected = True
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        with updating([self.server], version):
            for part in in_parts(weights, dtype, IPC_BYTES):
                shared = {name: weight.detach().to(self.device, dtype, copy=True) for name, weight in part.items()}
                torch.cuda.synchronize(self.device)
                handles = [{gpu: reduce_tensor(weight)[1]} for weight in shared.values()]
                update = description({name: weight.shape for name, weight in shared.items()}, dtype)
                update["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
                # `shared` lives until the server has answered, and has loaded it.
                post(self.server, "/update_weights", {"update_info": update})


def make_transfer(name: str, servers: Sequence[Server], device: torch.device) -> GPUTransfer | None:
    """The transfer that ``rollout.weight_transfer`` names; None for ``file``."""
    if name == "file":
        return None
    return NCCLTransfer(servers, device) if name == "nccl" else IPCTransfer(servers[0], device)


def description(layout: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, Any]:
    """Names, dtypes and shapes, as /update_weights takes them."""
    dtypes = [str(dtype).removeprefix("torch.")] * len(layout)
    return {"names": list(layout), "dtype_names": dtypes, "shapes": [list(shape) for shape in layout.values()]}


def in_parts(weights: NamedTensors, dtype: torch.dtype, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Weights in parts of at most ``most_bytes`` in ``dtype``; a single larger weight is a part of its own."""
    part, size = {}, 0
    for name, weight in weights:
        added = weight.numel() * dtype.itemsize
        if part and size + added > most_bytes:
            yield part
            part, size = {}, 0
        part[name] = weight
        size += added
    if part:
        yield part


@contextmanager
def updating(servers: Sequence[Server], version: str) -> Iterator[None]:
    """Inside the block the servers sample nothing and wait for weights; afterwards they have this version, and no cached prefixes."""
    try:
        for server in servers:
            post(server, "/pause?mode=wait")
            post(server, "/start_weight_update")
        yield
        for server in servers:
            post(server, "/finish_weight_update", {"weight_version": version})
            post(server, "/resume")
            server.reset_prefix_cache()
    except ServerError as error:
        raise ServerError(
            f"{error}: servers that you started are paused in the middle of an update, start them again"
        ) from None


def in_thread(function: Callable, *arguments: Any) -> Future:
    """Call a function in a thread that does not hold up the end of the process: a collective whose other ranks are gone never returns."""
    future: Future = Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def post(server: Server, route: str, body: dict[str, Any] | None = None) -> Any:
    """One request, which is not repeated: half an update cannot be repeated."""
    return server.request("POST", route, body, retry=False)
