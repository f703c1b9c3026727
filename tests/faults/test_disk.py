"""Disks that fill up, folders that go away, checkpoints that are damaged: a named error, and what was saved before stands."""

import json
import os
import resource
import shutil

import pytest
from harness import Started, assert_same_run, bits, run, tiny
from outputs import lines

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
    """Files can grow to so many bytes and no further, as on a full disk (the kernel refuses the write)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_found_before_the_first_step(capsys, tmp_path, random_model, full_after):
    full_after(100_000)
    assert inside(tmp_path / "run", random_model) == 2
    captured = capsys.readouterr()
    assert f"error: checkpoint at step 0 could not be saved in {tmp_path}/run" in captured.err
    assert "step 1/" not in captured.out
    assert not list((tmp_path / "run").glob("*checkpoint*")) and not (tmp_path / "run" / ".rehearsal").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_full_during_a_save(tmp_path, random_model, straight, ranks):
    """The disk fills in the third step: the checkpoints before stand; with room again the same command goes on."""
    output = tmp_path / "run"
    arguments = tiny(random_model, output, "checkpoint.save_steps=1")
    started = Started(output, arguments, ranks=ranks, fault="rank=0 step=2 place=write do=full")
    assert started.end() == 1
    printed = started.text()
    assert f"error: [rank 0] in phase 'save': checkpoint at step 3 could not be saved in {output}: " in printed
    assert printed.count("\nerror: ") == 1 and "Traceback" not in printed
    assert find_newest_valid(output)[0] == output / "checkpoint-2"
    run(output, arguments, ranks=ranks)
    if ranks == 1:
        assert_same_run(straight, output, STEPS)


@pytest.mark.slow
def test_disk_full_in_the_metrics_file(tmp_path, random_model, straight):
    """The line of step 3 does not fit: its state is saved (there is room for that), and the line is written later."""
    output = tmp_path / "run"
    arguments = tiny(random_model, output, "checkpoint.save_steps=2")
    started = Started(output, arguments, fault="step=2 place=line do=full")
    assert started.end() == 1
    assert "OSError: [Errno 27] File too large" in started.text() and "in phase 'after eval'" in started.text()
    assert "note: saved checkpoint-3" in started.text()
    run(output, arguments)
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
def test_the_folder_vanishes(tmp_path, random_model, straight):
    output = tmp_path / "run"
    started = Started(output, tiny(random_model, output), fault=f"step=2 place=rollout do=sleep:2 once={tmp_path}/once")
    started.wait_for("FAULT")
    shutil.rmtree(output)
    assert started.end() == 1
    assert "FileNotFoundError: " in started.text() and f"{output}/completions" in started.text()
    assert "note: saved checkpoint-3" in started.text(), "in a new folder of that name"
    run(output, tiny(random_model, output))
    assert bits(output, STEPS) == bits(straight, STEPS)
    assert lines(output) == lines(straight)[3:], "the metrics of the first steps went with the folder"


@pytest.mark.skipif(os.geteuid() == 0, reason="for root nothing is read-only")
def test_a_read_only_folder_is_refused_at_start(capsys, tmp_path, random_model):
    (tmp_path / "run").mkdir(mode=0o555)
    assert inside(tmp_path / "run", random_model) == 2
    assert "cannot be written: no permission" in capsys.readouterr().err


def cut(folder):
    os.truncate(folder / "model.safetensors", 1000)


def flip(folder):
    share = folder / "trainer" / "states" / "__0_0.distcp"
    data = bytearray(share.read_bytes())
    data[3000] ^= 4
    share.write_bytes(data)


def lose_manifest(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [flip, *(pytest.param(d, marks=pytest.mark.slow) for d in (cut, lose_manifest))])
def test_a_damaged_newest_checkpoint_costs_its_steps_only(capsys, tmp_path, random_model, straight, damage):
    output = tmp_path / "run"
    saves = ["checkpoint.save_steps=1", "checkpoint.keep=3"]
    assert inside(output, random_model, *saves) == 0
    shutil.rmtree(output / f"checkpoint-{STEPS}")
    damage(output / "checkpoint-5")
    capsys.readouterr()
    assert inside(output, random_model, *saves) == 0
    printed = capsys.readouterr().out
    assert (
        f"warning: skipping {output}/checkpoint-5: " in printed
        and f"resuming  {output}/checkpoint-4 at step 4" in printed
    )
    assert_same_run(straight, output, STEPS)
    assert (output / "previous-1" / "checkpoint-5").exists()


def without_last(straight, output):
    """A copy of the finished run, as it was one step before."""
    shutil.copytree(straight, output)
    os.rename(output / f"checkpoint-{STEPS}", output.parent / "away")
    return output


@pytest.mark.slow
def test_what_a_power_cut_leaves_in_other_files_stops_nothing(tmp_path, random_model):
    """Lines that are no text or no JSON; completions that are no parquet."""
    saves = ["checkpoint.save_steps=1", "checkpoint.keep=9"]
    assert inside(tmp_path / "whole", random_model, *saves) == 0
    output = without_last(tmp_path / "whole", tmp_path / "run")
    with open(output / "metrics.jsonl", "ab") as file:
        file.write(b"\xff\xfe{\n" + b"not json\n" + b"\0" * 50)
    os.truncate(output / "completions" / "step_000001.parquet", 50)
    assert inside(output, random_model, *saves, "logging.wandb=offline") == 0
    assert lines(output) == lines(tmp_path / "whole")
    assert bits(output, STEPS) == bits(tmp_path / "whole", STEPS)


def test_a_finished_run_is_cleaned_too(capsys, tmp_path, random_model, straight):
    shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "run" / ".partial-checkpoint-9").mkdir()
    (tmp_path / "run" / ".rehearsal" / ".partial-checkpoint-0").mkdir(parents=True)
    assert inside(tmp_path / "run", random_model) == 0
    assert "already complete" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")] == [".lock"]


@pytest.mark.slow
def test_best_by_an_evaluation_is_kept(capsys, tmp_path, random_model):
    """Evaluated every step; whatever comes later, the best one's folder stays, also over a restart."""
    options = [
        "eval.every=1",
        "checkpoint.keep_best=eval/mean_length",
        "checkpoint.keep=1",
        "eval.before_training=false",
    ]
    for steps in (4, STEPS):
        arguments = tiny(
            random_model,
            tmp_path / "run",
            *options,
            "checkpoint.accept_changes=true",
            "optim.lr_scheduler_type=constant",
        )
        assert main([*arguments, f"optim.max_steps={steps}", "runtime.threads_per_rank=1"]) == 0
    values = {line["step"]: line["eval/mean_length"] for line in lines(tmp_path / "run")}
    best = max(values, key=lambda step: (values[step], -step))
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {
        f"checkpoint-{best}",
        f"checkpoint-{STEPS}",
    }
    state = json.loads((tmp_path / "run" / f"checkpoint-{STEPS}" / "trainer" / "state.json").read_text())
    assert state["best"] == {"step": best, "value": values[best]}
    capsys.readouterr()
    assert (
        main(
            [*tiny(random_model, tmp_path / "other"), "data.dataset=builtin:arithmetic", "checkpoint.keep_best=reward"]
        )
        == 2
    )
    assert "checkpoint.keep_best='reward'" in capsys.readouterr().err
    assert main([*tiny(random_model, tmp_path / "other"), "checkpoint.keep_best=eval/pass@8"]) == 2
    assert "checkpoint.keep_best=eval/pass@8 is none of eval/greedy_accuracy, eval/format" in capsys.readouterr().err


