"""A checkpoint or a model folder from an attacker runs no code."""

import contextlib
import json
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, environment_of_runs, run_forked
from harness import mend_manifest, tiny

from train_grpo import main


class Poison:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def start(model, output, *more: str) -> int:
    return main([*tiny(model, output, *more), "runtime.threads_per_rank=1"])


def poison_description(states, thing) -> None:
    (states / ".metadata").write_bytes(pickle.dumps(thing))


def poison_entry(states, thing) -> None:
    """As ``torch.distributed.checkpoint`` writes what is no tensor: the description of the files is
    sound."""
    shutil.rmtree(states)
    dcp.save({"optimizer/model.norm.weight/step": thing}, checkpoint_id=states, no_dist=True)


def poison_tensors(states, thing) -> None:
    torch.save(thing, states / "__0_0.distcp")


@pytest.mark.parametrize("poison", [poison_description, poison_entry, poison_tensors])
def test_a_poisoned_pickle_in_a_checkpoint_runs_no_code(capsys, tmp_path, random_model, poison):
    """The attacker makes a manifest that is right."""
    output = tmp_path / "run"
    options = ["algorithm.ref_sync_steps=2", "optim.warmup_steps=0"]
    assert start(random_model, output, *options, "optim.max_steps=2") == 0
    poisoned = output / "checkpoint-2"
    poison(poisoned / "trainer" / "states", Poison(tmp_path / "poisoned"))
    mend_manifest(poisoned)
    with contextlib.suppress(BaseException):  # torch's own errors of many types
        assert (
            start(
                random_model,
                output,
                *options,
                "optim.max_steps=3",
                "checkpoint.accept_changes=true",
            )
            != 0
        )
    assert not (tmp_path / "poisoned").exists()


def test_a_poisoned_pickle_in_place_of_weights(capsys, tmp_path, random_model):
    model = tmp_path / "model"
    shutil.copytree(random_model, model)
    (model / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Poison(tmp_path / "poisoned")}, model / "pytorch_model.bin")
    assert start(model, tmp_path / "run") == 2
    assert f"error: {model} cannot be loaded" in capsys.readouterr().err
    assert not (tmp_path / "poisoned").exists()


def test_code_beside_a_model_is_not_run_unless_asked(tmp_path, random_model):
    """In a process of its own: transformers may ask on standard input whether to run it."""
    model = tmp_path / "model"
    shutil.copytree(random_model, model)
    (model / "evil.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'poisoned')!r})\nclass Evil: pass\n"
    )
    config = json.loads((model / "config.json").read_text())
    config |= {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
    }
    (model / "config.json").write_text(json.dumps(config))
    arguments = tiny(model, tmp_path / "run")
    env = environment_of_runs()
    done = run_forked(ROOT / "train_grpo.py", arguments, timeout=120, env=env, stdin="y\n")
    assert done.returncode == 2
    assert f"error: {model} cannot be loaded: The repository" in done.stderr
    assert not (tmp_path / "poisoned").exists()
