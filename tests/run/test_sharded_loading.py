"""Folders of weights as divided models read and write them, in one process: no rank is needed for any of it."""

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import save_random_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import grpo.run.sharded.saver
from grpo.distributed import World, load_divided, names_of_divided, save_divided
from grpo.model import decoder_layers, model_without_weights
from grpo.run.sharded.saver import write_model
from grpo.run.sharded.weight_files import WeightFiles

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, CPU)


def empty(folder):
    return model_without_weights(
        str(folder), device=CPU, attn_implementation="sdpa", trust_remote_code=False, setting="model.name_or_path"
    )


def loaded(folder):
    model = empty(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    files = WeightFiles(str(folder), model, setting="model.name_or_path")
    files.fill(model.modules(), CPU, lambda parameter: torch.float32)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_read_by_the_tensor_is_the_model(tmp_path, tied, monkeypatch):
    """Also from several files in bf16, which :func:`write_model` and transformers write alike."""
    save_random_model(tmp_path / "fp32", tie_word_embeddings=tied)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    original.save_pretrained(tmp_path / "bf16", max_shard_size="20KB")
    found, expected = loaded(tmp_path / "bf16"), original.float()
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 1
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == tied
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in found.state_dict().items())
    ids = torch.arange(7)[None]
    assert torch.equal(found(input_ids=ids).logits, expected.eval()(input_ids=ids).logits)  # buffers too
    assert found.generation_config.eos_token_id == original.generation_config.eos_token_id

    monkeypatch.setattr(grpo.run.sharded.saver, "MAX_FILE_BYTES", 20_000)
    for model, folder in ((found, tmp_path / "ours"), (expected, tmp_path / "theirs")):
        folder.mkdir()
        assert model is expected or write_model(model, folder, ALONE) is None
    expected.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    names = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())["weight_map"]
    assert (
        names.keys()
        == json.loads((tmp_path / "theirs" / "model.safetensors.index.json").read_text())["weight_map"].keys()
    )
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert (tmp_path / "ours" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in expected.state_dict().items())


def test_files_that_do_not_fit_the_model_are_refused(tmp_path):
    """In one line that names what is wrong, and for files that only fsdp cannot read, what to do."""
    save_random_model(tmp_path)
    file, model = tmp_path / "model.safetensors", empty(tmp_path)
    weights = load_file(file)

    def message() -> str:
        with pytest.raises(ValueError, match=r"^model\.name_or_path=") as refused:
            WeightFiles(str(tmp_path), model, setting="model.name_or_path")
        assert "\n" not in str(refused.value)
        return str(refused.value)

    save_file({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, file)
    assert "lack 1 weights" in message() and "model.norm.weight" in message() and "save_pretrained" in message()
    save_file(weights | {"model.norm.weight": torch.ones(5)}, file)
    assert "model.norm.weight: [5], expected [32]" in message()
    file.write_bytes(file.read_bytes()[:100])
    assert "cannot be loaded" in message()
    file.unlink()
    assert "has no model.safetensors" in message() and "reads safetensors only" in message()


def test_the_layers_of_a_model_are_its_largest_list(random_model):
    model = empty(random_model)
    assert decoder_layers(model) == list(model.model.layers)


class Poison:
    def __reduce__(self):
        return print, ("this code must not run",)


def test_a_pickle_in_the_states_of_the_ranks_is_not_run(tmp_path, capsys):
    """Neither in the description of the files, nor as an entry that is no tensor."""
    save_divided({"a": torch.arange(3.0)}, tmp_path / "good", ALONE)
    found = {"a": torch.zeros(3)}
    load_divided(found, tmp_path / "good")
    assert torch.equal(found["a"], torch.arange(3.0)) and names_of_divided(tmp_path / "good") == {"a"}
    with pytest.raises(ValueError, match="good"):
        load_divided({"b": torch.zeros(3)}, tmp_path / "good")

    dcp.save({"a": Poison()}, checkpoint_id=tmp_path / "entry", no_dist=True)
    shutil.copytree(tmp_path / "good", tmp_path / "description")
    (tmp_path / "description" / ".metadata").write_bytes(pickle.dumps(Poison()))
    for folder in ("entry", "description"):
        with pytest.raises((pickle.UnpicklingError, ValueError), match="does not belong into a checkpoint"):
            load_divided({"a": torch.zeros(3)}, tmp_path / folder)
    assert "must not run" not in capsys.readouterr().out


def test_buffers_that_a_folder_holds_are_read(random_model, tmp_path):
    """Such as the biases by which some models choose experts."""
    model = empty(random_model)
    model.register_buffer("bias", torch.zeros(3))
    model.register_buffer("unsaved", torch.zeros(3), persistent=False)
    weights = load_file(random_model / "model.safetensors") | {"bias": torch.arange(3.0), "unsaved": torch.ones(3)}
    save_file(weights, tmp_path / "model.safetensors")
    WeightFiles(str(tmp_path), model, setting="model.name_or_path").fill_buffers(model)
    assert model.bias.tolist() == [0, 1, 2] and model.unsaved.tolist() == [0, 0, 0]
