"""Parts of the checks and figures of ``gpu.py``: their registry, the random model, and a decode loop that is given its tokens.

Shapes: ``R`` rows (completions), ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from random_model import MEAN_LOGPROB, sharpen
from rollout import SHAPES

from grpo.attention import enable_packing
from grpo.batch import Group, Problem, collate
from grpo.logprobs import CompletionScorer
from grpo.model import Policy, without_cudnn_attention
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.rollout.draw import filter_probs
from grpo.tasks.tiny import CHAT_TEMPLATE, EOS, PAD, TURN, build_tokenizer

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
Found = dict[str, Any]
"""Values that a check or a figure measured, by name."""


class NotRun(Exception):
    """A check that cannot be made here; the message says why."""


def expect(holds: bool, otherwise: str) -> None:
    """The criterion of a check."""
    if not holds:
        raise AssertionError(otherwise)


@dataclass(frozen=True)
class Entry:
    """A check or a figure. The first line of its docstring is its criterion, or what it measures."""

    name: str
    about: str
    limit_s: float
    """It is stopped, and has failed, after this time."""
    function: Callable[[Bench], Found]


CHECKS: list[Entry] = []
FIGURES: list[Entry] = []


def check(limit_s: float = 60) -> Callable:
    return lambda function: _register(CHECKS, function, limit_s)


def figure(limit_s: float = 120) -> Callable:
    return lambda function: _register(FIGURES, function, limit_s)


def _register(entries: list[Entry], function: Callable, limit_s: float) -> Callable:
    entries.append(Entry(function.__name__, function.__doc__.strip().splitlines()[0], limit_s, function))
    return function


@dataclass(frozen=True)
class Bench:
    """The device that the checks run on, and the shape of their model."""

    device: torch.device
    shape: str
    """A name in ``SHAPES``, or ``small``: two layers, for the tests of this command."""
    scratch: Path
    """A folder for this command alone."""

    @property
    def is_small(self) -> bool:
        return self.shape == "small"

    @property
    def vocabulary(self) -> int:
        return 512 if self.is_small else 151936

    @property
    def is_emulated(self) -> bool:
        """True on the device that ``tests/cuda`` emulates on a CPU build of PyTorch."""
        return self.device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None

    def need_gpu(self) -> None:
        if self.device.type != "cuda":
            raise NotRun("needs a GPU")

    def need_real_gpu(self, what: str) -> None:
        """``what``: the thing that the emulated device has not."""
        self.need_gpu()
        if self.is_emulated:
            raise NotRun(f"not on an emulated device: it has no {what}")

    @property
    def model_folder(self) -> Path:
        """A Hugging Face folder with the random model; written at first use."""
        folder = self.scratch / f"model-{self.shape}"
        if not folder.exists():
            make_random_model(self, unfinished := folder.with_suffix(".unfinished"))
            unfinished.rename(folder)
        return folder

    def policy(self, precision: str, *, packed: bool = True, eos_ids: tuple[int, ...] = (), device=None) -> Policy:
        """The random model; without ``eos_ids`` nothing ends a completion."""
        without_cudnn_attention(device or self.device)
        model = AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=torch.float32, attn_implementation="sdpa")
        model = model.to(device or self.device).eval()
        if packed:
            expect((why := enable_packing(model, model.model)) is None, f"packing is refused: {why}")
        return Policy(
            model, make_tokenizer(self.vocabulary), eos_ids, 0, torch.device(device or self.device), precision
        )

    def problems(self, lengths: tuple[int, ...] | None = None) -> list[Problem]:
        """Prompts of random tokens; of uneven lengths, if none are given."""
        rng = torch.Generator().manual_seed(1)
        lengths = lengths or ((3, 12) if self.is_small else (20, 70, 200, 270))
        return [
            Problem(u, "", tuple(torch.randint(2, self.vocabulary, (n,), generator=rng).tolist()))
            for u, n in enumerate(lengths)
        ]


def make_tokenizer(vocabulary: int) -> Qwen2Tokenizer:
    """The tiny tokenizer with a number as the text of every further token: `` 1234``."""
    tiny = build_tokenizer()
    added = [
        tiny.added_tokens_decoder[i]
        for i in sorted(tiny.added_tokens_decoder)
        if str(tiny.added_tokens_decoder[i]) not in (PAD, EOS, TURN)
    ]
    symbols = [tiny.convert_ids_to_tokens(i) for i in range(len(tiny) - len(added))]
    numbers = [f"\u0120{i}" for i in range(len(symbols), vocabulary - len(added))]
    special = dict(pad_token=PAD, eos_token=EOS, unk_token=None, additional_special_tokens=[TURN])
    tokenizer = Qwen2Tokenizer(
        vocab={s: i for i, s in enumerate(symbols + numbers)}, merges=[], padding_side="left", **special
    )
    tokenizer.add_tokens(added)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def make_random_model(bench: Bench, folder: Path) -> None:
    """Save Qwen2 of the shape with random weights, and distributions as sharp as a trained model's."""
    torch.manual_seed(0)
    sizes = SMALL if bench.is_small else SHAPES[bench.shape]
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=bench.vocabulary, max_position_embeddings=32768, tie_word_embeddings=True, **sizes)
    ).float()
    for layer in model.model.layers:
        # With the usual initialization attention is almost an average, and wrong positions or masks would hardly show.
        layer.self_attn.q_proj.weight.mul_(4.0 if not bench.is_small else 40.0)
    sharpen(model)
    for _ in range(3):  # that was measured on random tokens: now on its own
        policy = Policy(
            model.eval(), make_tokenizer(bench.vocabulary), (bench.vocabulary + 1,), 0, torch.device("cpu"), "fp32"
        )
        groups = BuiltinEngine(policy).generate(bench.problems((8, 12)), SamplingParams(8, 32), address=(0, "gpu", 1))
        mean = statistics.fmean(x for group in groups for c in group.completions for x in c.sampling_logprobs)
        model.model.norm.weight.mul_(min(max(mean / MEAN_LOGPROB, 0.5), 2.0) ** 0.5)
    unfinished = folder.with_name("unfinished")
    model.save_pretrained(unfinished)
    make_tokenizer(bench.vocabulary).save_pretrained(unfinished)
    unfinished.rename(folder)


