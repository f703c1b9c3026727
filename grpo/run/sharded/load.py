"""Loads models divided over the ranks: a decoder layer at a time is read and divided, so that no rank ever holds a whole model."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from grpo.config import Config
from grpo.distributed import Sharding, World, compute_inside, gathered
from grpo.logprobs import CompletionScorer
from grpo.model import (
    Policy,
    check_finite,
    decoder_layers,
    make_policy,
    model_without_weights,
    turn_randomness_off,
    use_half_linears,
)
from grpo.rollout import check_sampling
from grpo.rollout.gathered import GatheredWeights
from grpo.rollout.llama_decoder import matches_model
from grpo.run.sharded.weight_files import WeightFiles


@dataclass(frozen=True)
class ShardedPolicy:
    policy: Policy
    """Its model is divided over the ranks."""
    scorer: CompletionScorer
    """Holds the root group of the model."""
    sampler: Policy
    """The same with a model of this rank's own, which has weights during rollouts only; the policy itself where vLLM samples."""
    gathered: GatheredWeights | None
    """Fills the sampler's model; None where vLLM samples."""
    is_llama: bool
    """True if :class:`grpo.rollout.llama_decoder.LlamaDecoder` computes what the model computes."""
    why_padded: str | None
    """See :class:`grpo.run.models.Models`."""


class ShardedLoader:
    """Loads the policy and the reference of one run."""

    def __init__(self, config: Config, world: World, tokenizer: Any):
        runtime = config.runtime
        self.config, self.world, self.tokenizer = config, world, tokenizer
        self.sharding = Sharding.of(world, runtime.shard_size, to_host=runtime.offload == "all")

    def policy(self, path: str, why_padded: Any) -> ShardedPolicy:
        """The policy; ``why_padded(scorer)`` enables packing and returns the reason if it cannot be.

        Raises:
            ValueError: on all ranks, as :func:`grpo.model.load_policy`, or if the weights cannot be read a layer at a time.
        """
        policy, scorer, own = self._load(path, "model.name_or_path", dtype=torch.float32)

        def check() -> tuple[str | None, bool]:
            if self.config.model.disable_dropout:
                turn_randomness_off(policy)
            policy.model.train()
            reason = why_padded(scorer)
            check_sampling(policy)
            with policy.inference():
                return reason, self.config.runtime.fast_decode and matches_model(policy.model, gathered)

        reason, is_llama = compute_inside(scorer, check)
        if self.config.rollout.engine == "vllm":
            return ShardedPolicy(policy, scorer, policy, None, is_llama, reason)
        own.set_attn_implementation(policy.model.config._attn_implementation)
        weights = GatheredWeights(scorer, policy.model, own, self.world)
        return ShardedPolicy(policy, scorer, replace(policy, model=own), weights, is_llama, reason)

    def reference(self, path: str, setting: str, *, packed: bool, moves: bool) -> CompletionScorer:
        """A frozen scorer. Under bf16 the weights of its linear layers are in bf16, if that leaves the logits as they are."""
        scorer = self._reference(path, setting, packed, torch.float32)
        if moves or self.config.runtime.precision != "bf16":
            return scorer
        expected = self._probe(scorer)
        del scorer
        in_half = self._reference(path, setting, packed, torch.bfloat16)
        try:
            if torch.equal(self._probe(in_half), expected):
                return in_half
        except Exception:  # some models' own code multiplies by fp32 tensors without autocast
            pass
        del in_half
        return self._reference(path, setting, packed, torch.float32)

    def _reference(self, path: str, setting: str, packed: bool, dtype: torch.dtype) -> CompletionScorer:
        policy, scorer, _ = self._load(path, setting, dtype=dtype, is_frozen=True)

        def prepare() -> None:
            if self.config.model.disable_dropout:
                turn_randomness_off(policy)
            scorer.plain_head  # noqa: B018  # computed here, where its weights are gathered
            if packed:
                scorer.pack_groups()

        compute_inside(scorer, prepare)
        return scorer

    @torch.no_grad()
    def _probe(self, scorer: CompletionScorer) -> torch.Tensor:
        """Logits of a few tokens."""
        model, device = scorer.model, self.world.device
        ids = torch.arange(16, device=device)[None, :] % model.get_input_embeddings().weight.shape[0]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return compute_inside(scorer, lambda: model(input_ids=ids, use_cache=False).logits)

    def _load(self, path: str, setting: str, *, dtype: torch.dtype, is_frozen: bool = False):
        """A policy whose model is divided, its scorer, and a model of the same modules without weights."""
        options, device, world = self.config.model, self.world.device, self.world
        settings = {name: getattr(options, name) for name in ("gradient_checkpointing", "fp32_head")}
        with world.fail_together():
            model = model_without_weights(
                path,
                device=device,
                attn_implementation=options.attn_implementation,
                trust_remote_code=options.trust_remote_code,
                setting=setting,
            ).requires_grad_(not is_frozen)
            policy = make_policy(
                path,
                model,
                self.tokenizer,
                device=device,
                precision=self.config.runtime.precision,
                setting=setting,
                **settings,
            )
            files = WeightFiles(path, model, setting=setting)
            files.fill_buffers(model)
            own = copy.deepcopy(model).requires_grad_(False)
            scorer = CompletionScorer(model, self.config.rollout.temperature)
            self._fill(files, scorer, path, setting, dtype)
        return policy, scorer, own

    def _fill(self, files: WeightFiles, scorer: CompletionScorer, path: str, setting: str, dtype: torch.dtype) -> None:
        """Read and divide layer by layer, then the rest. Linear layers that own their weights get ``dtype``, all else fp32."""
        model, halved = scorer.model, _weights_of_linear_layers(scorer.model)

        def dtype_of(parameter: nn.Parameter) -> torch.dtype:
            return dtype if parameter in halved else torch.float32

        layers = decoder_layers(model)
        for part in layers:
            files.fill(part.modules(), self.world.device, dtype_of)
            check_finite(path, part, setting)
            use_half_linears(part)
            self.sharding.layer(part)
        in_layers = {module for layer in layers for module in layer.modules()}
        rest = [module for module in model.modules() if module not in in_layers]
        files.fill(rest, self.world.device, dtype_of)
        for module in rest:
            check_finite(path, module, setting, recurse=False)
        use_half_linears(model)  # the head
        self.sharding.root(scorer)


def _weights_of_linear_layers(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of plain linear layers that no other module uses."""
    num_users = Counter(p for module in model.modules() for p in module.parameters(recurse=False))
    layers = [m for m in model.modules() if type(m) is nn.Linear and num_users[m.weight] == 1]
    return {p for layer in layers for p in layer.parameters(recurse=False)}
