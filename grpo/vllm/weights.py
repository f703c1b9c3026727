"""The policy's weights on their way to the servers: written as files, and proved by log-probs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from grpo.distributed import compute_inside
from grpo.model import Policy, save_weights
from grpo.system import UserError, first_line

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LIMITS = {"fp32": 1e-3, "bf16": 0.2}
"""Largest mean difference of log-probs of server and trainer, in nats."""
FEWEST, MOST = 8, 64
"""Tokens of the text whose log-probs are compared."""


class WeightsFolder:
    """A folder of one run inside ``rollout.weights_folder``, with the weights that are being loaded."""

    def __init__(self, parent: str, run: str | Path):
        """``run``: the run's own folder. Another run of it finds, and deletes, what a killed one has left."""
        name = hashlib.sha256(os.path.abspath(run).encode()).hexdigest()[:16]
        self.path = Path(parent).absolute() / f"grpo-{os.getuid()}-{name}"  # servers have another working directory
        self.clear()

    def write(self, policy: Policy, weights: dict[str, torch.Tensor], version: str) -> Path:
        """Write weights as ``save_pretrained`` does, in the precision of the run, an adapter in fp32; UserError if it
        fails.

        A tied weight is written under each of its names: on the CPU, vLLM makes its packed copy of the head anew only
        when the files hold the head.
        """
        folder, dtype = self.path / version, torch.float32 if policy.adapter else DTYPES[policy.precision]
        try:
            folder.mkdir(parents=True)
            save_weights(policy.trained, {n: t.to(dtype, copy=True) for n, t in weights.items()}, folder)
        except Exception as error:  # SafetensorError on a full disk, OSError
            self.clear()
            problem = f"the weights cannot be written ({first_line(error)})"
            parent = f"rollout.weights_folder={self.path.parent}"
            raise UserError(f"{parent}: {problem}: free space there, or set another folder") from None
        return folder

    def clear(self, keep: Path | None = None) -> None:
        """Delete all weights but those of one folder."""
        for folder in self.path.glob("*"):
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)
        if keep is None and self.path.exists():
            self.path.rmdir()


class Probe:
    """Proof that a server computes with the policy's weights: log-probs of a fixed text by both."""

    def __init__(self, policy: Policy, root: nn.Module, ids: Sequence[int]):
        """``ids``: a prompt, whose first tokens are taken; fixed ones in place of fewer than :data:`FEWEST`."""
        self.policy, self.root = policy, root
        vocabulary = policy.model.get_input_embeddings().weight.shape[0]
        self.ids = list(ids[:MOST]) if len(ids) >= FEWEST else [(7 * i + 3) % vocabulary for i in range(2 * FEWEST)]
        self.computed: list[torch.Tensor] = []
        """``[S]`` the policy's log-probs of ``ids[1:]`` in nats, at each call of :meth:`update`."""

    def update(self) -> None:
        """Compute the policy's log-probs; all ranks call it together. ValueError if one is not finite."""
        sequence_1S = torch.tensor([self.ids], device=self.policy.device)

        def logits() -> torch.Tensor:
            return self.policy.model(input_ids=sequence_1S, use_cache=False).logits[0, :-1].float()

        with self.policy.inference():
            logprobs_SV = torch.log_softmax(compute_inside(self.root, logits), dim=-1)
        logprobs_S = logprobs_SV.gather(1, sequence_1S[0, 1:, None])[:, 0].cpu()
        if not torch.isfinite(logprobs_S).all():
            precision = f"runtime.precision={self.policy.precision}"
            raise ValueError(f"the model computes log-probs that are not finite under {precision}")
        self.computed.append(logprobs_S)

    def compare(self, found: Sequence[float]) -> str | None:
        """What is wrong with a server's log-probs after it has loaded the weights; None: nothing.

        They must be near the policy's, and no nearer to those that the policy had before one of the updates: so a
        missed update shows as soon as it has changed them by more than the two programs differ.
        """
        differences = [float((torch.tensor(found) - logprobs_S).abs().mean()) for logprobs_S in self.computed]
        now, limit = differences[-1], LIMITS[self.policy.precision]
        if not now <= limit:
            return f"log-probs of a text differ by {now:.3g} nats on average (limit {limit:g})"
        if min(differences) < now / 2:
            return (
                f"log-probs of a text are those of earlier weights ({min(differences):.3g} nats apart, {now:.3g} now)"
            )
        return None
