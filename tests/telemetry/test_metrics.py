"""Metrics: weights of means, what is written, and wandb that may be away."""

import contextlib
import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios

import pytest
import torch
from conftest import ROOT, run_trainer, small_run

from grpo.distributed import World
from grpo.telemetry.console import console_line, evaluation_table
from grpo.telemetry.metrics import Accumulator, Reporter
from grpo.telemetry.samples import read_samples

ALONE = World(0, 1, 0, torch.device("cpu"))


def test_means_are_weighted_by_what_they_are_means_of():
    metrics = Accumulator()
    metrics.add("loss", 6.0, 3)
    metrics.add("loss", torch.tensor(1.0), torch.tensor(1))
    metrics.total("tokens", 5)
    metrics.total("tokens", 7)
    metrics.add("empty", 0.0, 0)
    metrics.add_values("reward", torch.tensor([1.0, float("nan"), 3.0]))
    for length in (4.0, 9.0, 2.0):
        metrics.maximum("longest", length)
        metrics.minimum("shortest", length)
    assert metrics.reduce(ALONE) == {
        "loss": 7 / 4, "tokens": 12, "empty": 0.0, "reward": 2.0, "longest": 9.0, "shortest": 2.0,
    }  # fmt: skip


def test_vectors_are_added_up_and_are_no_metrics():
    metrics = Accumulator()
    metrics.add("lengths", torch.tensor([1, 0, 2]), torch.tensor(3.0))
    metrics.add("lengths", torch.tensor([0, 0, 5]), torch.tensor(5.0))
    metrics.add("loss", 1.0, 4)
    assert metrics.reduce(ALONE) == {"loss": 0.25}
    assert metrics.histograms == {"lengths": [1, 0, 7]}


def test_numbers_of_the_device_and_of_the_host_go_together():
    metrics = Accumulator()
    metrics.add("grad_norm", torch.zeros((), device="meta"))
    metrics.add("grad_norm", 0.0, 0.0)


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


