"""Checkpoints: whole or not there, loadable by anyone. (That they run no code: ``tests/faults/test_poison.py``.)"""

import json
import os
import shutil

import pytest
import torch
from conftest import load
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.checkpoint.format import (
    Trained,
    find_newest_valid,
    list_checkpoints,
    problem,
    read_state,
    recover,
    restore,
    save_checkpoint,
)
from grpo.distributed import save_tensors
from grpo.model import make_reference
from grpo.run.optimizer import make_optimizer


def update(policy, optimizer) -> None:
    policy.model(torch.tensor([[5, 6, 7]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(folder, updates: int = 3) -> Trained:
    """A policy, an optimizer that has moments, and a reference that has moved."""
    policy = load(folder)
    reference = make_reference(policy.model)
    optimizer = make_optimizer(policy.model, learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(updates):
        update(policy, optimizer)
        with torch.no_grad():
            next(reference.parameters()).add_(1.0)
    return Trained(policy, optimizer, dict(reference.named_parameters()))


def restored(folder) -> Trained:
    things = trained(folder, updates=0)
    restore(folder, things.policy.model, things.optimizer, things.reference)
    return things


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_round_trip_is_bit_for_bit(random_model, tmp_path):
    things = trained(random_model)
    folder = save_checkpoint(tmp_path, 3, trained=things, state={"num_tokens": 17})
    assert read_state(folder) == {"step": 3, "num_tokens": 17}
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files.keys() >= {"model.safetensors", "config.json", "trainer/state.json"}
    fresh = restored(folder)
    assert_equal(things.weights(), fresh.weights())
    assert_equal(things.states(), fresh.states())
    assert {"reference/model.norm.weight", "optimizer/model.norm.weight/exp_avg"} <= things.states().keys()


def test_a_weight_that_no_update_has_reached_continues_as_such(random_model, tmp_path):
    """As an expert that no token was sent to: AdamW has no state of it yet."""
    things = trained(random_model, updates=0)
    late = things.policy.model.model.layers[1].mlp.up_proj.weight
    late.requires_grad_(False)
    update(things.policy, things.optimizer)
    late.requires_grad_(True)
    fresh = restored(save_checkpoint(tmp_path, 1, trained=things))
    for one in (things, fresh):
        update(one.policy, one.optimizer)
    assert_equal(things.states(), fresh.states())
    assert_equal(things.weights(), fresh.weights())


def test_a_state_of_a_weight_that_the_model_lacks_is_refused(random_model, tmp_path):
    """As when a version of transformers names its modules otherwise: the averages must not be lost without a word."""
    things = trained(random_model)
    save_tensors(
        things.states() | {"optimizer/gone/step": torch.ones(())}, tmp_path / "trainer" / "states", is_alone=True
    )
    with pytest.raises(ValueError, match="optimizer/gone/step is of no weight"):
        restore(tmp_path, things.policy.model, things.optimizer, {})


def test_transformers_loads_it(random_model, tmp_path):
    things = trained(random_model)
    folder = save_checkpoint(tmp_path, 1, trained=things)
    ids = torch.tensor([[5, 6, 7]])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(ids).logits, things.policy.model.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).decode([5, 6]) == things.policy.tokenizer.decode([5, 6])


def cut_short(path):
    os.truncate(path, 1000)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[2000] ^= 1
    path.write_bytes(data)


SPOILED = [
    (cut_short, "model.safetensors"),
    (flip_a_bit, "trainer/states/__0_0.distcp"),
    (os.unlink, "config.json"),
    (os.unlink, "manifest.json"),
    (lambda path: path.write_text('{"st'), "manifest.json"),
    (lambda path: path.write_text('{"files": []}'), "manifest.json"),
]


@pytest.mark.parametrize(("spoil", "name"), SPOILED)
def test_a_broken_checkpoint_is_named_and_passed_over(random_model, tmp_path, spoil, name):
    things = trained(random_model)
    good = save_checkpoint(tmp_path, 1, trained=things)
    bad = save_checkpoint(tmp_path, 2, trained=things)
    assert find_newest_valid(tmp_path) == (bad, [])
    spoil(bad / name)
    assert problem(bad).startswith(f"{bad}: {name} ")
    assert find_newest_valid(tmp_path) == (good, [f"skipping {problem(bad)}"])


def test_no_damage_to_a_manifest_goes_unnoticed(random_model, tmp_path):
    folder = save_checkpoint(tmp_path, 1, trained=trained(random_model))
    manifest = (folder / "manifest.json").read_bytes()
    for place in range(manifest.index(b'"files"'), len(manifest), 11):
        damaged = bytearray(manifest)
        damaged[place] ^= 1 << place % 8
        (folder / "manifest.json").write_bytes(damaged)
        assert problem(folder)


def test_only_the_newest_are_kept_and_strangers_are_left_alone(random_model, tmp_path):
    things = trained(random_model)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / ".partial-checkpoint-7").mkdir(parents=True)
    for step in (2, 9, 10):
        save_checkpoint(tmp_path, step, trained=things, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 9]
    assert (tmp_path / "checkpoint-best").exists()
    assert find_newest_valid(tmp_path)[0].name == "checkpoint-10"


def test_a_save_killed_while_it_replaces_one_of_its_step_loses_neither(random_model, tmp_path):
    things = trained(random_model)
    folder = save_checkpoint(tmp_path, 1, trained=things, state={"num_tokens": 1})
    folder = save_checkpoint(tmp_path, 1, trained=things, state={"num_tokens": 2})
    assert read_state(folder)["num_tokens"] == 2
    for old in (None, ["model.safetensors"], ["manifest.json"]):  # what was left of the old one, in any order
        os.rename(folder, tmp_path / ".partial-checkpoint-1")
        for name in old or ():
            folder.mkdir()
            (folder / name).write_text("old")
        recover(tmp_path)
        assert find_newest_valid(tmp_path) == (folder, []) and read_state(folder)["num_tokens"] == 2
    shutil.copytree(folder, tmp_path / ".partial-checkpoint-1")
    os.unlink(tmp_path / ".partial-checkpoint-1" / "manifest.json")  # killed before it was complete
    recover(tmp_path)
    assert find_newest_valid(tmp_path) == (folder, []) and os.listdir(tmp_path) == ["checkpoint-1"]


def test_an_odd_generation_config_does_not_stop_a_save(random_model, tmp_path):
    things = trained(random_model)
    odd = GenerationConfig(do_sample=False)
    odd.temperature, odd.top_p, odd.eos_token_id = 0.3, 0.5, 1  # transformers refuses to save this
    things.policy.model.generation_config = odd
    with pytest.raises(ValueError, match="temperature"):
        things.policy.model.save_pretrained(tmp_path / "refused")
    folder = save_checkpoint(tmp_path, 1, trained=things)
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.3
    assert things.policy.model.generation_config is odd


def test_a_broken_later_checkpoint_does_not_push_out_what_is_saved(random_model, tmp_path):
    things = trained(random_model)
    for step in (1, 2):
        save_checkpoint(tmp_path, step, trained=things)
    later = save_checkpoint(tmp_path, 9, trained=things)
    cut_short(later / "model.safetensors")
    save_checkpoint(tmp_path, 3, trained=things, keep=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 3]
    assert find_newest_valid(tmp_path)[0].name == "checkpoint-3"


def test_all_files_have_one_mode(random_model, tmp_path):
    """Whoever may read the state may read the weights, which safetensors writes for their owner alone."""
    mask = os.umask(0o027)
    try:
        folder = save_checkpoint(tmp_path, 1, trained=trained(random_model))
    finally:
        os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o640}
