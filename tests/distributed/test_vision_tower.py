"""A model that also reads images is trained on text: the same weights on one rank and on two, and
when continued."""

import shutil
from pathlib import Path

import pytest
import torch
from architectures import READS_IMAGES, build
from conftest import run_trainer, small_run
from outputs import lines
from safetensors.torch import load_file
from transformers import GenerationConfig

from grpo.data.tiny import build_tokenizer

pytestmark = pytest.mark.slow
KINDS = {
    "whole, with a reference": ["algorithm.beta=0.05"],
    "adapter, with a reference that moves": [
        "lora.rank=4",
        "algorithm.beta=0.05",
        "algorithm.ref_sync_steps=1",
    ],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    kind, settings = READS_IMAGES
    tokenizer = build_tokenizer()
    ends = dict(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    text = settings["text_config"] | ends | dict(vocab_size=len(tokenizer), initializer_range=0.3)
    model = build(kind, settings | dict(text_config=text))
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: Path, output: Path, *settings: str, ranks: int) -> str:
    options = ["data.eval_split=none", "optim.max_steps=2", "checkpoint.save_steps=1", *settings]
    return run_trainer(*small_run(model, output), *options, ranks=ranks).stdout


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    (file,) = checkpoint.glob("*model.safetensors")
    return load_file(file)


def assert_close(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys() and any("vision_tower" in name for name in first)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=0, atol=1e-5)


def assert_vision_tower_stays(run: Path, model: Path) -> None:
    """Text does not reach it: its weights are those of before, and an adapter's second factor stays
    0; others move."""
    before, moved = weights(model), set()
    for name, tensor in weights(run / "checkpoint-2").items():
        if "lora_A" not in name:
            start = torch.zeros_like(tensor) if "lora_B" in name else before[name]
            moved.add(("vision_tower" in name, torch.equal(tensor, start)))
    assert (True, True) in moved and (True, False) not in moved and (False, False) in moved


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_continued_runs_train_the_same_weights(kind, model, tmp_path):
    alone, ranks, sharded = tmp_path / "alone", tmp_path / "ranks", tmp_path / "sharded"
    train(model, alone, *KINDS[kind], ranks=1)
    assert_vision_tower_stays(alone, model)
    train(model, ranks, *KINDS[kind], ranks=2)
    train(model, sharded, *KINDS[kind], "runtime.parallel=fsdp", ranks=2)
    for run in (ranks, sharded):
        assert_close(alone / "checkpoint-2", run / "checkpoint-2")
        assert [row.get("reward") for row in lines(run)] == [
            row.get("reward") for row in lines(alone)
        ]
        expected = weights(run / "checkpoint-2")
        shutil.rmtree(run / "checkpoint-2")
        options = ["runtime.parallel=fsdp"] if run == sharded else []
        train(model, run, *KINDS[kind], *options, ranks=2)
        for name, tensor in weights(run / "checkpoint-2").items():
            assert torch.equal(tensor, expected[name]), name
