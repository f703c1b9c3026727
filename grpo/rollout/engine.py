"""The built-in engine: samples with the policy's own model, in the training process.

Each prompt is prefilled once, and its KV cache is forked for its G completions. The uniform numbers
that draw a completion's tokens follow from the completion's seed, so that the completion depends
neither on the other rows nor on the number of ranks.

Shapes: ``R`` rows (completions) that are decoded together, ``T`` token limit of a completion, ``V``
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from grpo.algorithm.batch import Group, Problem
from grpo.algorithm.seeding import generator
from grpo.model import Policy
from grpo.rollout.cuda_graphs import CUDAGraphs
from grpo.rollout.decode_loop import Prompts, decode, grouped
from grpo.rollout.draw import SamplingParams, draw_tokens
from grpo.rollout.interface import ROWS_PER_CALL, Replies
from grpo.rollout.llama_decoder import LlamaDecoder
from grpo.rollout.prefill import prefill
from grpo.rollout.stops import Stops
from grpo.rollout.weights import GatheredWeights, copied_weights


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
            policy: its bare model samples, never a DDP wrapper. A rollout uses the weights that the
                policy has at the start of the rollout.
            fast_decode: copy the weights once per rollout into the form that decode steps read
                fastest, and use :class:`LlamaDecoder` if ``policy.is_llama``. If False, the modules
                of transformers compute everything.
            cuda_graphs: capture steps of :class:`LlamaDecoder` in CUDA graphs, on a GPU.
            gathered: gathers the weights for each rollout, under FSDP. ``policy.model`` has no
                weights between rollouts then. Default: the model is not sharded.
            warn: called with a line of text if decode steps cannot be captured.
        """
        self.policy = policy
        self.fast_decode = fast_decode
        self.gathered = gathered
        self.uses_collectives = gathered is not None
        self.graphs = None
        if cuda_graphs and policy.device.type == "cuda":
            self.graphs = CUDAGraphs(warn)
        self._prefill = None
        """Prefill function of the current block of :meth:`weights`. None outside of a block."""

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
        replies: Replies | None = None,
    ) -> list[Group]:
        """Implement :meth:`grpo.rollout.interface.Engine.generate`.

        ValueError if the model computes NaN.
        """
        # Each row has a generator and draws T numbers ahead, even if the row ends earlier. So no
        # row changes the numbers of another row.
        prompts = []
        uniforms = []
        for problem in problems:
            for g in range(sampling.num_generations):
                prompts.append(problem.prompt_ids)
                row_generator = generator(*seed_key, problem.index, g)
                uniforms.append(torch.rand(sampling.max_completion_length, generator=row_generator))
        uniforms_RT = None
        if prompts and not sampling.is_greedy:
            uniforms_RT = torch.stack(uniforms).to(self.policy.device)

        with self.weights(), self.policy.inference_mode():
            decoded = decode(
                self.policy,
                self._prefill,
                prompts,
                uniforms_RT,
                sampling,
                on_tokens,
                replies,
            )
        # A NaN among the logits of a token makes its log-prob NaN.
        for row in decoded:
            if any(map(math.isnan, row.logprobs)):
                raise ValueError(
                    f"the model computes NaN under runtime.precision={self.policy.precision}: "
                    "its weights or activations are too large"
                )
        return grouped(problems, decoded, sampling, Stops(self.policy, sampling.stop))

    def dry_run(self, prompts: Prompts, sampling: SamplingParams) -> None:
        """Allocate the peak memory of decoding one completion per prompt.

        A prefill, a decode step and a copy of the KV cache take this memory. The cache has room for
        all tokens from the start, except for transformers' cache, which grows.
        """
        # Any token and any random number will do: only the sizes count.
        zeros_R = torch.zeros(len(prompts), device=self.policy.device)
        with self.weights(), self.policy.inference_mode():
            decoder, _ = self._prefill(prompts, sampling.max_completion_length)
            logits_RV = decoder.step(zeros_R.long())
            draw_tokens(logits_RV, zeros_R, sampling)
            decoder.keep_rows(range(len(prompts)))

    def close(self) -> None:
        """Release nothing: the engine holds nothing outside this process."""

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside the block, :meth:`generate` samples from the weights at the start of the block.

        With ``fast_decode``, entering the block copies the weights. Under FSDP the weights are
        gathered, so all ranks enter together. :meth:`generate` enters a block if none is open.
        """
        # An outer block has made the copies.
        if self._prefill:
            yield
            return

        policy = self.policy
        copied = nullcontext()
        if self.gathered:
            copied = self.gathered.filled(policy.precision, fast_decode=self.fast_decode)
        elif self.fast_decode:
            copied = copied_weights(policy.model, policy.precision)
        try:
            with copied:
                # The decoder is made here, where the layers have their copies.
                llama_decoder = None
                if self.fast_decode and policy.is_llama:
                    llama_decoder = LlamaDecoder(policy.backbone)
                self._prefill = partial(prefill, policy, llama_decoder, graphs=self.graphs)
                yield
        finally:
            self._prefill = None