@pytest.mark.slow
def test_other_data_of_the_same_name_is_refused(capsys, tmp_path, random_model):
    path = tmp_path / "d.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(24)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = [f"data.dataset={path}", "data.answer_column=answer", "checkpoint.save_steps=1"]
    assert inside(tmp_path / "run", random_model, *data, "optim.max_steps=2", "optim.warmup_steps=0") == 0
    rows[7]["answer"] = "9"
    path.write_text("\n".join(map(json.dumps, rows)))
    capsys.readouterr()
    changed = [*data, "optim.max_steps=4", "optim.warmup_steps=0", "runtime.precision=bf16"]
    assert inside(tmp_path / "run", random_model, *changed) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "optim.max_steps: checkpoint 2, now 4" in error
    assert "runtime.precision: checkpoint 'fp32', now 'bf16'" in error
    old, new = error.split("data_fingerprint: checkpoint '")[1].split("'; ")[0].split("', now '")
    assert len(old) == len(new) == 64 and old != new
    assert inside(tmp_path / "run", random_model, *changed, "checkpoint.accept_changes=true") == 0
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer" / "state.json").read_text())
    assert state["data_fingerprint"] == new
    machine = state["bits_depend_on"]
    assert machine.keys() == {"world_size", "runtime.threads_per_rank", "python", "torch", "transformers"}
    assert (machine["world_size"], machine["runtime.threads_per_rank"]) == (1, 1)
