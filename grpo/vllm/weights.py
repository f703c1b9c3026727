"""Files that carry the policy's weights to the vLLM servers, and the proof that a server has loaded
the weights."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo.distributed import run_in_forward_pass
from grpo.model import Policy, save_weights

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_LOGPROB_DIFFERENCE = {"fp32": 1e-3, "bf16": 0.1}
"""Limit on the mean absolute difference between log-probs of server and trainer, in nats, by
``runtime.precision``."""
MIN_PROBE_TOKENS = 8
MAX_PROBE_TOKENS = 64
"""Limits on the number of tokens in the text whose log-probs are compared."""


class WeightsFolder:
    """Folder inside ``rollout.weights_folder`` where one engine writes weights for its servers."""

    def __init__(self, parent: str):
        # The name has the host and the process, from which a later run sees whether the folder is
        # still in use. The suffix tells engines of one process apart.
        self.prefix = f"grpo-{socket.gethostname()}-"
        name = f"{self.prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        # The path is absolute, since a server may have another working directory.
        self.path = Path(os.path.abspath(parent), name)

    def write(
        self,
        policy: Policy,
        weights: dict[str, Tensor],
        version: str,
    ) -> Path:
        """Write weights as ``save_pretrained`` does, and return the folder of the files.

        Weights are written in the precision of the run, and an adapter is written in fp32. Folders
        whose process on this machine has ended are deleted first.
        """
        # A process that was killed has not deleted its folder, and the parent folder usually lies
        # in memory (/dev/shm).
        for leftover in self.path.parent.glob(f"{self.prefix}*"):
            rest = leftover.name.removeprefix(self.prefix)
            pid = rest.partition("-")[0]
            if not Path("/proc", pid).exists():
                shutil.rmtree(leftover, ignore_errors=True)

        dtype = torch.float32 if policy.adapter else DTYPES[policy.precision]
        # Each name gets a copy, so that save_pretrained writes a tied weight under all its names.
        # On the CPU, vLLM packs the head again only if the files hold the head.
        copies = {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}
        folder = self.path / version
        save_weights(policy.trained_model, copies, folder)
        return folder


class Probe:
    """Proof that a server computes with the policy's weights. Server and policy must give the
    tokens of a short text the same log-probs, up to rounding.

    Shapes: ``S`` is the number of tokens of the text without the first, ``V`` the size of the
    vocabulary.
    """

    def __init__(
        self,
        policy: Policy,
        root: nn.Module,
        ids: Sequence[int],
    ):
        """Take the first :data:`MAX_PROBE_TOKENS` tokens of a prompt as the text. If the prompt is
        shorter than :data:`MIN_PROBE_TOKENS`, the text is a fixed list of tokens.

        Args:
            root: the module that holds the policy's model, under FSDP the root of the sharded
                modules.
            ids: token ids of the prompt.
        """
        self.policy = policy
        self.root = root
        self.ids = list(ids[:MAX_PROBE_TOKENS])
        if len(self.ids) < MIN_PROBE_TOKENS:
            vocabulary = len(policy.model.get_input_embeddings().weight)
            self.ids = [(7 * i + 3) % vocabulary for i in range(2 * MIN_PROBE_TOKENS)]
        self.policy_S = torch.zeros(0)
        """The policy's log-probs of ``ids[1:]`` in nats, from the last :meth:`update`."""
        self.last_changes: dict[Any, tuple[Tensor, Tensor]] = {}
        """Server -> its log-probs when they last changed, and the policy's log-probs at that
        time."""

    def update(self) -> None:
        """Compute the policy's log-probs of the text. All ranks call it together.

        Raises:
            ValueError: if a log-prob is NaN.
        """
        ids_1S = torch.tensor([self.ids], device=self.policy.device)
        with self.policy.inference_mode():
            logits_1SV = run_in_forward_pass(
                self.root,
                lambda: self.policy.model(input_ids=ids_1S, use_cache=False).logits,
            )
        # The logits at each token predict the next one.
        logprobs_SV = logits_1SV[0, :-1].float().log_softmax(dim=-1)
        labels_S1 = ids_1S[0, 1:, None]
        self.policy_S = logprobs_SV.gather(1, labels_S1)[:, 0].cpu()
        if self.policy_S.isnan().any():
            raise ValueError(
                "the model computes NaN: its weights are broken, lower optim.learning_rate"
            )

    def compare(
        self,
        server: Any,
        logprobs: Sequence[float],
    ) -> str | None:
        """Compare the log-probs of a server that has loaded the weights with the policy's
        log-probs.

        Args:
            logprobs: the server's log-probs of ``ids[1:]``, in nats.

        Returns:
            The reason why the server does not compute with the policy's weights; None if it does.
        """
        server_S = torch.tensor(logprobs)
        limit = MAX_LOGPROB_DIFFERENCE[self.policy.precision]
        difference = _distance(server_S, self.policy_S)
        # "not <=" finds a difference of NaN, too, which is a fault.
        if not difference <= limit:
            return (
                f"log-probs of a text differ by {difference:.3g} nats on average (limit {limit:g})"
            )

        # An update may change log-probs by less than this limit. But a server has not applied it if
        # its log-probs stay the same to the bit, while the policy's move by more than server and
        # policy differ.
        former = self.last_changes.setdefault(server, (server_S, self.policy_S))
        former_server_S, former_policy_S = former
        moved = _distance(self.policy_S, former_policy_S)
        noise = _distance(former_server_S, former_policy_S)
        if not torch.equal(server_S, former_server_S):
            self.last_changes[server] = (server_S, self.policy_S)
        elif moved > 2 * noise:
            return f"log-probs of a text have not changed, those of the policy by {moved:.3g}"
        return None


def _distance(first_S: Tensor, second_S: Tensor) -> float:
    """Mean absolute difference between two rows of log-probs."""
    return float((first_S - second_S).abs().mean())
