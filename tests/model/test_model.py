"""Loading, dropout, end tokens, reference, optimizer, schedule."""

from dataclasses import replace

import pytest
import torch
from architectures import CAN, GPT2, SIZES, V, build, checked
from conftest import load, save_random_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.model import (
    Policy,
    check_context,
    end_tokens,
    load_policy,
    make_reference,
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


RANDOM = {
    "gpt2": GPT2,  # with dropout of 0.1
    "falcon": SIZES | dict(attention_dropout=0.3, hidden_dropout=0.3),  # reads it from the config
    "opt": SIZES | dict(ffn_dim=48, word_embed_proj_dim=32, layerdrop=0.5),  # leaves layers out
    "mixtral": SIZES | dict(num_local_experts=4, router_jitter_noise=0.1),  # noise in the router
}


def in_training(model_type, settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def policy_of(model) -> Policy:
    return Policy(model, None, (2,), 0, torch.device("cpu"), "fp32")


@pytest.mark.parametrize("model_type", RANDOM)
@torch.no_grad()
def test_nothing_is_random_in_train_mode(model_type):
    model = in_training(model_type, RANDOM[model_type])
    ids = torch.arange(40)[None]
    sampled = model.eval()(ids).logits
    model.train()
    assert len({float(model(ids).logits.sum()) for _ in range(4)}) > 1, "it is random before"
    before = torch.get_rng_state()
    checked(model)
    assert torch.equal(torch.get_rng_state(), before), "the check draws no number of the run"
    assert model.training
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(model(ids).logits, sampled)


def test_what_stays_random_is_refused():
    """PhiMoE's router draws its experts in training mode, whatever the configuration says."""
    model = in_training("phimoe", SIZES | dict(num_local_experts=4, router_jitter_noise=0.1))
    with pytest.raises(ValueError, match=r"PhimoeForCausalLM is random .* model\.disable_dropout=false"):
        checked(model)


def test_weights_that_are_not_finite_are_named(random_model, tmp_path):
    policy = load(random_model)
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight[3, 5] = -torch.inf
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}: model\.layers\.1\.mlp\.up_proj\.weight contains NaN"):
        load(tmp_path)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_become_nan_are_named_in_sampling(policy, temperature):
    with torch.no_grad():
        policy.model.lm_head.weight[7] = torch.nan
    engine, sampling = BuiltinEngine(policy), SamplingParams(2, 3, temperature=temperature)
    with pytest.raises(ValueError, match=r"the model computes NaN .*runtime\.precision=fp32"):
        engine.generate([Problem(0, "", (5, 6))], sampling, seed_key=(0, "test", 0))


@torch.no_grad()
def test_longrope_is_refused_from_where_one_row_changes_the_others(tmp_path):
    """Beyond 64 tokens the longest row of a pass changes the frequencies of all its rows."""
    model = build(*CAN["longrope within its original context"])
    for p in model.parameters():
        p.mul_(8 if p.dim() == 2 else 1)  # positions show
    ids_BS = torch.randint(3, V, (2, 65), generator=torch.Generator().manual_seed(0))
    alone = model(ids_BS[:1, :10]).logits
    torch.testing.assert_close(model(ids_BS[:, :64]).logits[:1, :10], alone, rtol=0, atol=1e-5)
    assert not torch.allclose(model(ids_BS).logits[:1, :10], alone, rtol=0, atol=1e-3)
    torch.testing.assert_close(model(ids_BS[:1, :10]).logits, alone, rtol=0, atol=0)  # it leaves no trace
    model.config.save_pretrained(tmp_path)
    problems = [Problem(0, "", tuple(range(40))), Problem(1, "", (1, 2))]
    check_context(str(tmp_path), problems, 24)
    with pytest.raises(ValueError, match=r"max_completion_length=25 .* 40 tokens exceed the context of 64 tokens"):
        check_context(str(tmp_path), problems, 25)
    assert policy_of(model).context_length == 64


def test_end_tokens_are_the_union(policy):
    policy.model.config.eos_token_id = 7
    policy.model.generation_config = GenerationConfig(eos_token_id=[9, 7])
    assert end_tokens(policy.model, policy.tokenizer) == tuple(sorted({policy.tokenizer.eos_token_id, 7, 9}))


def test_weight_decay_is_for_matrices(policy):
    optimizer = make_optimizer(policy.model, learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in free["params"]} == {1}
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert count == sum(p.numel() for p in policy.model.parameters())
    assert optimizer.defaults["fused"] is None  # on CPU the bits are those of PyTorch's default


def test_reference_is_frozen_and_moves_only_when_told(random_model):
    policy = load(random_model)
    reference = make_reference(policy.model)
    assert not any(p.requires_grad for p in reference.parameters())
    start = [p.clone() for p in reference.parameters()]
    with torch.no_grad():
        for p in policy.model.parameters():
            p += 2.0
    assert all(torch.equal(a, b) for a, b in zip(start, reference.parameters(), strict=True))
    sync_reference(reference, policy.model, 0.25)
    for a, b in zip(start, reference.parameters(), strict=True):
        torch.testing.assert_close(b, a + 0.5)
    sync_reference(reference, policy.model, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), reference.parameters(), strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_a_reference_in_bf16_gives_the_same_bits(tmp_path, tied):
    policy = load(save_random_model(tmp_path / "model", tie_word_embeddings=tied), packed=True, precision="bf16")
    reference = make_reference(policy.model)
    scorer = CompletionScorer(reference, 0.7)
    scorer.packed = True
    ids_BS = torch.randint(0, 90, (4, 60), generator=torch.Generator().manual_seed(0))
    ids_BS[:, :20] = ids_BS[0, :20]
    inputs = ids_BS, torch.full((4,), 20), torch.ones(4, 40, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
    with torch.no_grad(), policy.autocast():
        before = scorer(*inputs)
        size = sum(p.numel() * p.element_size() for p in reference.parameters())
        store_frozen_in_bf16(replace(policy, model=reference))
        after = scorer(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert torch.equal(
            CompletionScorer(policy.model, 0.7)(*inputs)[0], CompletionScorer(reference, 0.7)(*inputs)[0]
        )
    halved = {p for m in reference.modules() if isinstance(m, torch.nn.Linear) for p in m.parameters()}
    halved -= {reference.get_input_embeddings().weight}
    assert all(p.dtype == (torch.bfloat16 if p in halved else torch.float32) for p in reference.parameters())
    assert sum(p.numel() * p.element_size() for p in reference.parameters()) == size - 2 * sum(
        p.numel() for p in halved
    )
    assert all(p.dtype == torch.float32 for p in policy.model.parameters())


def reads_its_weights_itself(layer):  # as routers do
    layer.forward = torch.autocast("cpu", enabled=False)(lambda x: x.float() @ layer.weight.float().T)


def fails(layer):
    layer.forward = lambda x: x @ layer.weight.detach().view(torch.int32).float().view_as(layer.weight).T


@pytest.mark.parametrize("change", [reads_its_weights_itself, fails])
def test_a_reference_that_would_change_stays_in_fp32(random_model, change):
    policy = load(random_model, precision="bf16")
    reference = make_reference(policy.model)
    change(reference.model.layers[0].mlp.down_proj)
    before = [p.clone() for p in reference.parameters()]
    store_frozen_in_bf16(replace(policy, model=reference))
    after = list(reference.parameters())
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, after, strict=True))


def rates(name: str, steps: int = 10, warmup: float = 0, min_lr=None) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)
    schedule = make_lr_schedule(optimizer, name=name, num_updates=steps, warmup_steps=warmup, min_lr=min_lr)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_by_hand():
    assert rates("linear", warmup=2)[:4] == pytest.approx([0, 0.5, 1.0, 7 / 8])
    assert rates("linear", warmup=0.2) == rates("linear", warmup=2), "a fraction of the updates"
    assert rates("linear", warmup=0.11) == rates("linear", warmup=2), "rounded up, as transformers does"
    assert min(rates("cosine", steps=100, min_lr=0.1)) == pytest.approx(0.1, abs=1e-3)


def test_tokenizer_without_pad_works(random_model, tmp_path):
    folder = save_random_model(tmp_path)
    tokenizer = load(folder).tokenizer
    tokenizer.pad_token = None
    policy = load_policy(str(folder), tokenizer, device=torch.device("cpu"), precision="fp32")
    assert policy.pad_id == policy.eos_ids[0]
