"""The policy's weights on their way to the servers: the files, and the proof that they are
loaded."""

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
"""Largest mean difference between log-probs of server and trainer, in nats, by
``runtime.precision``."""
MIN_PROBE_TOKENS = 8
MAX_PROBE_TOKENS = 64
"""Length of the text whose log-probs are compared."""


class WeightsFolder:
    """The folder of an engine inside ``rollout.weights_folder``, for the weights that servers
    read."""

    def __init__(self, parent: str):
        # From host and process a later run sees whether the folder is still in use. The suffix
        # tells engines of one process apart.
        self.prefix = f"grpo-{socket.gethostname()}-"
        suffix = uuid.uuid4().hex[:8]
        name = f"{self.prefix}{os.getpid()}-{suffix}"
        # A server may have another working directory.
        self.path = Path(os.path.abspath(parent), name)

    def write(
        self,
        policy: Policy,
        weights: dict[str, Tensor],
        version: str,
    ) -> Path:
        """Write weights as ``save_pretrained`` does, and return their folder.

        They are in the precision of the run, those of an adapter in fp32. Folders of processes of
        this machine that have ended are deleted first.
        """
        # A process that was killed has deleted nothing, and the parent is usually memory.
        for leftover in self.path.parent.glob(f"{self.prefix}*"):
            rest = leftover.name.removeprefix(self.prefix)
            pid = rest.partition("-")[0]
            if not Path("/proc", pid).exists():
                shutil.rmtree(leftover, ignore_errors=True)

        dtype = torch.float32 if policy.adapter else DTYPES[policy.precision]
        # A copy of each, so that save_pretrained writes a tied weight under all its names: on the
        # CPU, vLLM packs the head again only when the files hold the head.
        copies = {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}
        folder = self.path / version
        save_weights(policy.trained_model, copies, folder)
        return folder


class Probe:
    """Proof that a server computes with the policy's weights: both give the same log-probs of a
    text.

    Shapes: ``S`` tokens of the text but the first, ``V`` vocabulary.
    """

    def __init__(
        self,
        policy: Policy,
        root: nn.Module,
        ids: Sequence[int],
    ):
        """``ids`` is a prompt, whose beginning is the text. If it has fewer than
        :data:`MIN_PROBE_TOKENS`, the text is a fixed row of tokens."""
        self.policy = policy
        self.root = root
        self.ids = list(ids[:MAX_PROBE_TOKENS])
        if len(self.ids) < MIN_PROBE_TOKENS:
            vocabulary = len(policy.model.get_input_embeddings().weight)
            self.ids = [(7 * i + 3) % vocabulary for i in range(2 * MIN_PROBE_TOKENS)]
        self.policy_S = torch.zeros(0)
        """The policy's log-probs of ``ids[1:]`` in nats, as of the last :meth:`update`."""
        self.last_changes: dict[Any, tuple[Tensor, Tensor]] = {}
        """For each server its log-probs when they last changed, and the policy's at that time."""

    def update(self) -> None:
        """Compute the policy's log-probs. All ranks call it together.

        Raises:
            ValueError: if they are NaN.
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
        """Compare a server's log-probs of ``ids[1:]``, after it has loaded the weights, with the
        policy's.

        Returns the reason why they are not those of the policy's weights; None if they are.
        """
        server_S = torch.tensor(logprobs)
        limit = MAX_LOGPROB_DIFFERENCE[self.policy.precision]
        difference = _distance(server_S, self.policy_S)
        # A difference of NaN is a fault, too.
        if not difference <= limit:
            return (
                f"log-probs of a text differ by {difference:.3g} nats on average (limit {limit:g})"
            )

        # An update may be smaller than this limit. So a server whose log-probs stay the same to the
        # bit, while the policy's move by more than the two programs differ, has not applied it.
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
    """Mean absolute difference."""
    return float((first_S - second_S).abs().mean())
