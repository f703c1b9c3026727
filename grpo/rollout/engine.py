"""The built-in engine: samples with the policy's own model, in the training process.

Each prompt is prefilled once and its KV cache forked for its G completions. The uniform numbers
that draw a completion's tokens follow from its own seed, so that it depends neither on the other
rows nor on the number of ranks.

Shapes: ``R`` rows (completions) that are decoded together, ``T`` most tokens of a completion, ``V``
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from grpo.algorithm.batch import Group, Problem
from grpo.algorithm.seeding import generator
from grpo.attention import fast_paths
from grpo.model import Policy
from grpo.rollout.cuda_graphs import CUDAGraphRunner
from grpo.rollout.decode_loop import Prefill, Prompts, Row, decode
from grpo.rollout.draw import SamplingParams, draw
from grpo.rollout.interface import ROWS_PER_CALL, Replies, grouped
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.prefill import prefill
from grpo.rollout.stops import Stops
from grpo.rollout.weights import GatheredWeights, copied_weights
from grpo.system import first_line


class BuiltinEngine:
    """Samples completions with a policy, in the training process."""

    rows_per_call = ROWS_PER_CALL

    def __init__(
        self,
        policy: Policy,
        *,
        fast_decode: bool = True,
        cuda_graphs: bool = False,
        gathered: GatheredWeights | None = None,
        warn: Callable[[str], None] = print,
    ):
        """
        Args:
            policy: its bare model is used, never a DDP wrapper; the weights of each rollout are
                those at its start.
            fast_decode: copy the weights once a rollout into the form that decode steps read
                fastest, and use the written-out decode step (:mod:`grpo.rollout.llama_decoder`) if
                ``policy.is_llama``. False: transformers' modules compute everything.
            cuda_graphs: capture written-out decode steps in CUDA graphs, on a GPU.
            gathered: fills the policy's model, which has no weights between rollouts, under FSDP.
            warn: called with a line of text if decode steps cannot be compiled or captured.
        """
        self.policy = policy
        self.fast_decode = fast_decode
        self.gathered = gathered
        self.communicates = gathered is not None
        self.warn = warn
        self.graphs: CUDAGraphRunner | None = None
        """Decodes the models that the written-out decode step matches; None: the loop does."""
        if cuda_graphs and fast_decode and policy.device.type == "cuda":
            self.graphs = CUDAGraphRunner(policy)
        self._prefill: Prefill | None = None
        """The prefill of the rollouts inside of :meth:`weights`."""

    @property
    def may_capture(self) -> bool:
        """True if decode steps are captured in CUDA graphs, unless that fails."""
        return self.graphs is not None and self.policy.is_llama

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
        replies: Replies | None = None,
    ) -> list[Group]:
        """Sample completions, as :meth:`grpo.rollout.interface.Engine.generate` says.

        ValueError if the model computes NaN.
        """
        rows = [(problem, g) for problem in problems for g in range(sampling.num_generations)]
        prompts = [problem.prompt_ids for problem, _ in rows]

        # Graphs decode a fixed set of rows at a time, and record no allowed tokens, whose number
        # differs from token to token. The loop starts waiting rows as others end.
        waves = [slice(len(rows))]
        replays = self.may_capture and replies is None and not sampling.records_allowed
        if replays:
            waves = split_into_waves(prompts, sampling)

        decoded: list[Row] = []
        with self.weights(), self.policy.inference():
            for wave in waves:
                uniforms_RT = self._uniforms(rows[wave], sampling, seed_key)
                inputs = (prompts[wave], uniforms_RT, sampling, on_tokens)
                of_wave = self._replay(*inputs) if replays else None
                if of_wave is None:
                    of_wave = decode(self.policy, self._prefill, *inputs, replies)
                decoded += of_wave

        for row in decoded:
            if any(map(math.isnan, row.logprobs)):
                raise ValueError(
                    f"the model computes NaN under runtime.precision={self.policy.precision}: "
                    "its weights or activations are too large"
                )
        completions = [row.completion(sampling) for row in decoded]
        return grouped(problems, completions, Stops(self.policy, sampling.stop))

    def dry_run(self, prompts: Prompts, sampling: SamplingParams) -> None:
        """Allocate the most memory that decoding takes.

        That is a prefill, a decode step for one of the last tokens, and a copy of the KV cache.
        """
        T = sampling.max_completion_length
        zeros_R = torch.zeros(len(prompts), device=self.policy.device)
        with self.weights(), self.policy.inference():
            decoder, logits_RV = self._prefill(prompts, T)
            if T > 1:
                decoder.skip_tokens(T - 2)
                logits_RV = decoder.step(zeros_R.long())
            # Attention over the skipped tokens, which are arbitrary memory, can give NaN: draw
            # from zeros.
            draw(logits_RV.zero_(), zeros_R, sampling)
            decoder.keep_rows(torch.arange(len(prompts), device=zeros_R.device))

    def close(self) -> None:
        """Release nothing: the engine holds nothing outside this process."""

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside the block the model computes from copies of its weights, made at its start.

        :meth:`generate` enters such a block itself, unless it is called inside of one. Under FSDP
        the weights are gathered, so all ranks enter the block together.
        """
        if self._prefill is not None:
            yield
            return
        policy = self.policy
        is_llama = self.fast_decode and policy.is_llama
        copied = nullcontext()
        if self.gathered is not None:
            copied = self.gathered.copied(policy.precision, fast_decode=self.fast_decode)
        elif self.fast_decode:
            copied = copied_weights(policy.model, policy.precision)
        try:
            with copied:
                llama_decoder = LlamaDecoder(policy.backbone) if is_llama else None
                self._prefill = partial(prefill, policy, llama_decoder)
                yield
        finally:
            self._prefill = None

    def _replay(self, prompts: Prompts, *inputs) -> list[Row] | None:
        """Decode a wave of rows by CUDA graphs. None if the loop is to decode it.

        The loop decodes a single row, for which the compiler would make another variant, and all
        rows once graphs have failed. Graphs that fail with compiled steps are first tried without.
        """
        while self.graphs is not None and len(prompts) > 1:
            try:
                return self.graphs.decode(self._prefill, prompts, *inputs)
            except Exception as error:  # of a compiler or of the capture, or memory runs out
                # The error of the step says more than that of the end of its capture.
                reason = first_line(error.__context__ or error)
            if self.graphs.fast_parts:
                self.graphs.fast_parts = []
                self.graphs.verified.clear()
                self.warn(f"note      without {fast_paths.STEP} ({reason})")
            else:
                self.graphs = None
                self.warn(f"note: decode steps are not captured in CUDA graphs ({reason})")
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()  # the next try needs the memory that this one had
        return None

    def _uniforms(
        self,
        rows: Sequence[tuple[Problem, int]],
        sampling: SamplingParams,
        seed_key: tuple[int, str, int],
    ) -> Tensor | None:
        """``[R, T]`` uniform numbers, one per token, from the seed of each row; None: greedy."""
        if sampling.is_greedy or not rows:
            return None
        uniforms = []
        for problem, g in rows:
            row_generator = generator(*seed_key, problem.index, g)
            uniforms.append(torch.rand(sampling.max_completion_length, generator=row_generator))
        return torch.stack(uniforms).to(self.policy.device)


def split_into_waves(prompts: Prompts, sampling: SamplingParams) -> list[slice]:
    """Split rows into waves of at most ``tokens_in_flight`` tokens of KV cache.

    All completions count at their longest.
    """
    bound = sampling.tokens_in_flight
    waves = []
    start = 0
    longest = 0
    for row, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        num_tokens = (row + 1 - start) * (longest + sampling.max_completion_length)
        if bound is not None and row > start and num_tokens > bound:
            waves.append(slice(start, row))
            start = row
            longest = len(prompt)
    if prompts:
        waves.append(slice(start, len(prompts)))
    return waves
