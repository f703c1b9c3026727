"""LoRA: scoring, sampling, reference, update and files, against peft's own forward pass and float64 computations."""

import copy
import json
import re
import shutil

import peft
import pytest
import torch
from conftest import load, small_run
from outputs import lines
from transformers import AutoModelForCausalLM

from grpo.batch import Completion, Group, Problem, collate
from grpo.chat import main as chat
from grpo.config import load_config
from grpo.distributed import start_world
from grpo.evaluation.command import main as evaluate
from grpo.logprobs import CompletionScorer
from grpo.merge import main as merge
from grpo.model import add_adapter, read_adapter, write_merged
from grpo.rollout import BuiltinEngine, SamplingParams, weights
from grpo.run.adapters import AdapterReference
from grpo.run.memory.estimate import memory_of
from grpo.run.prepare import prepare
from grpo.telemetry.accumulator import Accumulator
from train_grpo import main, update

SETTINGS = dict(r=4, lora_alpha=12, lora_dropout=0.0, target_modules="all-linear", use_rslora=True)
PROBLEMS = [Problem(0, "", tuple(range(5, 12))), Problem(1, "", tuple(range(20, 24)))]


def adapted(folder, *, packed=True, precision="fp32", base_precision="bf16", **settings):
    """The policy of a folder with an adapter whose change of the weights is large."""
    policy = load(folder, packed=packed, precision=precision)
    add_adapter(policy, SETTINGS | settings, base=str(folder), base_precision=base_precision)
    change(policy, seed=0)
    return policy