@torch.no_grad()
def change_weights(model: torch.nn.Module) -> None:
    """As an update does, but enough that stale weights show: every weight moves by a twentieth of their spread."""
    for p in model.parameters():
        p.add_(torch.randn_like(p), alpha=0.05 * float(p.std()))


class ForcedLoop(BuiltinEngine):
    """The decode loop, given the tokens of completions: it computes their log-probs, and decides where they end."""

    def force(self, groups: list[Group], sampling: SamplingParams, address) -> tuple[list[Group], list[float]]:
        """The completions as the loop ends them, with its log-probs; and of each token how badly it fits to the loop's distribution.

        Sampled: the distance of the token's uniform number from the token's part of the cumulative distribution (0: inside).
        Greedy: the log-prob of the best token minus that of this one.
        """
        self.groups, misfits = {group.problem.index: group for group in groups}, []

        def draw(logits_RV, given_R, settings):
            token_R = given_R.floor().clamp(min=0).long()[:, None]
            logprobs_RV = log_softmax(logits_RV.float() / settings.temperature, dim=-1)
            logprob_R = logprobs_RV.gather(1, token_R).squeeze(1)
            if sampling.is_greedy:
                misfit_R = logprobs_RV.amax(dim=-1) - logprob_R
            else:
                probs_RV = filter_probs(logprobs_RV.exp(), settings).double()
                cdf_RV = probs_RV.cumsum(dim=-1)
                end_R, target_R = cdf_RV.gather(1, token_R).squeeze(1), (given_R - given_R.floor()) * cdf_RV[:, -1]
                start_R = end_R - probs_RV.gather(1, token_R).squeeze(1)
                misfit_R = torch.maximum(start_R - target_R, target_R - end_R).clamp(min=0)
            misfits.extend(misfit_R.cpu()[given_R.cpu() >= 0].tolist())
            return token_R.squeeze(1), logprob_R

        settings = replace(sampling, temperature=1.0) if sampling.is_greedy else sampling
        with patch("grpo.rollout.decode_loop.draw", draw):
            return self.generate([group.problem for group in groups], settings, address=address), misfits

    def _uniforms(self, rows, sampling, address):
        """Each token plus its uniform number; -1 after the end."""
        uniforms_RT = super()._uniforms(rows, sampling, address).cpu().double()
        for row, (problem, g) in enumerate(rows):
            ids = self.groups[problem.index].completions[g].ids
            uniforms_RT[row, : len(ids)] += torch.tensor(ids)
            uniforms_RT[row, len(ids) :] = -1
        return uniforms_RT.to(self.policy.device)


@torch.no_grad()
def exact_logprobs(policy: Policy, groups: list[Group], temperature: float) -> list[tuple[float, ...]]:
    """Log-probs of every completion in fp32, by one padded forward pass of the model for each group, without a cache."""
    scorer, found = CompletionScorer(policy.model, temperature), []
    for group in groups:
        batch = collate([group], torch.zeros(1, len(group.completions)), pad_id=0, device=policy.device)
        logprobs_BT = scorer(*batch.scorer_inputs)[0].cpu()
        found += [tuple(row[: len(c.ids)].tolist()) for row, c in zip(logprobs_BT, group.completions, strict=True)]
    return found


def mean_difference(rows: list, others: list) -> float:
    """The mean distance of numbers in rows of equal lengths."""
    pairs = [(a, b) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True)]
    return statistics.fmean(abs(a - b) for a, b in pairs)
