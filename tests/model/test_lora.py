"""LoRA: scoring, sampling, reference, update and files, against peft's own forward pass and float64
computations."""

import peft
import pytest
import torch
from conftest import load, save_random_model, small_run
from outputs import lines
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo.algorithm.batch import Completion, Group, Problem, collate
from grpo.algorithm.logprobs import CompletionScorer
from grpo.commands.merge import main as merge
from grpo.config import load_config
from grpo.distributed import saved_names, start_world
from grpo.model import save_weights, store_frozen_in_bf16, write_merged
from grpo.model.lora import (
    AdapterReference,
    adapter_parameters,
    add_adapter,
    add_reference_adapter,
    copy_to_reference_adapter,
    read_adapter,
)
from grpo.rollout import BuiltinEngine, SamplingParams
from grpo.run.prepare import prepare
from grpo.run.records import Step
from train_grpo import main, update

SETTINGS = dict(
    r=4,
    lora_alpha=12,
    target_modules="all-linear",
    use_rslora=True,
    init_lora_weights="gaussian",
    rank_pattern={"q_proj": 2},
    alpha_pattern={"down_proj": 3},
)
PROBLEMS = [Problem(0, "", tuple(range(5, 12))), Problem(1, "", tuple(range(20, 24)))]


def adapted(folder, *, packed=True, precision="fp32", base_precision="bf16", **settings):
    """The policy of a folder with an adapter whose change of the weights is large."""
    policy = load(folder, packed=packed, precision=precision)
    add_adapter(policy, SETTINGS | settings, base=str(folder))
    if base_precision == "bf16":
        store_frozen_in_bf16(policy)
    change(policy, seed=0)
    return policy


