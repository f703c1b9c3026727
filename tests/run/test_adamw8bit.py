"""AdamW with averages of 8 bits (torchao, which is no part of the extra ``dev``): trains, continues, and is counted."""

import shutil

import pytest
import torch
from conftest import ROOT, environment_of_runs, run_forked, save_random_model, small_run
from outputs import lines
from safetensors.torch import load_file

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[adamw8bit]'")
pytestmark = pytest.mark.slow
OPTIONS = ["optim.max_steps=3", "checkpoint.save_steps=1", "checkpoint.keep=9", "runtime.threads_per_rank=1"]
OPTIONS += ["data.max_eval_samples=4", "eval.before_training=false", "optim.learning_rate=1e-3"]


def train(model, output, *more, ranks=2):
    arguments = [*small_run(model, output), *OPTIONS, *more]
    done = run_forked(ROOT / "train_grpo.py", arguments, ranks=ranks, timeout=600, env=environment_of_runs())
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return output


def weights(run):
    (file,) = (run / "checkpoint-3").glob("*.safetensors")
    return load_file(file)


def difference(one, other) -> float:
    first, second = weights(one), weights(other)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_it_trains_as_adamw_nearly_does_and_continues_with_the_same_bits(tmp_path):
    """Under DDP and FSDP, whose blocks of 256 values are others, and with LoRA.

    An embedding's row without a gradient would move 20 times the learning rate, if its averages had 8 bits.
    """
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4)
    model, eight = save_random_model(tmp_path / "model", **sizes), "optim.name=adamw8bit"
    plain = train(model, tmp_path / "plain")
    ddp, fsdp = train(model, tmp_path / "ddp", eight), train(model, tmp_path / "fsdp", eight, "runtime.parallel=fsdp")
    assert 0 < difference(plain, ddp) < 3e-3 and difference(ddp, fsdp) < 3e-3
    lora = train(model, tmp_path / "lora", eight, "lora.rank=8", "runtime.parallel=fsdp")
    for whole, *options in ((ddp, eight), (lora, eight, "lora.rank=8", "runtime.parallel=fsdp")):
        again = tmp_path / f"{whole.name} again"
        shutil.copytree(whole, again)
        for step in (2, 3):
            shutil.rmtree(again / f"checkpoint-{step}")
        train(model, again, *options)
        first, second = weights(whole), weights(again)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert lines(whole) == lines(again)
