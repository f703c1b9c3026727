"""The policy's weights on their way to the servers: written as files, and proved by log-probs."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo.distributed import compute_inside
from grpo.model import Policy, save_weights

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIMITS = {"fp32": 1e-3, "bf16": 0.1}
"""Largest mean difference of log-probs of server and trainer, in nats."""
FEWEST = 8
MOST = 64
"""Tokens of the text whose log-probs are compared."""


class WeightsFolder:
    """A folder of this process inside ``rollout.weights_folder``, with the weights that are being
    loaded."""

    def __init__(self, parent: str):
        self.prefix = f"grpo-{socket.gethostname()}-"
        self.path = Path(
            os.path.abspath(parent), f"{self.prefix}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        )

    def write(self, policy: Policy, weights: dict[str, torch.Tensor], version: str) -> Path:
        """Delete what ended processes of this machine have left, then write weights as
        ``save_pretrained`` does, in the precision of the run, an adapter in fp32.

        A tied weight is written under each of its names: on the CPU, vLLM makes its packed copy of
        the head anew only when the files hold the head.
        """
        for left in self.path.parent.glob(f"{self.prefix}*"):
            pid = left.name.removeprefix(self.prefix).partition("-")[0]
            if not Path("/proc", pid).exists():
                shutil.rmtree(left, ignore_errors=True)
        dtype = torch.float32 if policy.adapter else DTYPES[policy.precision]
        written = {name: tensor.to(dtype, copy=True) for name, tensor in weights.items()}
        folder = self.path / version
        save_weights(policy.trained, written, folder)
        return folder


class Probe:
    """Proof that a server computes with the policy's weights: log-probs of a fixed text by both."""

    def __init__(self, policy: Policy, root: nn.Module, ids: Sequence[int]):
        """``ids``: a prompt, whose first tokens are taken; fixed ones in place of fewer than
        :data:`FEWEST`."""
        self.policy = policy
        self.root = root
        self.ids = list(ids[:MOST])
        if len(self.ids) < FEWEST:
            vocabulary = len(policy.model.get_input_embeddings().weight)
            self.ids = [(7 * i + 3) % vocabulary for i in range(2 * FEWEST)]
        self.computed_S = torch.zeros(0)
        """The policy's log-probs of ``ids[1:]`` in nats, at the last call of :meth:`update`."""
        self.answers: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        """Of each server the last new answer, and the policy's log-probs then."""

    def update(self) -> None:
        """Compute the policy's log-probs, ValueError if they are NaN; all ranks call it
        together."""
        sequence_1S = torch.tensor([self.ids], device=self.policy.device)

        def logits() -> torch.Tensor:
            return self.policy.model(input_ids=sequence_1S, use_cache=False).logits[0, :-1].float()

        with self.policy.inference():
            logits_SV = compute_inside(self.root, logits)
        logprobs_SV = logits_SV.log_softmax(dim=-1)
        self.computed_S = logprobs_SV.gather(1, sequence_1S[0, 1:, None])[:, 0].cpu()
        if self.computed_S.isnan().any():
            raise ValueError(
                "the model computes NaN: its weights are broken, lower optim.learning_rate"
            )

    def compare(self, server: Any, found: Sequence[float]) -> str | None:
        """The fault of a server's log-probs after it has loaded the weights; None: there is none.

        They must be near the policy's. And they must change with them: an answer that stays the
        same to the bit, while the policy has moved by more than the two programs differ, is that of
        weights which were not applied.
        """
        found_S = torch.tensor(found)
        limit = LIMITS[self.policy.precision]
        difference = _distance(found_S, self.computed_S)
        if not difference <= limit:
            return (
                f"log-probs of a text differ by {difference:.3g} nats on average (limit {limit:g})"
            )
        former_S, computed_S = self.answers.setdefault(server, (found_S, self.computed_S))
        moved = _distance(self.computed_S, computed_S)
        noise = _distance(former_S, computed_S)
        if not torch.equal(found_S, former_S):
            self.answers[server] = (found_S, self.computed_S)
        elif moved > 2 * noise:
            return f"log-probs of a text have not changed, those of the policy by {moved:.3g}"
        return None


def _distance(one_S: torch.Tensor, other_S: torch.Tensor) -> float:
    return float((one_S - other_S).abs().mean())
