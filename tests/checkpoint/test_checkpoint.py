"""Checkpoints: whole or not there, loadable by anyone. (That they run no code:
``tests/faults/test_poison.py``.)"""

import copy
import json
import os
import shutil

import pytest
import torch
from conftest import load
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.checkpoint import format as checkpoint
from grpo.checkpoint.format import (
    TrainedTensors,
    find_newest_valid,
    list_checkpoints,
    read_state,
    restore,
    why_invalid,
)
from grpo.config import OptimConfig
from grpo.distributed import save_tensors
from grpo.run.optimizer import make_optimizer


def update(things: TrainedTensors) -> None:
    logits = things.policy.model(torch.tensor([[5, 6, 7]])).logits
    logits.logsumexp(-1).sum().backward()
    things.optimizer.step()
    things.optimizer.zero_grad()


def trained(folder, updates: int = 3) -> TrainedTensors:
    """A policy, an optimizer that has moments, and a reference that has moved."""
    policy = load(folder)
    reference = copy.deepcopy(policy.model).requires_grad_(False)
    optimizer = make_optimizer(
        policy.model, OptimConfig(learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    )
    things = TrainedTensors(policy, optimizer, dict(reference.named_parameters()))
    for _ in range(updates):
        update(things)
        with torch.no_grad():
            next(reference.parameters()).add_(1.0)
    return things


def save(folder, step: int, things: TrainedTensors, keep: int = 2, **state):
    return checkpoint.save_checkpoint(
        folder,
        step,
        trained=things,
        world=checkpoint.SINGLE_PROCESS,
        state=state,
        keep=keep,
        best_step=None,
    )


def restored(folder) -> TrainedTensors:
    things = trained(folder, updates=0)
    restore(folder, things)
    return things


def assert_equal(one: TrainedTensors, other: TrainedTensors) -> None:
    for first, second in (
        (one.policy.model.state_dict(), other.policy.model.state_dict()),
        (one.optimizer_and_reference(), other.optimizer_and_reference()),
    ):
        assert first.keys() == second.keys() and first
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name])


def test_round_trip_is_bit_for_bit(random_model, tmp_path):
    things = trained(random_model)
    folder = save(tmp_path, 3, things, num_tokens=17)
    assert read_state(folder) == {"step": 3, "num_tokens": 17}
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files.keys() >= {"model.safetensors", "config.json", "trainer/state.json"}
    assert_equal(things, restored(folder))
    assert {
        "reference/model.norm.weight",
        "optimizer/model.norm.weight/exp_avg",
    } <= things.optimizer_and_reference().keys()


def test_a_weight_that_no_update_has_reached_continues_as_such(random_model, tmp_path):
    """As an expert that no token was sent to: AdamW has no state of it yet."""
    things = trained(random_model, updates=0)
    late = things.policy.model.model.layers[1].mlp.up_proj.weight
    late.requires_grad_(False)
    update(things)
    late.requires_grad_(True)
    fresh = restored(save(tmp_path, 1, things))
    for one in (things, fresh):
        update(one)
    assert_equal(things, fresh)


def test_a_state_of_a_weight_that_the_model_lacks_is_refused(random_model, tmp_path):
    """As when a version of transformers names its modules otherwise: the averages must not be lost
    without a word."""
    things = trained(random_model)
    states = things.optimizer_and_reference() | {"optimizer/gone/step": torch.ones(())}
    save_tensors(states, tmp_path / "trainer" / "states", is_single_process=True)
    with pytest.raises(ValueError, match="optimizer/gone/step is of no weight"):
        restore(tmp_path, things)


def test_transformers_loads_it(random_model, tmp_path):
    """Also with a generation config that transformers refuses to save."""
    things = trained(random_model)
    model = things.policy.model
    odd = GenerationConfig(do_sample=False)
    odd.temperature = 0.3
    model.generation_config = odd
    folder = save(tmp_path, 1, things)
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.3
    assert model.generation_config is odd
    ids = torch.tensor([[5, 6, 7]])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(ids).logits, model.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).decode([5, 6]) == things.policy.tokenizer.decode(
        [5, 6]
    )


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
    (lambda path: path.write_text('{"files": []}'), "manifest.json"),
]


def test_a_broken_checkpoint_is_named_and_passed_over(random_model, tmp_path, capsys):
    things = trained(random_model)
    good = save(tmp_path, 1, things)
    bad = save(tmp_path, 2, things)
    shutil.copytree(bad, tmp_path / "whole")
    assert find_newest_valid(tmp_path) == bad
    for spoil, name in SPOILED:
        spoil(bad / name)
        assert find_newest_valid(tmp_path) == good
        assert f"warning: skipping {bad}" in capsys.readouterr().out
        shutil.rmtree(bad)
        shutil.copytree(tmp_path / "whole", bad)
    assert find_newest_valid(tmp_path) == bad


def test_no_damage_to_a_manifest_goes_unnoticed(random_model, tmp_path):
    folder = save(tmp_path, 1, trained(random_model))
    manifest = (folder / "manifest.json").read_bytes()
    for place in range(manifest.index(b'"files"'), len(manifest), 11):
        damaged = bytearray(manifest)
        damaged[place] ^= 1 << place % 8
        (folder / "manifest.json").write_bytes(damaged)
        assert why_invalid(folder)


def test_only_the_newest_are_kept(random_model, tmp_path):
    things = trained(random_model)
    for step in (2, 9, 10):
        save(tmp_path, step, things)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 9]
    cut_short(tmp_path / "checkpoint-10" / "model.safetensors")
    # the run went on from step 2: later ones are not pushed out by it, nor push it out
    save(tmp_path, 3, things, keep=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 9, 3]


def test_a_save_killed_while_it_replaces_one_of_its_step_loses_neither(random_model, tmp_path):
    things = trained(random_model)
    save(tmp_path, 1, things, num_tokens=1)
    folder = save(tmp_path, 1, things, num_tokens=2)
    partial = tmp_path / ".partial-checkpoint-1"
    # what was left of the old one, in any order
    for old in (
        [],
        ["model.safetensors"],
        ["manifest.json"],
    ):
        os.rename(folder, partial)
        for name in old:
            folder.mkdir()
            (folder / name).write_text("old")
        checkpoint.recover(tmp_path)
        assert find_newest_valid(tmp_path) == folder and read_state(folder)["num_tokens"] == 2
    shutil.copytree(folder, partial)
    os.unlink(partial / "manifest.json")  # killed before it was complete
    (tmp_path / ".partial-checkpoint-trial").mkdir()
    checkpoint.recover(tmp_path)
    assert find_newest_valid(tmp_path) == folder and os.listdir(tmp_path) == ["checkpoint-1"]


def test_all_files_have_one_mode(random_model, tmp_path):
    """Whoever may read the state may read the weights, which safetensors writes for their owner
    alone."""
    mask = os.umask(0o027)
    try:
        folder = save(tmp_path, 1, trained(random_model))
    finally:
        os.umask(mask)
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o640}