@torch.no_grad()
def change(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(policy.model).items():
        if "lora_B" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def a_batch(seed=0):
    """Two groups of three completions of uneven length."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (2, 3), generator=rng).tolist()
    groups = []
    for problem, row in zip(PROBLEMS, lengths, strict=True):
        ids = [torch.randint(3, 90, (n,), generator=rng).tolist() for n in row]
        groups.append(Group(problem, tuple(Completion(tuple(tokens), "", True) for tokens in ids)))
    advantages_PG = torch.tensor([[1.0, -0.5, -0.5], [-1.2, 0.2, 1.0]])
    return groups, collate(groups, advantages_PG, pad_id=0)


def expected_logprobs(model, groups):
    """``[B, T]`` from the logits of each sequence alone."""
    rows = []
    for group in groups:
        for completion in group.completions:
            start = len(group.problem.prompt_ids)
            ids = torch.tensor([[*group.problem.prompt_ids, *completion.ids]])
            logprobs = model(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
            rows.append(logprobs.gather(-1, ids[0, start:, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def scored(policy, scorer, batch):
    getattr(scorer, "scorer", scorer).is_packed = policy.model.config._attn_implementation != "sdpa"
    with torch.no_grad(), policy.autocast():
        return scorer(*batch.scorer_inputs)[0]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_scoring_equals_the_forward_pass_of_peft_and_of_the_merged_model(
    random_model, tmp_path, packed
):
    policy = adapted(random_model, packed=packed)
    groups, batch = a_batch()
    folder, merged = tmp_path / "adapter", tmp_path / "merged"
    folder.mkdir()
    save_weights(policy.adapter, policy.adapter.state_dict(), folder)
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(random_model), folder
    )
    base = AutoModelForCausalLM.from_pretrained(random_model)
    found = scored(policy, CompletionScorer(policy.model), batch)
    again = load(random_model)
    read_adapter(again, str(folder), base="")
    written = adapter_parameters(policy.model)
    assert all(
        torch.equal(tensor, written[name])
        for name, tensor in adapter_parameters(again.model).items()
    )

    write_merged(folder, merged, trust_remote_code=False)
    whole = AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        torch.testing.assert_close(found, expected_logprobs(theirs, groups), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found, expected_logprobs(whole, groups), atol=1e-5, rtol=1e-5)
        assert (found - expected_logprobs(base, groups)).abs().max() > 0.1


@pytest.mark.parametrize(("precision", "base"), [("fp32", "fp32"), ("bf16", "bf16")])
def test_without_its_adapter_the_model_is_the_base_to_the_bit(random_model, precision, base):
    """Also after an exception; and a frozen copy is a reference of its own."""
    _, batch = a_batch()
    plain = load(random_model, packed=True, precision=precision)
    expected = scored(plain, CompletionScorer(plain.model), batch)
    policy = adapted(random_model, precision=precision, base_precision=base)
    stored = policy.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert stored.dtype == (torch.bfloat16 if base == "bf16" else torch.float32)
    scorer = CompletionScorer(policy.model)
    with_adapter = scored(policy, scorer, batch)
    policy.model.train()
    reference = AdapterReference(policy, CompletionScorer(policy.model))
    assert torch.equal(scored(policy, reference, batch), expected) and policy.model.training
    with pytest.raises(AttributeError):
        reference(None, None, None)
    assert torch.equal(scored(policy, scorer, batch), with_adapter)

    add_reference_adapter(policy)
    frozen = AdapterReference(policy, CompletionScorer(policy.model))
    change(policy, seed=1)
    assert torch.equal(scored(policy, frozen, batch), with_adapter)
    changed = scored(policy, scorer, batch)
    assert not torch.equal(changed, with_adapter)
    copy_to_reference_adapter(policy.model)
    assert torch.equal(scored(policy, frozen, batch), changed)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == set(adapter_parameters(policy.model)) and len(trained) == 2 * 7 * 2


@pytest.mark.parametrize("fast", [True, False], ids=["copied", "through the adapters"])
def test_rollouts_follow_the_adapter_and_have_the_log_probs_of_scoring(random_model, fast):
    policy = adapted(random_model, target_modules=["q_proj", "down_proj"])
    engine = BuiltinEngine(policy, fast_decode=fast)
    sampling = SamplingParams(4, 10, temperature=0.9)
    base = {name: p.clone() for name, p in policy.model.named_parameters()}
    completions = []
    for seed in (0, 1):
        change(policy, seed)
        groups = engine.generate(PROBLEMS, sampling, seed_key=(0, "rollout", 0))
        batch = collate(groups, torch.zeros(2, 4), pad_id=0)
        found = scored(policy, CompletionScorer(policy.model, 0.9), batch)
        torch.testing.assert_close(batch.sampling_logprobs_BT, found, atol=1e-4, rtol=1e-4)
        for group in groups:
            completions.append([completion.ids for completion in group.completions])
    assert completions[:2] != completions[2:]
    assert all(
        torch.equal(p, base[name])
        for name, p in policy.model.named_parameters()
        if "lora_B" not in name
    )


def test_an_update_equals_one_in_float64(random_model, tmp_path):
    """Gradients of both matrices by autograd through ``W + scale * B @ A`` of the plain model, then
    AdamW by hand."""
    arguments = [
        *small_run(random_model, tmp_path / "run"),
        "lora.rank=3",
        "lora.alpha=9",
        "algorithm.beta=0.0",
    ]
    arguments += [
        "optim.weight_decay=0.1",
        "optim.max_grad_norm=0.5",
        "model.gradient_checkpointing=true",
    ]
    config = load_config(arguments)
    run = prepare(config, start_world(config.runtime))
    try:
        change(run.learner.policy, seed=0)
        groups, batch = a_batch()
        adapter = adapter_parameters(run.learner.policy.model)
        before = {name: p.detach().double().clone() for name, p in adapter.items()}
        update(run.learner, Step(0), batch, is_first_iteration=False)
        after = {name: p.detach().double() for name, p in adapter.items()}
    finally:
        run.close()
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float64)
    leaves = {name: tensor.requires_grad_() for name, tensor in before.items()}
    parameters = dict(model.named_parameters())
    for name in {name.rpartition(".lora_")[0] for name in leaves}:
        a = leaves[f"{name}.lora_A.default.weight"]
        b = leaves[f"{name}.lora_B.default.weight"]
        parameters[f"{name}.weight"] = parameters[f"{name}.weight"].detach() + 9 / 3 * b @ a

    def changed_model(input_ids):
        return torch.func.functional_call(model, parameters, kwargs={"input_ids": input_ids})

    logprobs_BT = expected_logprobs(changed_model, groups)
    mask_BT = batch.completion_mask_BT
    per_row_B = (logprobs_BT * mask_BT).sum(1) / mask_BT.sum(1)
    loss = -(per_row_B * batch.advantages_B.double()).mean()
    grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    factor = min(1.0, 0.5 / norm.item())
    for name, old in before.items():
        g = grads[name] * factor
        # The bias-corrected averages of the first update are g and g^2.
        step = old * (1 - 1e-3 * 0.1) - 1e-3 * g / (g.abs() + 1e-8)
        clear = g.abs() > 1e-5  # elsewhere fp32's rounding of the gradient shows
        assert clear.any()
        torch.testing.assert_close(after[name][clear], step.detach()[clear], atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_run_begins_at_an_adapter_whose_model_is_checked(tmp_path, capsys):
    model = save_random_model(tmp_path / "model")

    def run(name, *more):
        options = [
            "optim.max_steps=3",
            "eval.before_training=false",
            "data.max_eval_samples=4",
            "algorithm.beta=0.1",
        ]
        return main([*small_run(model, tmp_path / name), *options, *more])

    assert run("run", "lora.rank=4", "lora.target_modules=[q_proj, v_proj]") == 0
    last = tmp_path / "run" / "checkpoint-3"
    start = f"model.adapter={last}"
    assert run("next", start, "algorithm.ref_sync_steps=2") == 0
    kl = [line["kl"] for line in lines(tmp_path / "next") if "kl" in line]
    # The reference began as the adapter, and followed after step 2.
    assert kl[0] == 0 and kl[1] > 0 and kl[2] == 0
    saved = saved_names(tmp_path / "next" / "checkpoint-3" / "trainer" / "states")
    assert "reference/model.layers.0.self_attn.q_proj.lora_A.reference.weight" in saved

    # The model of an adapter is replaced under the same path: no command uses it without a word.
    capsys.readouterr()
    weights_file = model / "model.safetensors"
    tensors = {name: tensor + 0.1 for name, tensor in load_file(weights_file).items()}
    save_file(tensors, weights_file, metadata={"format": "pt"})
    assert merge([str(last)]) == 2
    assert run("third", start) == 2
    assert (
        capsys.readouterr().err.count(
            f"{weights_file} has changed since the adapter {last} was trained"
        )
        == 2
    )


def peft_adapter(folder, output, **settings):
    """The folder of an adapter that peft makes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"r": 4, "target_modules": ["q_proj", "down_proj"]} | settings
    adapter = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    adapter.save_pretrained(output)
    return output


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "is not plain LoRA .use_dora"),
        ({"target_modules": ["embed_tokens"]}, "would adapt .*embed_tokens"),
        # Its file lacks a matrix.
        ({}, r"does not fit the model: .*layers.1.mlp.down_proj.lora_B"),
    ],
)
def test_an_adapter_that_is_more_or_less_than_a_sum_is_refused(
    random_model, tmp_path, settings, message
):
    folder = peft_adapter(random_model, tmp_path / "adapter", **settings)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight", None)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        read_adapter(load(random_model), str(folder), base="")
    with pytest.raises(ValueError, match=message):
        write_merged(folder, tmp_path / "merged", trust_remote_code=False)


def test_a_name_that_no_layer_has_is_refused(random_model):
    targets = ["q_proj", "k_porj"]
    with pytest.raises(ValueError, match=r"\['q_proj', 'k_porj'\]: no layer has the name k_porj"):
        add_adapter(load(random_model), SETTINGS | {"target_modules": targets}, base="")
