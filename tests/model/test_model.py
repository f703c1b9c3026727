"""Loading, dropout, end tokens, reference, optimizer, schedule."""

import copy
from dataclasses import replace

import pytest
import torch
from architectures import CAN, GPT2, SIZES, build, checked
from conftest import load, save_random_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import OptimConfig
from grpo.model import (
    Policy,
    check_context,
    end_tokens,
    store_frozen_in_bf16,
    sync_reference,
)
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.run.optimizer import make_lr_schedule, make_optimizer


def test_master_weights_are_fp32_whatever_the_checkpoint(random_model, tmp_path):
    half = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    load(random_model).tokenizer.save_pretrained(tmp_path)
    policy = load(tmp_path, precision="bf16")
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    with policy.autocast():
        assert policy.model(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16


def in_training(model_type, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", GPT2),  # with dropout of 0.1
        # leaves layers out
        (
            "opt",
            SIZES | dict(ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5),
        ),
        # noise in the router
        (
            "mixtral",
            SIZES | dict(num_local_experts=4, router_jitter_noise=0.1),
        ),
    ],
)
@torch.no_grad()
def test_nothing_is_random_in_train_mode(model_type, settings):
    model = in_training(model_type, **settings)
    ids = torch.arange(40)[None]
    sampled = model.eval()(ids).logits
    model.train()
    assert len({float(model(ids).logits.sum()) for _ in range(4)}) > 1, "it is random before"
    before = torch.get_rng_state()
    checked(model)
    assert torch.equal(torch.get_rng_state(), before), "the check draws no number of the run"
    assert model.training
    assert torch.equal(model(ids).logits, sampled)


def test_what_stays_random_is_refused():
    """PhiMoE's router draws its experts in training mode, whatever the configuration says."""
    model = in_training("phimoe", **SIZES, num_local_experts=4, router_jitter_noise=0.1)
    with pytest.raises(
        ValueError, match=r"PhimoeForCausalLM is random .* model\.disable_dropout=false"
    ):
        checked(model)


def test_weights_that_become_nan_are_named_in_sampling(policy):
    with torch.no_grad():
        policy.model.lm_head.weight[7] = torch.nan
    with pytest.raises(ValueError, match=r"the model computes NaN .*runtime\.precision=fp32"):
        BuiltinEngine(policy).generate(
            [Problem(0, "", (5, 6))], SamplingParams(2, 3), seed_key=(0, "test", 0)
        )


def test_longrope_is_refused_from_where_one_row_changes_the_others(tmp_path):
    """Beyond 64 tokens the longest row of a pass changes the frequencies of all its rows."""
    model = build(*CAN["longrope within its original context"])
    assert Policy(model, None, (2,), 0, torch.device("cpu"), "fp32").context_length == 64
    model.config.save_pretrained(tmp_path)
    problems = [Problem(0, "", tuple(range(40))), Problem(1, "", (1, 2))]
    check_context(str(tmp_path), problems, 24, trust_remote_code=False)
    with pytest.raises(
        ValueError, match=r"max_completion_length=25 .* 40 tokens exceed the context of 64 tokens"
    ):
        check_context(str(tmp_path), problems, 25, trust_remote_code=False)


def test_end_tokens_are_the_union(policy):
    policy.model.config.eos_token_id = 7
    policy.model.generation_config = GenerationConfig(eos_token_id=[9, 7])
    assert end_tokens(policy.model, policy.tokenizer) == tuple(
        sorted({policy.tokenizer.eos_token_id, 7, 9})
    )


def test_weight_decay_is_for_matrices(random_model):
    model = load(random_model).model
    decayed, free = make_optimizer(model, OptimConfig(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in free["params"]} == {1}


def test_reference_moves_only_when_told(random_model):
    policy = load(random_model)
    reference = copy.deepcopy(policy.model).requires_grad_(False)
    name = "model.layers.1.mlp.up_proj.weight"
    start = reference.get_parameter(name).clone()
    with torch.no_grad():
        for p in policy.model.parameters():
            p += 2.0
    assert torch.equal(reference.get_parameter(name), start)
    sync_reference(reference, policy.model, 0.25)
    torch.testing.assert_close(reference.get_parameter(name), start + 0.5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reference_in_bf16_gives_the_same_bits(tmp_path, tied):
    policy = load(
        save_random_model(tmp_path / "model", tie_word_embeddings=tied),
        packed=True,
        precision="bf16",
    )
    reference = copy.deepcopy(policy.model).requires_grad_(False)
    scorer = CompletionScorer(reference, 0.7)
    scorer.is_packed = True
    ids_BS = torch.randint(0, 90, (4, 60), generator=torch.Generator().manual_seed(0))
    ids_BS[:, :20] = ids_BS[0, :20]
    prompt_lengths_B = torch.full((4,), 20)
    mask_BT = torch.ones(4, 40, dtype=torch.bool)
    inputs = (ids_BS, prompt_lengths_B, mask_BT, torch.zeros(4, dtype=torch.long))
    with torch.no_grad(), policy.autocast():
        before = scorer(*inputs)
        store_frozen_in_bf16(replace(policy, model=reference))
        after = scorer(*inputs)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    embedding = reference.get_input_embeddings().weight
    halved = {m.weight for m in reference.modules() if isinstance(m, torch.nn.Linear)} - {embedding}
    assert len(halved) == 2 * 7 + (not tied)
    assert (
        all(weight.dtype == torch.bfloat16 for weight in halved)
        and embedding.dtype == torch.float32
    )
    assert all(p.dtype == torch.float32 for p in policy.model.parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_a_reference_that_would_change_stays_in_fp32(random_model, fails):
    """A module reads a layer's weight itself, as routers do, in fp32 or by a view that bf16 does
    not have."""
    policy = load(random_model, precision="bf16")
    reference = copy.deepcopy(policy.model).requires_grad_(False)
    mlp = reference.model.layers[0].mlp

    @torch.autocast("cpu", enabled=False)
    def read_the_weight(x):
        weight = mlp.down_proj.weight
        if fails:
            weight = weight.view(torch.int32).view(torch.float32)
        return x.float() @ mlp.up_proj.weight.float().T @ weight.float().T

    mlp.forward = read_the_weight
    before = [p.clone() for p in reference.parameters()]
    store_frozen_in_bf16(replace(policy, model=reference))
    for old, new in zip(before, reference.parameters(), strict=True):
        assert new.dtype == torch.float32 and torch.equal(old, new)


def rates(name: str, steps: int = 10, warmup: float = 0, min_lr=None) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)
    settings = OptimConfig(
        learning_rate=1.0, lr_scheduler_type=name, warmup_steps=warmup, min_lr=min_lr
    )
    schedule = make_lr_schedule(optimizer, settings, num_updates=steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_by_hand():
    assert rates("linear", warmup=2)[:4] == pytest.approx([0, 0.5, 1.0, 7 / 8])
    assert rates("linear", warmup=0.2) == rates("linear", warmup=2), "a fraction of the updates"
    assert min(rates("cosine", steps=100, min_lr=0.1)) == pytest.approx(0.1, abs=1e-3)
    assert rates("cosine", warmup=2)[6] == 0.5 == rates("cosine_with_min_lr", warmup=2)[6]
