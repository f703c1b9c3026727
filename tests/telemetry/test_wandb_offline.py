"""wandb in whole runs without a server: what the offline files hold, also over an interruption, and a missing package.

The first test reads TensorBoard's event files of the same run too.
"""

import json
import shlex
import shutil

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from test_tensorboard import event_files
from wandb_files import wandb_records

from grpo.telemetry.samples import read_samples

COMMAND = "wandb     offline; send this run with: wandb sync "


def raw_records(folder, start: int):
    """All that one start of a run left in wandb's own file."""
    return wandb_records(
        sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)[start]
    )


def offline_records(folder, start: int = -1):
    """The history, configuration and axes that one start of a run (the last one, unless told) left in wandb's own file."""
    history, config, axes = [], {}, set()
    for record in raw_records(folder, start):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            item = record.history.item
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in item})
        elif kind == "run":
            config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
        elif kind == "metric":
            axes.add((record.metric.glob_name or record.metric.name, record.metric.step_metric))
    return history, config, axes


def offline_summary(folder, start: int = -1):
    """The run as wandb shows it in its list: the summary that was set explicitly, and its name, group and tags."""
    summary, about = {}, {}
    for record in raw_records(folder, start):
        kind = record.WhichOneof("record_type")
        if kind == "summary":
            summary |= {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.summary.update}
        elif kind == "run":
            about = {"name": record.run.display_name, "group": record.run.run_group, "tags": list(record.run.tags)}
    return summary, about


