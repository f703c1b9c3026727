"""Checkpoints: whole or not there, loadable by anyone, and nothing in them can run code."""

import json
import os
import pickle
import resource
import shutil

import pytest
import torch
from conftest import load
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.model import make_reference
from grpo.run.checkpoint import (
    BrokenCheckpoint,
    dry_run_save,
    find_newest_valid,
    list_checkpoints,
    read_state,
    recover,
    restore,
    save_checkpoint,
    verify,
)
from grpo.run.optimizer import make_lr_schedule, make_optimizer


def trained(folder, updates: int = 3):
    """A policy with an optimizer that has moments and a schedule that has moved."""
    policy = load(folder)
    optimizer = make_optimizer(policy.model, learning_rate=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = make_lr_schedule(optimizer, name="linear", num_updates=10, warmup_steps=0, min_lr=None)
    for _ in range(updates):
        policy.model(torch.tensor([[5, 6, 7]])).logits.logsumexp(-1).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"model": policy.model, "tokenizer": policy.tokenizer, "optimizer": optimizer, "schedule": schedule}


@pytest.mark.parametrize("saved", [True, None])
def test_whether_adamw_is_fused_is_not_taken_from_the_checkpoint(random_model, tmp_path, saved):
    """A checkpoint of a GPU continued on the CPU, and the other way round."""
    things, fresh = trained(random_model, updates=0), trained(random_model, updates=0)
    things["optimizer"] = AdamW(things["model"].parameters(), fused=saved)
    fresh["optimizer"] = AdamW(fresh["model"].parameters(), fused=None if saved else True)
    things["model"](torch.tensor([[5, 6, 7]])).logits.sum().backward()
    things["optimizer"].step()
    folder = save_checkpoint(tmp_path, 1, **things)
    parts = dict(model=fresh["model"], optimizer=fresh["optimizer"], schedule=None)
    restore(folder, **parts, device=torch.device("cpu"))
    (group,) = fresh["optimizer"].param_groups
    assert group["fused"] == (None if saved else True)
    fresh["model"](torch.tensor([[5, 6, 7]])).logits.sum().backward()
    fresh["optimizer"].step()
    assert {float(state["step"]) for state in fresh["optimizer"].state.values()} == {2.0}


def test_round_trip_is_bit_for_bit(random_model, tmp_path):
    things = trained(random_model)
    reference = make_reference(things["model"])
    with torch.no_grad():
        next(reference.parameters()).add_(1.0)
    folder = save_checkpoint(tmp_path, 3, **things, reference=reference, state={"num_tokens": 17})
    assert read_state(folder) == {"step": 3, "num_tokens": 17}
    assert verify(folder)["step"] == 3

    fresh = trained(folder, updates=0)
    other_reference = make_reference(fresh["model"])
    restore(
        folder,
        model=fresh["model"],
        optimizer=fresh["optimizer"],
        schedule=fresh["schedule"],
        reference=other_reference,
        device=torch.device("cpu"),
    )
    for a, b in zip(things["model"].parameters(), fresh["model"].parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(reference.parameters(), other_reference.parameters(), strict=True):
        assert torch.equal(a, b)
    old, new = things["optimizer"].state_dict(), fresh["optimizer"].state_dict()
    assert old["param_groups"] == new["param_groups"]
    assert old["state"].keys() == new["state"].keys()
    for key, moments in old["state"].items():
        assert all(torch.equal(moments[name], new["state"][key][name]) for name in moments)
    assert things["schedule"].state_dict() == fresh["schedule"].state_dict()


def test_transformers_loads_it(random_model, tmp_path):
    things = trained(random_model)
    folder = save_checkpoint(tmp_path, 1, **things)
    ids = torch.tensor([[5, 6, 7]])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(ids).logits, things["model"].eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(folder).decode([5, 6]) == things["tokenizer"].decode([5, 6])


def cut_short(folder):
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)


