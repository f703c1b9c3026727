"""Metrics: weights of means, what is written, and wandb that may be away."""

import json

import pytest
import torch
from conftest import run_trainer, small_run

from grpo.distributed import World
from grpo.metrics import Accumulator, Reporter, console_line, evaluation_table

ALONE = World(0, 1, 0, torch.device("cpu"))


def test_means_are_weighted_by_what_they_are_means_of():
    metrics = Accumulator()
    metrics.add("loss", 6.0, 3)
    metrics.add("loss", torch.tensor(1.0), torch.tensor(1))
    metrics.add("tokens", 5, 0)
    metrics.add("tokens", 7, 0)
    metrics.add("empty", 0.0, 0)
    metrics.add_values("reward", torch.tensor([1.0, float("nan"), 3.0]))
    for length in (4.0, 9.0, 2.0):
        metrics.maximum("longest", length)
        metrics.minimum("shortest", length)
    assert metrics.reduce(ALONE, minima=("shortest",), totals=("tokens",)) == {
        "loss": 7 / 4, "tokens": 12, "empty": 0.0, "reward": 2.0, "longest": 9.0, "shortest": 2.0,
    }  # fmt: skip


def reporter(folder, **changes):
    return Reporter(folder, **{"is_main": True, "first_step": 0, "max_steps": 9, "every": 100} | changes)


def test_jsonl_forgets_what_a_resumed_run_does_again(tmp_path):
    first = reporter(tmp_path)
    for step in range(6):
        first.step({"step": step, "reward": step / 2, "loss": float("nan")})
    first.close()
    path = tmp_path / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[2] == {"step": 2, "reward": 1.0, "loss": None}, "JSON has no NaN"
    with open(path, "a") as file:
        file.write('{"step": 6, "rew')  # killed while writing
    second = reporter(tmp_path, first_step=3)
    second.step({"step": 4, "reward": 9.0})
    second.close()
    assert [(x["step"], x["reward"]) for x in map(json.loads, path.read_text().splitlines())] == [
        (0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0),
    ]  # fmt: skip
    reporter(tmp_path, first_step=0).close()
    assert path.read_text() == ""


def test_other_ranks_write_nothing(tmp_path):
    silent = reporter(tmp_path / "run", is_main=False)
    silent.step({"step": 1})
    silent.completions(1, [{"a": 1}])
    silent.close()
    assert not (tmp_path / "run").exists()


def test_the_console_line_begins_with_the_reward():
    line = console_line({"step": 3, "reward": 0.5, "rewards/format/mean": 0.25, "loss": 0.0, "kl": 0.01}, 120)
    assert line == "step   3/120  reward 0.500  format 0.250  kl 0.0100"


def test_evaluation_table():
    table = evaluation_table(
        {"eval/mean@8": 0.5, "step": 0}, {"eval/mean@8": 0.75, "eval/mean_length": 20.0, "loss": 1.0}
    )
    lines = [line.split() for line in table.splitlines()]
    assert lines == [["before", "after"], ["mean@8", "50.0%", "75.0%"], ["mean", "length", "-", "20.00"]]


def log_records(data: bytes):
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB; CRC, length, type before each part)."""
    place, parts = 7, []  # a header of seven bytes
    while place < len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts.append(data[place + 7 : place + 7 + length])
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def offline_records(folder):
    """The history of a run, read back from wandb's own datastore."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    history, config, axes = [], {}, set()
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            item = record.history.item
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in item})
        elif kind == "run":
            config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        elif kind == "metric":
            axes.add((record.metric.glob_name or record.metric.name, record.metric.step_metric))
    return history, config, axes


def test_a_real_offline_wandb_run_holds_what_the_jsonl_holds(tmp_path, random_model):
    run_trainer(*small_run(random_model, tmp_path / "run"), "logging.wandb=offline", "optim.max_steps=3")
    history, config, axes = offline_records(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [h["step"] for h in history] == [line["step"] for line in lines] == [0, 1, 2, 3]
    for logged, written in zip(history, lines, strict=True):
        for name, value in written.items():
            assert logged[name] == pytest.approx(value), name
    assert config["rollout"]["num_generations"] == 4
    assert ("*", "step") in axes, "an axis of our own"


def test_no_server_and_no_key_do_not_stop_a_run(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "logging.wandb=online",
        "optim.max_steps=2",
        timeout=150,
        env={"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "x" * 40},
    )
    assert "warning: wandb online failed" in done.stdout
    assert "going on offline" in done.stdout
    assert "step 2/2" in done.stdout
    history, _, _ = offline_records(tmp_path / "run")
    assert [h["step"] for h in history] == [0, 1, 2], "to be sent with `wandb sync` later"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def test_no_wandb_at_all_does_not_stop_a_run(tmp_path, random_model):
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb here')")
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "logging.wandb=offline",
        "optim.max_steps=1",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "warning: no wandb (no wandb here)" in done.stdout


def test_a_run_that_is_continued_keeps_its_wandb_id(tmp_path, random_model):
    ids = []
    for steps in (1, 2):
        # No key: online goes on offline, with the same id.
        run_trainer(
            *small_run(random_model, tmp_path / "run"),
            "logging.wandb=online",
            f"optim.max_steps={steps}",
            "checkpoint.accept_changes=true",
            env={
                "WANDB_API_KEY": "",
                "WANDB_BASE_URL": "http://127.0.0.1:9",
                "HOME": str(tmp_path),
                "NETRC": "/dev/null",
            },
        )
        state = json.loads((tmp_path / "run" / f"checkpoint-{steps}" / "trainer" / "state.json").read_text())
        ids.append(state["wandb_run_id"])
    assert ids[0] == ids[1]
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{ids[0]}/*.wandb"))) == 2


def test_points_go_to_the_console_every_n_steps_and_at_evaluations(tmp_path, capsys):
    writer = reporter(tmp_path, every=2, max_steps=5)
    writer.step({"step": 0, "eval/greedy_accuracy": 0.25, "eval/mean_length": 3.0})
    for step in range(1, 6):
        writer.step({"step": step, "reward": 1.0} | ({"eval/greedy_accuracy": 0.5} if step == 3 else {}))
    writer.close()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "eval 0/5  greedy accuracy 25.0%  mean length 3.00"
    assert [line[:8] for line in shown[1:]] == ["step 2/5", "step 3/5", "eval 3/5", "step 4/5", "step 5/5"]