def offline_records(folder, start: int = -1):
    """The history of a run, read back from wandb's own datastore; of its last start, or of another."""
    from wandb.proto import wandb_internal_pb2

    file = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)[start]
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
    run_trainer(
        *small_run(random_model, tmp_path / "run"), "logging.wandb=offline", "optim.max_steps=3", "eval.every=2",
        "algorithm.num_iterations=2", ranks=2,
    )  # fmt: skip
    history, config, axes = offline_records(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [h["step"] for h in history] == [line["step"] for line in lines] == [0, 1, 2, 3]
    for logged, written in zip(history, lines, strict=True):
        for name, value in written.items():
            assert logged[name] == pytest.approx(value), name
    assert config["rollout"]["num_generations"] == 4
    assert config["environment"]["torch"] == torch.__version__
    assert len(config["environment"]["git_commit"]) == 40
    assert ("*", "step") in axes, "an axis of our own"

    point = history[2]  # histograms and tables that accumulate
    for name in ("reward", "advantage", "length"):
        assert sum(point[f"histograms/{name}/values"]) == 24, f"{name} of 6 problems x 4 completions"
    records = read_samples(tmp_path / "run" / "completions" / "step_000002.parquet")
    counts, edges = (point[f"histograms/ratio/{part}"] for part in ("values", "bins"))
    assert sum(counts) == pytest.approx(2 * 24 * lines[2]["completions/mean_length"]), (
        "each token of both ranks in each update"
    )
    mean = sum(n * (low + high) / 2 for n, low, high in zip(counts, edges, edges[1:], strict=False)) / sum(counts)
    assert mean == pytest.approx(lines[2]["ratio"], abs=0.01) and 0 < counts[50] < sum(counts), "not all of them are 1"
    assert point["completions/nrows"] == 8, "four of step 1, four of step 2"
    assert point["tables/evaluations/nrows"] == 2
    (media,) = (tmp_path / "run").glob("wandb/offline-run-*/files/" + point["completions/path"])
    table = json.loads(media.read_text())
    assert table["columns"] == [
        "step", "prompt", "completion", "reward", "advantage", "length", "finished", "rewards/share_of_digits",
    ]  # fmt: skip
    assert [row[0] for row in table["data"]] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert table["data"][6][2] == records[2]["completion"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_continued_run_keeps_its_wandb_id_and_sends_no_point_twice(tmp_path, random_model):
    arguments = [*small_run(random_model, tmp_path / "run"), "checkpoint.save_steps=2", "logging.log_completions=2"]
    # No key: online goes on offline, with the same id.
    away = {"WANDB_API_KEY": "", "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path), "NETRC": "/dev/null"}
    run_trainer(*arguments, "logging.wandb=online", "optim.max_steps=3", env=away)
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")  # as if it had been killed after its third point
    more = [*arguments, "optim.max_steps=4", "checkpoint.accept_changes=true"]
    run_trainer(*more, "logging.wandb=online", env=away)
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer" / "state.json").read_text())
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{state['wandb_run_id']}/*.wandb"))) == 2
    first, second = (offline_records(tmp_path / "run", start)[0] for start in (0, 1))
    assert [point["step"] for point in first + second] == [0, 1, 2, 3, 4]
    assert [point["_step"] for point in first + second] == [0, 1, 2, 3, 4], "wandb's own counter too"
    assert second[-1]["completions/nrows"] == 8, "two of each step, also of those before the interruption"
    assert second[-1]["tables/evaluations/nrows"] == 2
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2, 3, 4]


def test_hints_are_said_once_also_over_an_interruption(tmp_path, capsys):
    first = reporter(tmp_path)
    for step in range(1, 8):
        first.step({"step": step, "reward": 0.5, "kl": 2.0})
    first.close()
    assert capsys.readouterr().out.count("hint: the KL to the reference is 2.00 nats") == 1
    second = reporter(tmp_path, first_step=6)
    second.step({"step": 7, "reward": 0.5, "kl": 2.0})
    second.close()
    assert "hint" not in capsys.readouterr().out


def on_a_terminal(command) -> bytes:
    """What a command writes to a pseudo-terminal of 160 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    subprocess.run(command, stdout=slave, stderr=slave, cwd=ROOT, check=True)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # a pseudo-terminal's end
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    return shown


def test_a_terminal_gets_a_bar_with_the_numbers_that_matter(tmp_path):
    """A pseudo-terminal as stderr: a bar with reward, KL, length and speed; without one, plain lines alone."""
    script = (
        "from grpo.telemetry.metrics import Reporter; import sys\n"
        "r = Reporter(sys.argv[1], is_main=True, first_step=0, max_steps=2)\n"
        "r.step({'step': 1, 'reward': 0.5, 'kl': 0.25, 'completions/mean_length': 12.0, 'tokens_per_second': 300.0})\n"
        "r.step({'step': 2, 'reward': 0.75})\n"
        "r.close()"
    )
    command = [sys.executable, "-c", script]
    plain = subprocess.run([*command, str(tmp_path / "a")], capture_output=True, text=True, cwd=ROOT, check=True)
    assert plain.stderr == ""
    assert [line[:24] for line in plain.stdout.splitlines()] == ["step 1/2  reward 0.500  ", "step 2/2  reward 0.750"]
    shown = on_a_terminal([*command, str(tmp_path / "b")])
    assert b"reward=0.500, kl=0.2500, len=12, tok/s=300" in shown


def test_what_libraries_print_stands_on_lines_of_its_own_above_the_bar(tmp_path):
    script = (
        "import logging, sys, warnings\n"
        "logging.basicConfig(format='%(message)s')\n"  # holds the stream before there is a bar
        "from grpo.telemetry.metrics import Reporter\n"
        "r = Reporter(sys.argv[1], is_main=True, first_step=0, max_steps=2)\n"
        "warnings.warn('a warning')\n"
        "logging.getLogger('library').warning('logged')\n"
        "sys.stderr.write('half '); sys.stderr.write('and half\\n')\n"
        "r.step({'step': 1, 'reward': 0.5})\n"
        "sys.stderr.write('without an end')\n"
        "r.close(); print('after', file=sys.stderr); logging.error('later')"
    )
    shown = on_a_terminal([sys.executable, "-c", script, str(tmp_path)]).decode()
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1].strip() for line in shown.split("\n")]  # what is left to be seen
    expected = [
        "<string>:5: UserWarning: a warning",
        "logged",
        "half and half",
        "step 1/2  reward 0.500",
        "after",
        "later",
    ]
    assert [line for line in lines if line in expected] == expected, shown
    assert sum("steps:" in line for line in lines) == 1, "the bar once, at the end"
    assert "without an end" in lines


def test_another_rank_writes_over_the_bar_from_the_left(tmp_path):
    script = (
        "import sys; from grpo.telemetry.metrics import Reporter\n"
        "r = Reporter(sys.argv[1], is_main=False, first_step=0, max_steps=2)\n"
        "sys.stderr.write('a line of '); sys.stderr.write('rank 1\\n')\n"
        "r.close(); print('after', file=sys.stderr)"
    )
    shown = on_a_terminal([sys.executable, "-c", script, str(tmp_path)])
    assert shown == b"\r\x1b[Ja line of rank 1\r\nafter\r\n"


def test_points_go_to_the_console_every_n_steps_and_at_evaluations(tmp_path, capsys):
    writer = reporter(tmp_path, every=2, max_steps=5)
    writer.step({"step": 0, "eval/greedy_accuracy": 0.25, "eval/mean_length": 3.0})
    for step in range(1, 6):
        writer.step({"step": step, "reward": 1.0} | ({"eval/greedy_accuracy": 0.5} if step == 3 else {}))
    writer.close()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "eval 0/5  greedy accuracy 25.0%  mean length 3.00"
    assert [line[:8] for line in shown[1:]] == ["step 2/5", "step 3/5", "eval 3/5", "step 4/5", "step 5/5"]
