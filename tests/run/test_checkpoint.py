"""Checkpoints: whole or not there, loadable by anyone. (They run no code: ``tests/faults/test_poison.py``.)"""

import json
import os
import resource
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import load
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.checkpoint.format import (
    BrokenCheckpoint,
    Trained,
    find_newest_valid,
    list_checkpoints,
    read_state,
    recover,
    restore,
    save_checkpoint,
    verify,
)
from grpo.distributed import load_tensors, save_tensors, saved_names
from grpo.model import make_reference
from grpo.run.optimizer import make_optimizer
from grpo.system import UserError


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


@pytest.mark.parametrize("saved", [True, None])
def test_whether_adamw_is_fused_is_not_taken_from_the_checkpoint(random_model, tmp_path, saved):
    """A checkpoint of a GPU continued on the CPU, and the other way round."""
    policy, other = load(random_model), load(random_model)
    things = Trained(policy, AdamW(policy.model.parameters(), fused=saved), {})
    update(policy, things.optimizer)
    folder = save_checkpoint(tmp_path, 1, trained=things)
    optimizer = AdamW(other.model.parameters(), fused=None if saved else True)
    restore(folder, other.model, optimizer, {})
    assert optimizer.param_groups[0]["fused"] == (None if saved else True)
    update(other, optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_round_trip_is_bit_for_bit(random_model, tmp_path):
    things = trained(random_model)
    folder = save_checkpoint(tmp_path, 3, trained=things, state={"num_tokens": 17})
    assert read_state(folder) == {"step": 3, "num_tokens": 17}
    assert verify(folder)["files"].keys() >= {"model.safetensors", "config.json", "trainer/state.json"}
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
    save_tensors(things.states() | {"optimizer/gone/step": torch.ones(())}, tmp_path / "trainer" / "states", None)
    with pytest.raises(ValueError, match="optimizer/gone/step is of no weight"):
        restore(tmp_path, things.policy.model, things.optimizer, {})


def test_tensors_are_read_by_name(tmp_path):
    save_tensors({"a": torch.arange(3.0), "b": torch.ones(2)}, tmp_path, None)
    found = {"a": torch.zeros(3)}
    load_tensors(found, tmp_path)
    assert found["a"].tolist() == [0, 1, 2] and saved_names(tmp_path) == {"a", "b"}
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_tensors({"c": torch.zeros(3)}, tmp_path)


def test_transformers_loads_it(random_model, tmp_path):
    things = trained(random_model)
    folder = save_checkpoint(tmp_path, 1, trained=things)
    ids = torch.tensor([[5, 6, 7]])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(ids).logits, things.policy.model.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).decode([5, 6]) == things.policy.tokenizer.decode([5, 6])


def cut_short(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)


def flip_a_byte(folder):
    with open(folder / "trainer" / "states" / "__0_0.distcp", "r+b") as file:
        file.seek(2000)
        byte = file.read(1)
        file.seek(2000)
        file.write(bytes([byte[0] ^ 1]))


def as_pipe(path):
    """A read of it would wait for a writer."""
    path.unlink()
    os.mkfifo(path)


