"""Rollouts from weights that are gathered layer by layer, in one process: gathering a whole model
copies it."""

import pytest
import torch
from conftest import load, save_random_model

from grpo.algorithm.batch import Problem
from grpo.model import Policy
from grpo.model.lora import add_adapter
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.rollout.weights import GatheredWeights

CPU = torch.device("cpu")
SAMPLING = SamplingParams(num_generations=3, max_completion_length=12)


def engines(
    folder, precision: str, *, lora: bool = False, **options
) -> tuple[Policy, BuiltinEngine, BuiltinEngine]:
    """The policy, an engine that samples from its model, and one whose model has weights in
    rollouts only."""
    policy = load(folder, packed=True, precision=precision)
    if lora:
        add_adapter(
            policy,
            {"r": 4, "target_modules": "all-linear", "init_lora_weights": False},
            base="",
        )
    sampler = policy.without_weights()
    assert sampler.is_llama
    rollout_model = sampler.model.requires_grad_(False)
    gathered = GatheredWeights(policy.model, policy.model, rollout_model)
    return (
        policy,
        BuiltinEngine(policy, **options),
        BuiltinEngine(sampler, gathered=gathered, **options),
    )


def completions(engine: BuiltinEngine):
    problems = [Problem(n, "", tuple(range(3, 6 + n))) for n in range(3)]
    return [
        group.completions for group in engine.generate(problems, SAMPLING, seed_key=(0, "test", 0))
    ]


@pytest.mark.parametrize(
    ("tied", "precision", "lora"),
    [(False, "fp32", False), (True, "bf16", False), (True, "bf16", True)],
)
def test_gathered_weights_give_the_same_completions(tmp_path, tied, precision, lora):
    """Bit for bit, before and after an update, which an earlier block does not see; no weight stays
    in memory."""
    save_random_model(tmp_path, tie_word_embeddings=tied)
    policy, engine, gathering = engines(tmp_path, precision, lora=lora)
    before = completions(engine)
    with gathering.weights():
        assert completions(gathering) == before
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
        assert completions(gathering) == before
        rollout_model = gathering.policy.model
        assert not rollout_model.model.embed_tokens.weight.is_meta
        assert all(
            p.is_meta
            for name, p in rollout_model.named_parameters()
            if "base_layer" in name or "lora_" in name
        )
    after = completions(engine)
    assert after != before
    assert completions(gathering) == after
    assert all(parameter.is_meta for parameter in gathering.policy.model.parameters())