def flip_a_byte(folder):
    with open(folder / "trainer" / "optimizer.pt", "r+b") as file:
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
    "one byte": (flip_a_byte, "optimizer.pt"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "half a manifest": (lambda folder: (folder / "manifest.json").write_text('{"st'), "manifest.json"),
    "manifest is a pipe": (lambda folder: as_pipe(folder / "manifest.json"), "manifest.json"),
    "weights are a pipe": (lambda folder: as_pipe(folder / "model.safetensors"), "model.safetensors"),
    "missing file": (lambda folder: (folder / "config.json").unlink(), "config.json"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_broken_checkpoint_is_named_and_passed_over(random_model, tmp_path, how):
    things = trained(random_model)
    good = save_checkpoint(tmp_path, 1, **things)
    bad = save_checkpoint(tmp_path, 2, **things)
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
        save_checkpoint(tmp_path, step, **things, keep=2)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 9]
    assert (tmp_path / "checkpoint-best").exists()
    assert find_newest_valid(tmp_path)[0].name == "checkpoint-10"


def test_saving_again_replaces(random_model, tmp_path):
    save_checkpoint(tmp_path, 1, **trained(random_model), state={"num_tokens": 1})
    save_checkpoint(tmp_path, 1, **trained(random_model), state={"num_tokens": 2})
    assert read_state(find_newest_valid(tmp_path)[0])["num_tokens"] == 2


def test_a_save_killed_while_it_replaces_one_of_its_step_loses_neither(random_model, tmp_path):
    folder = save_checkpoint(tmp_path, 1, **trained(random_model))
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
    things["model"].generation_config = odd
    with pytest.raises(ValueError, match="temperature"):
        things["model"].save_pretrained(tmp_path / "refused")
    folder = save_checkpoint(tmp_path, 1, **things)
    assert json.loads((folder / "generation_config.json").read_text())["temperature"] == 0.3
    assert things["model"].generation_config is odd


def test_a_dry_run_of_a_save_leaves_nothing(random_model, tmp_path):
    dry_run_save(tmp_path, **trained(random_model))
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        dry_run_save(tmp_path / "file", **trained(random_model))


def test_a_pickle_in_a_checkpoint_is_not_run(random_model, tmp_path):
    class Poison:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "poisoned"),)

    things = trained(random_model)
    folder = save_checkpoint(tmp_path, 1, **things)
    torch.save({"optimizer": Poison(), "schedule": {}}, folder / "trainer" / "optimizer.pt")
    parts = {name: things[name] for name in ("model", "optimizer", "schedule")}
    with pytest.raises(pickle.UnpicklingError):
        restore(folder, **parts, device=torch.device("cpu"))
    assert not (tmp_path / "poisoned").exists()


def test_a_broken_later_checkpoint_does_not_push_out_what_is_saved(random_model, tmp_path):
    things = trained(random_model)
    for step in (1, 2):
        save_checkpoint(tmp_path, step, **things)
    later = save_checkpoint(tmp_path, 9, **things)
    cut_short(later)
    save_checkpoint(tmp_path, 3, **things, keep=1)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [9, 3]
    assert find_newest_valid(tmp_path)[0].name == "checkpoint-3"


def test_no_damage_to_a_manifest_is_another_error(random_model, tmp_path):
    folder = save_checkpoint(tmp_path, 1, **trained(random_model))
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
def test_a_full_disk_is_an_os_error(random_model, tmp_path, full_after):
    """safetensors and torch each have another word for it; all ranks must hear one. Stands in for it: a limit on file size."""
    things = trained(random_model)
    good = save_checkpoint(tmp_path, 1, **things)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full_after, hard))
    try:
        with pytest.raises(OSError):
            save_checkpoint(tmp_path, 2, **things)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert find_newest_valid(tmp_path) == (good, [])
    assert find_newest_valid(save_checkpoint(tmp_path, 2, **things).parent)[0].name == "checkpoint-2"