SPOILED = {
    "cut short": (cut_short, "model.safetensors"),
    "one byte": (flip_a_byte, "__0_0.distcp"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "half a manifest": (lambda folder: (folder / "manifest.json").write_text('{"st'), "manifest.json"),
    "manifest is a pipe": (lambda folder: as_pipe(folder / "manifest.json"), "manifest.json"),
    "weights are a pipe": (lambda folder: as_pipe(folder / "model.safetensors"), "model.safetensors"),
    "missing file": (lambda folder: (folder / "config.json").unlink(), "config.json"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_broken_checkpoint_is_named_and_passed_over(random_model, tmp_path, how):
    things = trained(random_model)
    good = save_checkpoint(tmp_path, 1, trained=things)
    bad = save_checkpoint(tmp_path, 2, trained=things)
    assert find_newest_valid(tmp_path) == (bad, [])
    spoil, named = SPOILED[how]
    spoil(bad)
    with pytest.raises(BrokenCheckpoint, match=named):
        verify(bad)
    found, (warning,) = find_newest_valid(tmp_path)
    assert found == good
    assert "checkpoint-2" in warning
    assert named in warning


def test_only_the_newest_are_kept_and_strangers_are_left_alone(random_model, tmp_path):
    things = trained(random_model)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / ".partial-checkpoint-7").mkdir(parents=True)
    for step in (2, 9, 10):
        save_checkpoint(tmp_path, step, trained=things, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 9]
    assert (tmp_path / "checkpoint-best").exists()
    assert find_newest_valid(tmp_path)[0].name == "checkpoint-10"


def test_saving_again_replaces(random_model, tmp_path):
    save_checkpoint(tmp_path, 1, trained=trained(random_model), state={"num_tokens": 1})
    save_checkpoint(tmp_path, 1, trained=trained(random_model), state={"num_tokens": 2})
    assert read_state(find_newest_valid(tmp_path)[0])["num_tokens"] == 2


def test_a_save_killed_while_it_replaces_one_of_its_step_loses_neither(random_model, tmp_path):
    folder = save_checkpoint(tmp_path, 1, trained=trained(random_model))
    replaced = tmp_path / ".replaced-checkpoint-1"
    os.rename(folder, replaced)  # killed here: neither is in place
    recover(tmp_path)
    assert find_newest_valid(tmp_path) == (folder, []) and not replaced.exists()
    shutil.copytree(folder, replaced)  # killed here: the old one is still there
    recover(tmp_path)
    assert find_newest_valid(tmp_path) == (folder, []) and not replaced.exists()


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
    cut_short(later)
    save_checkpoint(tmp_path, 3, trained=things, keep=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 3]
    assert find_newest_valid(tmp_path)[0].name == "checkpoint-3"


def test_no_damage_to_a_manifest_is_another_error(random_model, tmp_path):
    folder = save_checkpoint(tmp_path, 1, trained=trained(random_model))
    manifest = (folder / "manifest.json").read_bytes()
    start = manifest.index(b'"files"')
    for place in range(start, len(manifest), 11):
        for bit in (0, 3, 7):
            damaged = bytearray(manifest)
            damaged[place] ^= 1 << bit
            (folder / "manifest.json").write_bytes(damaged)
            with pytest.raises(BrokenCheckpoint):
                verify(folder)
    for text in ("[]", "{}", '{"files": []}', '{"files": {"config.json": 3}}'):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(BrokenCheckpoint):
            verify(folder)


@pytest.mark.parametrize("full_after", [8_000, 250_000])
@pytest.mark.parametrize("free", [0, 2**40])
def test_a_full_disk_is_one_line(random_model, tmp_path, monkeypatch, full_after, free):
    """safetensors and torch each have another word for it. Stands in for it: a limit on file size."""
    things = trained(random_model)
    good = save_checkpoint(tmp_path, 1, trained=things)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    resource.setrlimit(resource.RLIMIT_FSIZE, (full_after, hard))
    try:
        with pytest.raises(UserError) as error:
            save_checkpoint(tmp_path, 2, trained=things)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    why, message = "the disk is full: " if free == 0 else "", str(error.value)
    assert message.startswith(f"checkpoint at step 2 could not be saved in {tmp_path}: {why}")
    assert ("the disk is full" in message) == (free == 0) and "\n" not in message
    assert find_newest_valid(tmp_path) == (good, [])
    assert find_newest_valid(save_checkpoint(tmp_path, 2, trained=things).parent)[0].name == "checkpoint-2"


def test_all_files_have_one_mode(random_model, tmp_path):
    """Whoever may read the state may read the weights, which safetensors writes for their owner alone."""
    mask = os.umask(0o027)
    try:
        folder = save_checkpoint(tmp_path, 1, trained=trained(random_model))
    finally:
        os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o640}
