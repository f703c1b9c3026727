"""Parts of ``gpu.py``: forks, a random model, and prompts for it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import SkipTest

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from random_model import save_random_model
from rollout import SHAPES

from grpo.algorithm.batch import Problem
from grpo.attention import enable_packing
from grpo.model import Policy, load_policy, load_tokenizer

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
# With tied embeddings, rows of a model of this width repeat one token.
SIZES = {"small": SMALL | dict(vocab_size=512, tie_word_embeddings=False)}
SIZES |= {name: shape | dict(vocab_size=151936, tie_word_embeddings=True) for name, shape in SHAPES.items()}


def forked(function: Callable[[], None], log: Path) -> multiprocessing.Process:
    """Start a fork of this process that calls a function; its output goes to the file ``log``, which is its name."""

    def run() -> None:
        opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, 1)
        os.dup2(opened, 2)
        function()

    process = multiprocessing.get_context("fork").Process(target=run, name=str(log))
    process.start()
    return process


def named(name: str, about: str, function: Callable, **options) -> Callable:
    """A check or figure of its own: a function with some of its arguments."""
    result = partial(function, **options)
    result.__name__, result.__doc__ = name, about
    return result


@dataclass(frozen=True)
class Bench:
    """The device that is checked, and the random model on it: ``shape`` is a name in ``SIZES``."""

    device: torch.device
    shape: str
    models: Path
    """A folder that keeps models between calls of the command; everything else is in ``scratch``."""
    scratch: Path

    @property
    def kind(self) -> str:
        """``emulated``: the device that ``tests/cuda`` emulates on a CPU build of PyTorch."""
        is_real = torch.version.cuda or torch.version.hip or self.device.type == "cpu"
        return self.device.type if is_real else "emulated"

    def need(self, *kinds: str) -> None:
        """SkipTest, which says why, unless the device is of one of these kinds."""
        if self.kind not in kinds:
            raise SkipTest(f"not on {self.kind}, only on {' and '.join(kinds)}")

    def problems(self, lengths: tuple[int, ...] | None = None) -> list[Problem]:
        """Prompts of random tokens; of uneven lengths, if none are given."""
        lengths = lengths or ((3, 12) if self.shape == "small" else (20, 70, 200, 270))
        shape, rng = (len(lengths), max(lengths)), torch.Generator().manual_seed(1)
        ids = torch.randint(2, SIZES[self.shape]["vocab_size"], shape, generator=rng).tolist()
        return [Problem(u, "", tuple(ids[u][:n])) for u, n in enumerate(lengths)]

    def policy(self, precision: str, *, packed: bool = True, device: torch.device | None = None) -> Policy:
        """The random model; no token ends a completion."""
        path = str(self.model_folder(self.shape))
        policy = load_policy(path, load_tokenizer(path), device=device or self.device, precision=precision)
        policy.eos_ids = ()
        if packed:
            assert (why := enable_packing(policy.model, policy.backbone)) is None, f"packing is refused: {why}"
        return policy

    def model_folder(self, shape: str) -> Path:
        """A Hugging Face folder with random weights; written at first use."""
        folder = self.models / f"model-{shape}"
        if not folder.exists():
            # With the usual initialization attention is almost an average: wrong positions or masks would hardly show.
            scale = 40.0 if shape == "small" else 4.0
            save_random_model(self.scratch / "unfinished", query_scale=scale, **SIZES[shape])
            (self.scratch / "unfinished").rename(folder)
        return folder
