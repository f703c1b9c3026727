"""Weight sync: loads the policy's weights into the servers, verifies them there, and restores them in a server that has lost them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from grpo.distributed import World, gathered_on_main, is_sharded
from grpo.model import Policy, num_parameters
from grpo.rollout.vllm.check import Facts, check_context, check_server, check_settings, check_transfer
from grpo.rollout.vllm.client import MAX_REQUESTS, NotAnswered, Server, ServerError, Unreachable
from grpo.rollout.vllm.gpu_transfer import make_transfer
from grpo.rollout.vllm.verify import check_checksums, check_probe, own_logprobs
from grpo.rollout.vllm.weights import DTYPES, PREFIX, Snapshot, WeightsFolder, saved_tensors

CHECKSUM_BYTES = 2 * 10**9
"""Weights above this size are compared by checksums in the first syncs only: hashing 2 GB takes seconds on both sides."""
FIRST_SYNCS = 2
LOADING = "loading "
"""Before the version of weights that are not verified yet."""
RETRY_SECONDS = 0.5


class CannotLoad(ServerError):
    """A server cannot load the weights, however often it is asked."""


class Servers:
    """The servers of a run and the weights they have.

    :meth:`check` and :meth:`sync` are called by all ranks together, the other methods by each rank, also in several threads.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        policy: Policy,
        *,
        root: nn.Module,
        folder: WeightsFolder,
        probe_ids: Sequence[int],
        world: World,
        warn: Callable[[str], None],
        weight_transfer: str,
    ):
        """``root``: see :class:`grpo.rollout.vllm.engine.VLLMEngine`; ``weight_transfer``: see ``rollout.weight_transfer``."""
        # An adapter is small, and vLLM takes adapters from files alone.
        self.transfer = None if policy.adapter else make_transfer(weight_transfer, servers, policy.device)
        self.all, self.policy, self.root, self.folder, self.world = list(servers), policy, root, folder, world
        self.probe_ids, self.warn = probe_ids, warn
        rank, n = world.rank, len(self.all)
        self.own = self.all[rank :: world.size] if n > world.size else [self.all[rank % n]]
        """The servers that this rank samples from."""
        self.facts: dict[Server, Facts] = {}
        self._uses: Sequence[tuple[int, Any]] = ()
        self._snapshot: Snapshot | None = None
        self._expected: list[float] = []
        """Log-probs of the probe under the snapshot."""
        self._versions: dict[Server, str] = {}
        """The version of the weights that each server has, as far as this rank knows."""
        self._num_syncs = 0
        self._lock = threading.Lock()

    def check(self, uses: Sequence[tuple[int, Any]]) -> None:
        """Check the servers that this rank uses; all ranks call it. ``uses``: see :class:`grpo.rollout.vllm.engine.VLLMEngine`."""
        self._uses = uses
        with self.world.fail_together():
            for server in self._used_by_this_rank:
                self._check(server)

    def check_use(self, server: Server, longest_prompt: int, sampling: Any) -> None:
        """ServerError unless the server's context and its log-probs fit the settings."""
        check_settings(server, self.facts[server], sampling)
        check_context(server, self.facts[server], longest_prompt, sampling.max_completion_length)

    def sync(self) -> None:
        """Take a snapshot of the policy's weights and load it into every server; all ranks call it.

        Raises:
            ValueError: on all ranks, if the weights cannot be written or a server does not compute with them.
        """
        size = num_parameters(self.policy.model, trained=True) * DTYPES[self.policy.precision].itemsize
        with_checksums = size < CHECKSUM_BYTES or self._num_syncs < FIRST_SYNCS
        # Under FSDP the forward pass is a collective.
        with nullcontext() if is_sharded(self.root) else self.world.fail_together():
            self._expected = own_logprobs(self.policy, self.root, self.probe_ids)
        former = self._snapshot
        with self.world.fail_together():
            for server in self._used_by_this_rank:
                if (
                    former is not None and self._version_found(server) is None
                ):  # it may have been started again with other options
                    self._check(server)
        if self.transfer is None:
            self._snapshot = self.folder.write(self.policy, with_checksums=with_checksums)
        else:
            self._snapshot = self._send()
        self._versions = dict.fromkeys(self.all, f"{self._snapshot.name}.0")
        with self.world.fail_together():
            for server in self._synced_by_this_rank:
                self._load_and_verify(server, self._versions[server])
                if former is not None and former.adapter:
                    self._unload(server, former.name)
        self._num_syncs += 1
        if self.world.is_main:
            self.folder.keep_only(self._snapshot)

    def _send(self) -> Snapshot:
        """Send the policy's weights through the GPU. All ranks gather them, the main rank sends; its error is raised on all."""
        tensors, error = list(saved_tensors(self.policy.model)), None
        snapshot = self.folder.new_snapshot(adapter=False)
        weights = gathered_on_main(tensors, self.world, self.policy.device)
        if self.world.is_main:
            layout = {name: tensor.shape for name, tensor in tensors}
            try:
                self.transfer.send(weights, layout, DTYPES[self.policy.precision], f"{LOADING}{snapshot.name}.0")
            except Exception as caught:  # of any type: the other ranks are gathering
                error = caught
        for _ in weights:  # every rank takes part in every gather, also after an error
            pass
        with self.world.fail_together():
            if error is not None:
                raise error
        return snapshot

    @property
    def _used_by_this_rank(self) -> list[Server]:
        return list(dict.fromkeys([*self._synced_by_this_rank, *self.own]))

    @property
    def _synced_by_this_rank(self) -> list[Server]:
        """The servers that this rank loads weights into."""
        return self.all[self.world.rank :: self.world.size]

    def most_requests(self, server: Server, longest_prompt: int) -> int:
        """Most requests that this rank may have in flight to the server; ServerError if not even one prompt fits."""
        limit = self.facts[server].tokens_per_step
        most = MAX_REQUESTS // len(self.own)
        if limit is None:
            return most
        num_ranks = max(-(-self.world.size // len(self.all)), 1)
        fitting = limit // longest_prompt // num_ranks
        if fitting == 0:
            raise ServerError(
                f"{server} would compute a prompt of {longest_prompt} tokens in parts, which fails on the CPU when requests have seeds: start it "
                "with --no-enable-chunked-prefill"
            )
        return min(fitting, most)

    def expected_version(self, server: Server) -> str:
        """The version that completions of this server must have."""
        return self._versions[server]

    def model_name(self, server: Server) -> str:
        """The name to sample under: that of the adapter, if there is one."""
        return self._snapshot.name if self._snapshot.adapter else server.model

    def has_version(self, server: Server, version: str) -> bool:
        """True if the server still has the weights of that version; waits until it answers.

        An adapter is known by its name, which every request gives and which no other adapter gets.
        """
        return self._snapshot.adapter or server.weight_version() == version

    def restore(self, server: Server, version: str) -> None:
        """Load the snapshot again into a server that no longer has ``version``, unless another thread or rank has done it.

        The weights get another version then, so that a completion requested before is recognised as stale.
        """
        # Without files there is nothing that two ranks could load at the same time, and the folder may be on another machine.
        with self._lock, nullcontext() if self.transfer is not None else self.folder.lock():
            if self._versions[server] != version:
                return
            found = self._version_found(server)
            if found is None and self.transfer is not None:
                raise ServerError(
                    f"{server} was started again and has lost its weights, which rollout.weight_transfer={self.transfer.name} cannot bring back "
                    "within a step: start the run again, it continues from its checkpoint, or set rollout.weight_transfer=file"
                )
            if found is None:
                self.warn(f"{server} {self._loss(server)}: it gets the weights of this step again")
                self._check(server)
                found = f"{self._snapshot.name}.{uuid.uuid4().hex[:8]}"
                self._load_and_verify(server, found)
            self._versions[server] = found

    def _check(self, server: Server) -> None:
        adapter = self.policy.adapter
        self.facts[server] = check_server(server, self.policy, adapter.peft_config["default"].r if adapter else None)
        if self.transfer is not None:
            check_transfer(server, self.facts[server], self.transfer.name)
        for longest_prompt, sampling in self._uses:
            self.check_use(server, longest_prompt, sampling)

    def _loss(self, server: Server) -> str:
        """The way in which a server lost its weights."""
        if not self._snapshot.adapter and server.weight_version().removeprefix(LOADING).startswith(PREFIX):
            return "has the weights of another run (give each run a server of its own)"
        return "was started again"

    def _version_found(self, server: Server) -> str | None:
        """The server's version if its weights are those of the snapshot."""
        if self._snapshot.adapter:
            is_there = any(model["id"] == self._snapshot.name for model in server.models())
            return self._versions[server] if is_there else None
        found = server.weight_version()
        return found if found.rpartition(".")[0] == self._snapshot.name else None

    def _load_and_verify(self, server: Server, version: str) -> None:
        """Load the snapshot into the server and verify it; from the start if the server is started again meanwhile.

        The server's version tells how far it is: :data:`LOADING` and the version, the version alone when the weights are verified, and
        neither after a restart.
        """
        deadline = time.monotonic() + server.timeout_s
        while True:
            try:
                self._load(server, version)
                self._verify(server)
                if self._is_loaded(server, version):
                    self._finish(server, version)
                    return
                problem = ServerError(
                    f"{server} lost the weights while they were loaded: if another run uses it, give each run a server of its own"
                )
            except (CannotLoad, Unreachable):
                raise
            except NotAnswered as error:
                problem = error
            except ServerError as error:
                if self._is_loaded(server, version):
                    raise
                problem = error
            if self.transfer is not None or time.monotonic() > deadline:
                raise problem
            time.sleep(RETRY_SECONDS)
            self._check(server)

    def _load(self, server: Server, version: str) -> None:
        if self._snapshot.adapter:
            self._load_adapter(server)
        elif self.transfer is None:  # which has sent the weights to all servers at once
            self._reload(server, version)

    def _finish(self, server: Server, version: str) -> None:
        if not self._snapshot.adapter:
            # Sent once: a repeated request could reach a server that was started again.
            server.set_weight_version(version, retry=False)

    def _is_loaded(self, server: Server, version: str) -> bool:
        """True if the server has not been started again since the weights were loaded."""
        if self._snapshot.adapter:
            return self._version_found(server) is not None
        return server.weight_version() == LOADING + version

    def _reload(self, server: Server, version: str) -> None:
        server.set_weight_version(LOADING + version)
        try:
            server.reload(str(self._snapshot.folder))
        except NotAnswered as error:
            # "EngineCore encountered an issue": the process ends, and a started one comes back.
            if error.status is not None and "EngineCore" not in str(error):
                raise CannotLoad(
                    f"{error}: {server} could not load {self._snapshot.folder}: set rollout.weights_folder to a folder that the server sees too, "
                    "and start the server again"
                ) from None
            raise
        server.reset_prefix_cache()

    def _load_adapter(self, server: Server) -> None:
        """vLLM's prefix cache tells adapters apart by name, so it need not be emptied."""
        if self._version_found(server) is None:
            try:
                server.load_adapter(self._snapshot.name, str(self._snapshot.folder))
            except ServerError as error:
                if isinstance(error, NotAnswered) and error.status is None:  # the connection has ended
                    raise
                raise CannotLoad(
                    f"{error}: set rollout.weights_folder to a folder that the server sees too, or lora.target_modules to layers that vLLM adapts"
                ) from None

    def _unload(self, server: Server, name: str) -> None:
        if any(model["id"] == name for model in server.models()):
            server.unload_adapter(name)

    def _verify(self, server: Server) -> None:
        adapter = self._snapshot.name if self._snapshot.adapter else None
        check_probe(server, self.probe_ids, self._expected, self.policy.precision, adapter)
        if self._snapshot.checksums:
            check_checksums(server, self._snapshot.checksums, self.facts[server].tensor_parallel)