@pytest.mark.slow
def test_an_offline_run_has_the_same_metrics_as_the_jsonl_file(tmp_path, random_model):
    rewards = f"{ROOT}/tests/rewards_for_tests.py"
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"), "logging.wandb=offline", "optim.max_steps=3", "eval.every=2", "logging.tensorboard=true",
        f"reward.functions=[{{name: '{rewards}:share_of_digits', args: {{api_key: sk-of-the-test}}}}, '{rewards}:notes']",
        "algorithm.num_iterations=2", ranks=2,
    )  # fmt: skip
    with_the_key = [p for p in (tmp_path / "run").rglob("*") if p.is_file() and b"sk-of-the-test" in p.read_bytes()]
    assert not with_the_key and "api_key: '***'" in (tmp_path / "run" / "config.yaml").read_text()
    history, config, axes = offline_records(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [h["step"] for h in history] == [line["step"] for line in lines] == [0, 1, 2, 3]
    for logged, written in zip(history, lines, strict=True):
        for name, value in written.items():
            assert logged[name] == pytest.approx(value), name
    summary, about = offline_summary(tmp_path / "run")
    assert summary["best/reward"] == max(line["reward"] for line in lines[1:])
    assert summary["best/eval/truncated"] == min(line["eval/truncated"] for line in lines if "eval/truncated" in line)
    assert "best/eval/mean_length" not in summary and "best/loss" not in summary
    assert about == {"name": "run", "group": "", "tags": []}
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert done.stdout.count(f"{COMMAND}{folder}\n") == 2, "at the start and at the end"
    assert f"\ndashboard tensorboard --logdir {tmp_path / 'run' / 'tensorboard'}\n" in done.stdout
    shown = event_files(tmp_path / "run")
    for name in dict.fromkeys(name for line in lines for name in line if name != "step"):
        points = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert [(event.step, event.value) for event in shown.Scalars(name)] == points, name
    for name, number in (
        ("reward", 24),
        ("advantage", 24),
        ("length", 24),
        ("ratio", sum(history[2]["histograms/ratio/values"])),
    ):
        assert shown.Histograms(f"histograms/{name}")[1].histogram_value.num == number
    first, *_, last = shown.Tensors("completions/text_summary")
    assert (first.step, last.step) == (1, 3)
    text = last.tensor_proto.string_val[0].decode()
    assert text.count("**reward ") == 4 and "characters" not in text

    assert config["rollout"]["num_generations"] == 4
    assert config["environment"]["torch"] == torch.__version__
    assert len(config["environment"]["git_commit"]) == 40
    assert ("*", "step") in axes, "wandb's panels use our step as the x axis"

    point = history[2]  # histograms, and tables that grow
    for name in ("reward", "advantage", "length"):
        assert sum(point[f"histograms/{name}/values"]) == 24, f"{name} of 6 problems x 4 completions"
    records = read_samples(tmp_path / "run" / "completions" / "step_000002.parquet")
    counts, edges = (point[f"histograms/ratio/{part}"] for part in ("values", "bins"))
    assert sum(counts) == pytest.approx(2 * 24 * lines[2]["completions/mean_length"]), (
        "each token of both ranks in each update"
    )
    mean = sum(n * (low + high) / 2 for n, low, high in zip(counts, edges, edges[1:], strict=False)) / sum(counts)
    assert mean == pytest.approx(lines[2]["ratio"], abs=0.01) and 0 < counts[50] < sum(counts), (
        "some ratios differ from 1"
    )
    assert point["completions/nrows"] == 8, "four of step 1, four of step 2"
    assert point["tables/evaluations/nrows"] == 2
    (media,) = (tmp_path / "run").glob("wandb/offline-run-*/files/" + point["completions/path"])
    table = json.loads(media.read_text())
    assert table["columns"] == [
        "step", "prompt", "completion", "answer", "reward", "advantage", "length", "finished",
        "rewards/share_of_digits", "rewards/notes", "characters",
    ]  # fmt: skip
    assert [row[3] for row in table["data"][4:]] == [record["answer"] for record in records]
    assert [row[-1] for row in table["data"]] == [str(len(row[2])) for row in table["data"]]
    assert history[2]["mean_characters"] > 1
    assert [row[0] for row in table["data"]] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert table["data"][6][2] == records[2]["completion"]


@pytest.mark.slow
def test_a_run_without_a_server_goes_on_offline(tmp_path, random_model):
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
    assert [h["step"] for h in history] == [0, 1, 2], "can be sent later with `wandb sync`"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_a_run_without_the_package_goes_on(tmp_path, random_model):
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb here')")
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "logging.wandb=offline",
        "optim.max_steps=1",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert "warning: no wandb (no wandb here)" in done.stdout


@pytest.mark.slow
def test_a_resumed_run_keeps_its_wandb_id_and_sends_no_step_twice(tmp_path, random_model):
    arguments = [
        *small_run(random_model, tmp_path / "run"),
        "checkpoint.save_steps=2",
        "logging.log_completions=2",
        "eval.every=1",
    ]
    # Without a key, online falls back to offline, with the same id.
    no_server = {
        "WANDB_API_KEY": "",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "HOME": str(tmp_path),
        "NETRC": "/dev/null",
    }
    run_trainer(*arguments, "logging.wandb=online", "optim.max_steps=3", env=no_server)
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")  # as if the run had been killed after its third step
    more = [*arguments, "optim.max_steps=4", "checkpoint.accept_changes=true"]
    place = {"WANDB_RUN_GROUP": "g", "WANDB_TAGS": "a,b"}
    done = run_trainer(*more, "logging.wandb=online", env=no_server | place)
    parts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert done.stdout.rstrip().endswith(COMMAND + shlex.join(map(str, parts))), "one command sends both parts"
    summary, about = offline_summary(tmp_path / "run")
    assert about == {"name": "run", "group": "g", "tags": ["a", "b"]}
    rewards = [
        json.loads(line).get("reward", 0.0) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert summary["best/reward"] == max(rewards), "also of the steps before the interruption"
    state = json.loads((tmp_path / "run" / "checkpoint-4" / "trainer" / "state.json").read_text())
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{state['wandb_run_id']}/*.wandb"))) == 2
    first, second = (offline_records(tmp_path / "run", start)[0] for start in (0, 1))
    assert [point["step"] for point in first + second] == [0, 1, 2, 3, 4]
    assert [point["_step"] for point in first + second] == [0, 1, 2, 3, 4], "wandb's own counter too"
    assert second[-1]["completions/nrows"] == 8, "two of each step, also of the steps before the interruption"
    assert second[-1]["tables/evaluations/nrows"] == 5, "also that of step 3, which is not sent again"
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2, 3, 4]
