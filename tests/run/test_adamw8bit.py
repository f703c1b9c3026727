"""AdamW with averages of 8 bits: torchao, which is no part of the extra ``dev``."""

import shutil

import pytest
import torch
from conftest import run_trainer, save_random_model, small_run
from outputs import lines
from safetensors.torch import load_file

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[adamw8bit]'")
pytestmark = pytest.mark.slow

EIGHT = "optim.name=adamw8bit"
SETTINGS = [
    "optim.max_steps=3",
    "checkpoint.save_steps=1",
    "checkpoint.keep=9",
    "data.max_eval_samples=4",
    "eval.before_training=false",
]


def train(model, output, *more):
    run_trainer(*small_run(model, output), *SETTINGS, *more, ranks=2)
    return output


def weights(run):
    (file,) = (run / "checkpoint-3").glob("*.safetensors")
    return load_file(file)


def distance(run, other) -> float:
    """The largest difference of two weights."""
    first = weights(run)
    second = weights(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_it_trains_nearly_as_adamw_does_and_continues_with_the_same_bits(tmp_path):
    """Under DDP and FSDP, whose blocks of 256 values are others, and with LoRA.

    Rows of an embedding almost without a gradient would move 10 to 20 times the learning rate of
    1e-3, if their averages had 8 bits.
    """
    sizes = dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4
    )
    model = save_random_model(tmp_path / "model", **sizes)
    plain = train(model, tmp_path / "plain")
    ddp = train(model, tmp_path / "ddp", EIGHT)
    fsdp = train(model, tmp_path / "fsdp", EIGHT, "runtime.parallel=fsdp")
    assert 0 < distance(plain, ddp) < 3e-3
    assert distance(ddp, fsdp) < 3e-3

    with_lora = [EIGHT, "lora.rank=8", "runtime.parallel=fsdp"]
    lora = train(model, tmp_path / "lora", *with_lora)
    for whole, settings in ((ddp, [EIGHT]), (lora, with_lora)):
        again = tmp_path / f"{whole.name} again"
        shutil.copytree(whole, again)
        for step in (2, 3):
            shutil.rmtree(again / f"checkpoint-{step}")
        train(model, again, *settings)
        expected = weights(whole)
        for name, tensor in weights(again).items():
            assert torch.equal(tensor, expected[name])
        assert lines(whole) == lines(again)