@torch.no_grad()
def change(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.adapter.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def a_batch(seed=0):
    """Two groups of three completions of uneven length."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (2, 3), generator=rng).tolist()
    groups = [
        Group(p, tuple(Completion(tuple(torch.randint(3, 90, (n,), generator=rng).tolist()), "", True) for n in row))
        for p, row in zip(PROBLEMS, lengths, strict=True)
    ]
    advantages_PG = torch.tensor([[1.0, -0.5, -0.5], [-1.2, 0.2, 1.0]])
    return groups, collate(groups, advantages_PG, pad_id=0)


def expected_logprobs(model, groups, temperature=1.0):
    """``[B, T]`` from the logits of each sequence alone."""
    rows = []
    for group in groups:
        for completion in group.completions:
            start, ids = len(group.problem.prompt_ids), torch.tensor([[*group.problem.prompt_ids, *completion.ids]])
            logprobs = (model(input_ids=ids).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
            rows.append(logprobs.gather(-1, ids[0, start:, None])[:, 0])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def scored(policy, scorer, batch):
    scorer.packed = policy.model.config._attn_implementation != "sdpa"
    with torch.no_grad(), policy.autocast():
        return scorer(*batch.scorer_inputs)[0]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_scoring_equals_the_forward_pass_of_peft_and_of_the_merged_model(random_model, tmp_path, packed):
    policy = adapted(random_model, packed=packed)
    groups, batch = a_batch()
    folder, merged = tmp_path / "adapter", tmp_path / "merged"
    folder.mkdir()
    policy.adapter.save_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(random_model), folder)
    base = AutoModelForCausalLM.from_pretrained(random_model)
    found = scored(policy, CompletionScorer(policy.model), batch)
    with torch.no_grad():
        torch.testing.assert_close(found, expected_logprobs(theirs, groups), atol=1e-5, rtol=1e-5)
        assert (found - expected_logprobs(base, groups)).abs().max() > 0.1
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    again = load(random_model)
    read_adapter(again, folder, setting="model.adapter", base="", base_precision="bf16")
    written = policy.adapter.state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in again.adapter.state_dict().items())

    write_merged(folder, merged)
    whole = AutoModelForCausalLM.from_pretrained(merged)
    with torch.no_grad():
        torch.testing.assert_close(found, expected_logprobs(whole, groups), atol=1e-5, rtol=1e-5)
    layer = "model.layers.1.mlp.up_proj"
    a, b = (written[f"{layer}.lora_{x}.weight"].double() for x in "AB")
    exact = base.get_submodule(layer).weight.double() + 12 / 4**0.5 * b @ a
    torch.testing.assert_close(whole.get_submodule(layer).weight.double(), exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("precision", "base"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_without_its_adapter_the_model_is_the_base_to_the_bit(random_model, precision, base):
    """Also after an exception; and a frozen copy is a reference of its own."""
    _, batch = a_batch()
    plain = load(random_model, packed=True, precision=precision)
    expected = scored(plain, CompletionScorer(plain.model), batch)
    policy = adapted(random_model, precision=precision, base_precision=base)
    stored = {p.dtype for name, p in policy.model.named_parameters() if "proj.base_layer.weight" in name}
    assert stored == {torch.bfloat16 if base == "bf16" else torch.float32}
    with_adapter = scored(policy, CompletionScorer(policy.model), batch)
    policy.model.train()
    reference = AdapterReference(policy, 1.0, None)
    assert torch.equal(scored(policy, reference, batch), expected) and policy.model.training
    with pytest.raises(AttributeError):
        reference(None, None, None)
    assert torch.equal(scored(policy, CompletionScorer(policy.model), batch), with_adapter)
    frozen = AdapterReference(policy, 1.0, policy.adapter.frozen_copy())
    change(policy, seed=1)
    assert torch.equal(scored(policy, frozen, batch), with_adapter)
    assert not torch.equal(scored(policy, CompletionScorer(policy.model), batch), with_adapter)
    frozen.follow_policy()
    assert torch.equal(scored(policy, frozen, batch), scored(policy, CompletionScorer(policy.model), batch))
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {f"{layer}.lora_{x}.default.weight" for layer in policy.adapter.layers for x in "AB"}


SOME = ["q_proj", "down_proj"]


@pytest.mark.parametrize(
    ("fast", "targets", "precision"),
    [(True, "all-linear", "fp32"), (True, SOME, "bf16"), (False, SOME, "fp32")],
    ids=["copied", "copied, some layers, bf16", "through the adapters"],
)
def test_rollouts_follow_the_adapter_and_have_the_log_probs_of_scoring(random_model, fast, targets, precision):
    policy = adapted(random_model, target_modules=targets, precision=precision)
    engine = BuiltinEngine(policy, fast_decode=fast)
    sampling = SamplingParams(4, 10, temperature=0.9)
    base = {name: p.clone() for name, p in policy.model.named_parameters()}
    completions = []
    for seed in (0, 1):
        change(policy, seed)
        groups = engine.generate(PROBLEMS, sampling, address=(0, "rollout", 0))
        batch = collate(groups, torch.zeros(2, 4), pad_id=0)
        found = scored(policy, CompletionScorer(policy.model, 0.9), batch)
        tolerance = 1e-4 if precision == "fp32" else 0.25
        torch.testing.assert_close(batch.sampling_logprobs_BT, found, atol=tolerance, rtol=tolerance)
        completions.append([completion.ids for group in groups for completion in group.completions])
    assert completions[0] != completions[1]
    assert all(torch.equal(p, base[name]) for name, p in policy.model.named_parameters() if "lora_B" not in name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_copies_are_the_sum_in_fp32_and_saving_meanwhile_finds_the_adapter(random_model, precision, monkeypatch):
    """In plain memory, as on a GPU, where the second rollout refreshes the copies in place."""
    monkeypatch.setattr(weights, "_can_reorder", lambda weight: False)
    policy, kept = adapted(random_model, precision=precision), {}
    name = "model.layers.0.self_attn.k_proj"
    layer = policy.model.get_submodule(name)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for seed in (0, 1):
        change(policy, seed)
        saved = {name: tensor.clone() for name, tensor in policy.adapter.state_dict().items()}
        with weights.copied_weights(policy.model, precision, kept):
            during = policy.adapter.state_dict()
            assert during.keys() == saved.keys() and all(torch.equal(during[name], saved[name]) for name in saved)
            assert policy.model.get_submodule(name).fused is kept[layer]
        assert policy.model.get_submodule(name) is layer
        _, copied, _ = kept[layer].weight.split(kept[layer].sizes)
        a, b = (saved[f"{name}.lora_{x}.weight"] for x in "AB")
        assert torch.equal(copied, torch.addmm(layer.base_layer.weight.float(), b, a, alpha=6.0).to(dtype))


def test_an_update_equals_one_in_float64(random_model, tmp_path):
    """Gradients of both matrices by autograd through ``W + scale * B @ A`` of the plain model, then AdamW by its formula.

    And what is in memory is what the estimate says.
    """
    arguments = [*small_run(random_model, tmp_path / "run"), "lora.rank=3", "lora.alpha=9", "algorithm.beta=0.0"]
    arguments += ["optim.weight_decay=0.1", "optim.max_grad_norm=0.5", "model.gradient_checkpointing=true"]
    config = load_config(arguments)
    run = prepare(config, start_world(config.runtime))
    try:
        change(run.policy, seed=0)
        groups, batch = a_batch()
        before = {name: tensor.double().clone() for name, tensor in run.policy.adapter.state_dict().items()}
        update(run, batch, Accumulator(), first_pass_BT=None)
        after = {name: tensor.double() for name, tensor in run.policy.adapter.state_dict().items()}
        trained = [p for group in run.optimizer.param_groups for p in group["params"]]
        assert sum(p.numel() for p in trained) == sum(tensor.numel() for tensor in before.values())
        averages = [t for state in run.optimizer.state.values() for t in state.values() if t.dim()]
        # The second time for the gradients, which are freed and as large as the weights.
        held = [*run.policy.model.parameters(), *trained, *averages]
        memory = memory_of(run, longest_prompt=20)
        assert memory.states == sum(tensor.numel() * tensor.element_size() for tensor in held) and memory.reference == 0
    finally:
        run.close()
    model = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float64)
    leaves = {name: tensor.requires_grad_() for name, tensor in before.items()}
    parameters = dict(model.named_parameters())
    for name in {name.rpartition(".lora_")[0] for name in leaves}:
        change_of = 9 / 3 * leaves[f"{name}.lora_B.weight"] @ leaves[f"{name}.lora_A.weight"]
        parameters[f"{name}.weight"] = parameters[f"{name}.weight"].detach() + change_of
    patched = copy.deepcopy(model)
    logprobs_BT = expected_logprobs(
        lambda input_ids: torch.func.functional_call(patched, parameters, kwargs={"input_ids": input_ids}), groups
    )
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
def test_a_run_saves_adapters_continues_to_the_bit_and_refuses_the_other_kind(random_model, tmp_path, capsys):
    def arguments(name, *more):
        short = ["optim.max_steps=3", "checkpoint.save_steps=1", "checkpoint.keep=9", "eval.before_training=false"]
        return [*small_run(random_model, tmp_path / name), *short, "data.max_eval_samples=4", *more]

    lora = ["lora.rank=4", "lora.target_modules=[q_proj, v_proj]", "algorithm.beta=0.1"]
    assert main(arguments("run", *lora, "checkpoint.merge=true")) == 0
    printed = capsys.readouterr().out
    assert "LoRA adapters of rank 4" in printed
    last = tmp_path / "run" / "checkpoint-3"
    assert lines(tmp_path / "run")[0]["kl"] == 0 and lines(tmp_path / "run")[2]["kl"] > 0
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "merged"} <= {
        path.name for path in last.iterdir()
    }
    groups, _ = a_batch()
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(last)
    merged = AutoModelForCausalLM.from_pretrained(last / "merged")
    with torch.no_grad():
        both = expected_logprobs(theirs, groups), expected_logprobs(merged, groups)
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)

    kept = {name: (last / name).read_bytes() for name in ("adapter_model.safetensors", "trainer/optimizer.pt")}
    metrics = lines(tmp_path / "run")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    assert main(arguments("run", *lora, "checkpoint.merge=true")) == 0
    assert {name: (last / name).read_bytes() for name in kept} == kept and lines(tmp_path / "run") == metrics

    # The other commands read the folder: the same completions as in the run, and the same merged weights later.
    capsys.readouterr()
    assert evaluate(["--model", str(last)]) == 0
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())["models"][0]["metrics"]
    assert {name: value["value"] for name, value in found.items()} == {k: metrics[-1][k] for k in found}
    assert chat(["--model", str(last), "--prompt", "1+2=", "--samples", "1"]) == 0
    assert merge([str(tmp_path / "run")]) == 2 and "merged exists" in capsys.readouterr().err
    assert merge([str(tmp_path / "run"), "--output", str(tmp_path / "later")]) == 0
    name = "model.safetensors"
    assert (tmp_path / "later" / name).read_bytes() == (last / "merged" / name).read_bytes()

    capsys.readouterr()
    assert main(arguments("run", "checkpoint.accept_changes=true")) == 2
    assert "holds a LoRA adapter and this run trains all weights" in capsys.readouterr().err
    start = f"model.adapter={last}"
    assert main(arguments("next", start, "lora.rank=8")) == 2
    assert "lora.rank=8 contradicts model.adapter=" in capsys.readouterr().err
    assert main(arguments("next", start, "algorithm.beta=0.1", "algorithm.ref_sync_steps=2")) == 0
    kl = [line["kl"] for line in lines(tmp_path / "next")]
    assert kl[0] == 0 and kl[1] > 0 and kl[2] == 0  # the reference began as the adapter, and followed after step 2
    assert (tmp_path / "next" / "checkpoint-3" / "trainer" / "reference.pt").exists()


def test_layers_that_do_not_exist_are_named(random_model):
    for targets, says in (
        (
            ["q_proj", "k_porj"],
            "no layer has the name k_porj; use all-linear or a list of down_proj, gate_proj, k_proj",
        ),
        ("model[.]nowhere", "no layer has such a name"),
        ("q_proj(", "no regular expression"),
        (["self_attn"], "model.layers.0.self_attn is .*Attention and no linear layer"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"lora.target_modules={targets}: ") + ".*" + says):
            add_adapter(load(random_model), SETTINGS | {"target_modules": targets}, base="")


def test_a_rank_above_a_dimension_of_a_layer_is_refused(random_model):
    """The model has 32 hidden values, 16 of the keys and of the values, and 64 between the layers of the MLP."""
    for targets, most in (("all-linear", 16), (["q_proj", "up_proj"], 32), (r".*\.k_proj", 16)):
        settings = SETTINGS | {"target_modules": targets}
        with pytest.raises(ValueError, match=rf"lora.rank={most + 1} is above {most}, .*: use at most {most}$"):
            add_adapter(load(random_model), settings | {"r": most + 1}, base="")
        assert add_adapter(load(random_model), settings | {"r": most}, base="").config["r"] == most


def test_an_adapter_that_cannot_be_read_says_why(tmp_path):
    good = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "./gone",
    }
    for change, says in (
        ({"use_dora": True}, "it uses use_dora"),
        ({"peft_type": "IA3"}, "its peft_type is IA3"),
        ({"r": True}, "its r is True"),
        ({"lora_alpha": None}, "its lora_alpha is None"),
        ({"target_modules": None}, "its target_modules is None"),
        ({"base_model_name_or_path": 5}, "its base_model_name_or_path is 5"),
        ({}, "its model=./gone does not exist"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(good | change))
        with pytest.raises(ValueError, match=says):
            write_merged(tmp_path, tmp_path / "merged")
