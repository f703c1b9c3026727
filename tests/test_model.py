"""Loading, dropout, end tokens, reference, optimizer, schedule."""

import pytest
import torch
from conftest import load, save_random_model
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, GPT2LMHeadModel

from grpo.logprobs import CompletionScorer
from grpo.model import end_tokens, make_optimizer, make_reference, make_schedule, sync_reference, turn_dropout_off


def test_master_weights_are_fp32_whatever_the_checkpoint(random_model, tmp_path):
    half = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    load(random_model).tokenizer.save_pretrained(tmp_path)
    policy = load(tmp_path, precision="bf16")
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    with policy.autocast():
        assert policy.model(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
    # An update of 1e-6 relative to weights of order 1 survives, which bf16 parameters would round away.
    weight = next(policy.model.parameters()).detach()
    assert not torch.equal(weight, weight * (1 + 1e-6))
    assert torch.equal(weight.bfloat16(), (weight * (1 + 1e-6)).bfloat16())


def test_dropout_is_off_in_train_mode():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)).train()
    ids = torch.arange(10)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits), "GPT-2 has dropout of 0.1"
    turn_dropout_off(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


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


def rates(name: str, steps: int = 10, warmup: float = 0, min_lr=None) -> list[float]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 2))], lr=1.0)
    schedule = make_schedule(optimizer, name=name, num_updates=steps, warmup_steps=warmup, min_lr=min_lr)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_schedules_by_hand():
    assert rates("constant") == [1.0] * 10
    assert rates("linear") == pytest.approx([1 - i / 10 for i in range(10)])
    assert rates("linear", warmup=2)[:4] == pytest.approx([0, 0.5, 1.0, 7 / 8])
    assert rates("linear", warmup=0.2) == rates("linear", warmup=2), "a fraction of the updates"
    assert rates("cosine")[5] == pytest.approx(0.5)
    assert min(rates("cosine", steps=100, min_lr=0.1)) == pytest.approx(0.1, abs=1e-3)
    with pytest.raises(ValueError, match="zigzag"):
        rates("zigzag")


def test_gradient_checkpointing_changes_no_gradient(random_model):
    ids, lengths = torch.arange(3, 19).view(2, 8), torch.tensor([3, 4])
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    grads = []
    for checkpointing in (False, True):
        policy = load(random_model, gradient_checkpointing=checkpointing)
        policy.model.train()
        logprobs, _ = CompletionScorer(policy.model)(ids, lengths, mask)
        logprobs.sum().backward()
        grads.append([p.grad for p in policy.model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_tokenizer_without_pad_works(random_model, tmp_path):
    folder = save_random_model(tmp_path)
    tokenizer = load(folder).tokenizer
    tokenizer.pad_token = None
    from grpo.model import load_policy

    policy = load_policy(str(folder), tokenizer, device=torch.device("cpu"), precision="fp32")
    assert policy.pad_id == policy.eos_ids[0]


def test_dropout_stays_where_it_is_asked_for(random_model, tmp_path):
    tokenizer = load(random_model).tokenizer
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=2, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ids = torch.arange(10)[None]
    for attention in ("sdpa", "eager"):
        without, with_dropout = (
            load(tmp_path, attn_implementation=attention, disable_dropout=off).model.train() for off in (True, False)
        )
        assert torch.equal(without(ids).logits, without(ids).logits)
        assert torch.equal(without(ids).logits, without.eval()(ids).logits)
        assert not torch.equal(with_dropout(ids).logits, with_dropout(ids).logits)


def test_sampling_restores_the_mode_whatever_happens(policy):
    def fail():
        assert not policy.model.training
        assert not torch.is_grad_enabled()
        with policy.sampling():
            raise ZeroDivisionError

    for mode in (True, False):
        policy.model.train(mode)
        with policy.sampling(), pytest.raises(ZeroDivisionError):
            fail()
        assert policy.model.training is mode
        assert torch.is_grad_enabled()
