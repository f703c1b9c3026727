"""The built-in engine: samples with the policy's own model, in the training process.

Each prompt is prefilled once and its KV cache forked for its G completions. The uniform numbers that draw a
completion's tokens follow from its own seed, so that it depends neither on the other rows nor on the number of ranks.

Shapes: ``R`` rows (completions) that are decoded together, ``T`` most tokens of a completion, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.algorithm.seeding import generator
from grpo.attention import packing_enabled
from grpo.model import Policy
from grpo.rollout.check import prove_decoding
from grpo.rollout.cuda_graphs import CUDAGraphRunner
from grpo.rollout.decode_loop import Decoded, Prefill, Prompts, decode
from grpo.rollout.draw import SamplingParams, draw
from grpo.rollout.interface import ROWS_PER_CALL, Replies, grouped
from grpo.rollout.llama_decoder import LlamaDecoder, has_llama_layers, matches_model
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
        fast_decode=True,
        cuda_graphs=False,
        gathered: GatheredWeights | None = None,
        is_llama: bool | None = None,
        warn: Callable[[str], None] = print,
    ):
        """
        Args:
            policy: its bare model is used, never a DDP wrapper; the weights of each rollout are those at its start.
            fast_decode: copy the weights once a rollout into the form that decode steps read fastest, and use the
                written-out decode step (:mod:`grpo.rollout.llama_decoder`) for models that it matches. False:
                transformers' modules compute everything.
            cuda_graphs: capture written-out decode steps in CUDA graphs, on a GPU.
            gathered: fills the policy's model, which has no weights between rollouts, under FSDP.
            is_llama: the result of :func:`matches_model`, needed with ``gathered``; None: tested in the first rollout.
            warn: called with a line of text if CUDA graphs turn out not to work.
        """
        self.policy, self.fast_decode, self.cuda_graphs, self.warn = policy, fast_decode, cuda_graphs, warn
        self.gathered, self.communicates = gathered, gathered is not None
        self.graphs: CUDAGraphRunner | None = None
        """Created in the first rollout with CUDA graphs."""
        self._is_llama = is_llama
        """True if :class:`LlamaDecoder` computes what the model computes; None: not tested yet."""
        self._is_proved = False
        """True once it is known which fast paths are right."""
        self._has_weights = False
        """True inside :meth:`weights`."""

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
        replies: Replies | None = None,
    ) -> list[Group]:
        """See :meth:`grpo.rollout.interface.Engine.generate`. ValueError if the model computes NaN."""
        rows = [(problem, g) for problem in problems for g in range(sampling.num_generations)]
        prompts = [problem.prompt_ids for problem, _ in rows]
        completions: list[Completion] = []
        with self._ready(sampling) as prefill_rows:
            # CUDA graphs decode a fixed set of rows at a time. The decode loop starts waiting rows as others end.
            replays = self._replays(sampling) and replies is None
            for wave in split_into_waves(prompts, sampling) if replays else [slice(len(rows))]:
                inputs = (
                    prefill_rows,
                    prompts[wave],
                    self._uniforms(rows[wave], sampling, seed_key),
                    sampling,
                    on_tokens,
                )
                decoded = self._replay(*inputs) if replays and self._replays(sampling) else None
                completions += self._completions(decoded or decode(self.policy, *inputs, replies), sampling)
        return grouped(problems, completions, Stops(self.policy, sampling.stop))

    def dry_run(self, prompts: Prompts, sampling: SamplingParams) -> None:
        """Allocate the most memory that decoding takes: prefill, one of the last tokens, a copy of the KV cache."""
        T, device = sampling.max_completion_length, self.policy.device
        with self._ready(sampling) as prefill_rows:
            decoder, logits_RV = prefill_rows(prompts, T)
            half_R = torch.full((len(prompts),), 0.5, device=device)
            token_R, _ = draw(logits_RV, half_R, sampling)
            if T > 1:
                decoder.skip_tokens(T - 2)
                logits_RV = decoder.step(token_R)
                # Attention over the skipped tokens, which are arbitrary memory, can give NaN: draw from zeros.
                draw(logits_RV.zero_(), half_R, sampling)
                decoder.keep_rows(torch.arange(len(prompts), device=device))

    @property
    def may_capture(self) -> bool:
        """True if decode steps are captured in CUDA graphs, as far as the settings and the model's modules tell."""
        is_wanted = self.cuda_graphs and self.fast_decode and self.policy.device.type == "cuda"
        return is_wanted and packing_enabled(self.policy.model) and has_llama_layers(self.policy.backbone)

    def close(self) -> None:
        """Nothing is held outside this process."""

    @contextmanager
    def weights(self) -> Iterator[None]:
        """The model computes from copies of its weights, made now: for all calls of :meth:`generate` inside the block,
        which else make them themselves. Under FSDP this gathers the weights, so all ranks enter the block together.
        """
        if self._has_weights:
            yield
            return
        policy, copied = self.policy, nullcontext()
        if self._is_llama is None:
            with policy.inference():
                self._is_llama = self.fast_decode and matches_model(policy.model)
        if self.gathered is not None:
            copied = self.gathered.copied(policy.precision, fast_decode=self.fast_decode)
        elif self.fast_decode:
            copied = copied_weights(policy.model, policy.precision)
        try:
            with copied:
                self._has_weights = True
                yield
        finally:
            self._has_weights = False

    @contextmanager
    def _ready(self, sampling: SamplingParams) -> Iterator[Prefill]:
        """The model in inference mode, computing from copied weights; yields the prefill."""
        policy = self.policy
        with self.weights(), policy.inference():
            decoder = LlamaDecoder(policy.backbone) if self._is_llama else None
            if not self._is_proved:
                self._is_proved = True
                for note in prove_decoding(policy, decoder):
                    self.warn(note)
            if decoder and self.graphs is None and self.may_capture:
                self.graphs = CUDAGraphRunner(policy)
            yield partial(prefill, policy, decoder)

    def _replays(self, sampling: SamplingParams) -> bool:
        """True if graphs decode. They cannot record the allowed tokens, whose number differs from token to token."""
        return self.graphs is not None and not sampling.records_allowed

    def _uniforms(self, rows: Sequence[tuple[Problem, int]], sampling: SamplingParams, seed_key) -> Tensor | None:
        """``[R, T]`` uniform numbers, one per token, from the seed of each row ``(problem, g)``; None: greedy."""
        if sampling.is_greedy or not rows:
            return None
        generators = [generator(*seed_key, problem.index, g) for problem, g in rows]
        uniforms = [torch.rand(sampling.max_completion_length, generator=rng) for rng in generators]
        return torch.stack(uniforms).to(self.policy.device)

    def _completions(self, decoded: Decoded, sampling: SamplingParams) -> list[Completion]:
        """The completion of each row, without its text."""
        if decoded.logprobs_RT.isnan().any():
            raise ValueError(
                f"the model computes NaN under runtime.precision={self.policy.precision}: "
                "its weights or activations are too large"
            )
        completions = []
        for r, length in enumerate(decoded.lengths):
            logprobs_n = decoded.logprobs_RT[r, : 0 if sampling.is_greedy else length]
            is_answer_n = decoded.is_answer_RT[r, :length]
            completions.append(
                Completion(
                    tuple(decoded.tokens_RT[r, :length].tolist()),
                    "",
                    decoded.finished[r],
                    tuple(logprobs_n.tolist()),
                    None if decoded.allowed is None else decoded.allowed[r],
                    loss_mask=tuple((~is_answer_n).tolist()) if is_answer_n.any() else (),
                )
            )
        return completions

    def _replay(self, prefill_rows: Prefill, prompts: Prompts, *inputs) -> Decoded | None:
        """:func:`decode` by CUDA graphs; None, after switching them off, if they fail, or the prefill before does."""
        try:
            return self.graphs.decode(*prefill_rows(prompts, inputs[1].max_completion_length), *inputs)
        except Exception as error:  # an operation that cannot be captured or waits for the device, or out of memory
            # The error of the step says more than that of the end of its capture.
            reason = first_line(error.__context__ or error)
        self.cuda_graphs, self.graphs = False, None
        self.warn(f"note: decode steps are not captured in CUDA graphs ({reason})")
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()  # the loop needs the memory that the graphs had
        return None


def split_into_waves(prompts: Prompts, sampling: SamplingParams) -> list[slice]:
    """Split rows into waves of at most ``tokens_in_flight`` tokens of KV cache, all completions at their longest."""
    bound, T = sampling.tokens_in_flight, sampling.max_completion_length
    waves, start, longest = [], 0, 0
    for row, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if bound is not None and row > start and (row + 1 - start) * (longest + T) > bound:
            waves.append(slice(start, row))
            start, longest = row, len(prompt)
    return [*waves, slice(start, len(prompts))] if prompts else []
