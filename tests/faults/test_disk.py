"""Disks that fill up, folders that go away, checkpoints that are damaged: what was saved before
stands."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from harness import Started, assert_same_run, bits, run, tiny
from outputs import lines
from safetensors import SafetensorError

from grpo.checkpoint.format import find_newest_valid
from train_grpo import main

STEPS = 6


def inside(output, model, *more: str) -> int:
    """A run on one rank in this process."""
    return main([*tiny(model, output, *more), "runtime.threads_per_rank=1"])


@pytest.fixture(scope="module")
def straight(tmp_path_factory, random_model):
    output = tmp_path_factory.mktemp("straight") / "run"
    assert inside(output, random_model) == 0
    return output


@pytest.fixture
def full_after():
    """Files can grow to so many bytes and no further, as on a full disk (the kernel refuses the
    write)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_found_before_the_first_step(capsys, tmp_path, random_model, full_after):
    full_after(100_000)
    with pytest.raises(SafetensorError, match="File too large"):
        inside(tmp_path / "run", random_model)
    assert "step 1/" not in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("*checkpoint*"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_full_during_a_save(tmp_path, random_model, straight, ranks):
    """The disk fills in the third step: the checkpoints before stand; with room again the same
    command goes on."""
    output = tmp_path / "run"
    arguments = tiny(random_model, output, "checkpoint.save_steps=1")
    started = Started(output, arguments, ranks=ranks, fault="rank=0 step=2 place=write do=full")
    assert started.end() == 1
    printed = started.text()
    assert "error: [rank 0] in phase 'save': SafetensorError: " in printed
    assert "File too large" in printed
    assert printed.count("\nerror: ") == 1
    assert find_newest_valid(output).name == "checkpoint-2"
    run(output, arguments, ranks=ranks)
    if ranks == 1:
        assert_same_run(straight, output, STEPS)


@pytest.mark.slow
def test_disk_full_in_the_metrics_file(tmp_path, random_model, straight):
    """The line of step 3 does not fit: its state is saved (there is room for that), and the line is
    written later."""
    output = tmp_path / "run"
    arguments = tiny(random_model, output, "checkpoint.save_steps=2")
    started = Started(output, arguments, fault="step=2 place=line do=full")
    assert started.end() == 1
    assert "OSError: [Errno 27] File too large" in started.text()
    assert "in phase 'after update'" in started.text()
    assert "note: saved checkpoint-3" in started.text()
    run(output, arguments)
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
def test_the_folder_vanishes(tmp_path, random_model, straight):
    output = tmp_path / "run"
    started = Started(
        output,
        tiny(random_model, output),
        fault=f"step=2 place=rollout do=sleep:2 once={tmp_path}/once",
    )
    started.wait_for("FAULT")
    shutil.rmtree(output)
    assert started.end() == 1
    assert "FileNotFoundError: " in started.text()
    assert f"{output}/completions" in started.text()
    assert "note: saved checkpoint-3" in started.text(), "in a new folder of that name"
    run(output, tiny(random_model, output))
    assert bits(output, STEPS) == bits(straight, STEPS)
    assert lines(output) == lines(straight)[3:], (
        "the metrics of the first steps went with the folder"
    )


@pytest.mark.parametrize("how", ["flipped", pytest.param("cut", marks=pytest.mark.slow)])
def test_a_damaged_newest_checkpoint_costs_its_steps_only(
    capsys, tmp_path, random_model, straight, how
):
    output = tmp_path / "run"
    saves = ["checkpoint.save_steps=1", "checkpoint.keep=3"]
    assert inside(output, random_model, *saves) == 0
    shutil.rmtree(output / f"checkpoint-{STEPS}")
    states_file = output / "checkpoint-5" / "trainer" / "states" / "__0_0.distcp"
    data = bytearray(states_file.read_bytes())
    data[3000] ^= 4
    states_file.write_bytes(data if how == "flipped" else data[:1000])
    capsys.readouterr()
    assert inside(output, random_model, *saves) == 0
    printed = capsys.readouterr().out
    assert f"warning: skipping {output}/checkpoint-5: " in printed
    assert f"resuming  {output}/checkpoint-4 at step 4" in printed
    assert_same_run(straight, output, STEPS)
    assert (output / "previous-1" / "checkpoint-5").exists()


@pytest.mark.slow
def test_what_a_power_cut_leaves_in_other_files_stops_nothing(tmp_path, random_model):
    """Lines that are no text, no JSON, no step; completions that are no parquet, which wandb's
    table would have."""
    saves = ["checkpoint.save_steps=1", "checkpoint.keep=9"]
    assert inside(tmp_path / "whole", random_model, *saves) == 0
    output = Path(shutil.copytree(tmp_path / "whole", tmp_path / "run"))
    shutil.rmtree(output / f"checkpoint-{STEPS}")
    with open(output / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\xfe{\n" + b"not json\n" + b"\0" * 50)
    os.truncate(output / "completions" / "step_000001.parquet", 50)
    assert inside(output, random_model, *saves, "logging.wandb=offline") == 0
    assert lines(output) == lines(tmp_path / "whole")
    assert bits(output, STEPS) == bits(tmp_path / "whole", STEPS)


@pytest.mark.slow
def test_best_by_an_evaluation_is_kept(tmp_path, random_model):
    """Evaluated every step; whatever comes later, the best one's folder stays, also over a
    restart."""
    output = tmp_path / "run"
    options = ["eval.every=1", "checkpoint.keep_best=eval/mean_length", "checkpoint.keep=1"]
    options += [
        "eval.before_training=false",
        "checkpoint.accept_changes=true",
        "optim.lr_scheduler_type=constant",
    ]
    for steps in (4, STEPS):
        assert inside(output, random_model, *options, f"optim.max_steps={steps}") == 0
    values = {line["step"]: line["eval/mean_length"] for line in lines(output)}
    best = max(values, key=lambda step: (values[step], -step))
    assert {path.name for path in output.glob("checkpoint-*")} == {
        f"checkpoint-{best}",
        f"checkpoint-{STEPS}",
    }
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer" / "state.json").read_text())
    assert state["best"] == {"step": best, "value": values[best]}
