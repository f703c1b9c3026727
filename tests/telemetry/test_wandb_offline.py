"""wandb in whole runs without a server: what the offline files hold, and a missing package.

The first test reads TensorBoard's event files of the same run too.
"""

import json

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from test_tensorboard import event_files
from wandb_files import wandb_records

from grpo.telemetry.samples import read_samples

COMMAND = "wandb     offline; send this run with: wandb sync "


def offline_records(output):
    """The newest start of a run in wandb's own file: history, configuration, axes, last summary, and the run."""
    history, config, axes, summary, about = [], {}, set(), {}, {}
    path = max(output.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime)

    def values(items):
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            history.append(values(record.history.item))
        elif kind == "summary":
            summary |= values(record.summary.update)
        elif kind == "metric":
            axes.add((record.metric.glob_name or record.metric.name, record.metric.step_metric))
        elif kind == "run":
            config |= values(record.run.config.update)
            about = {"name": record.run.display_name, "group": record.run.run_group, "tags": list(record.run.tags)}
    return history, config, axes, summary, about


@pytest.mark.slow
def test_an_offline_run_has_the_same_metrics_as_the_jsonl_file(tmp_path, random_model):
    rewards, output = f"{ROOT}/tests/rewards_for_tests.py", tmp_path / "run"
    functions = f"[{{name: '{rewards}:share_of_digits', args: {{api_key: sk-of-the-test}}}}, '{rewards}:notes']"
    done = run_trainer(
        *small_run(random_model, output), "logging.wandb=offline", "logging.tensorboard=true", "optim.max_steps=3",
        "eval.every=2", f"reward.functions={functions}", ranks=2,
        env={"WANDB_RUN_GROUP": "g", "WANDB_TAGS": "a,b"},
    )  # fmt: skip
    with_the_key = [p for p in output.rglob("*") if p.is_file() and b"sk-of-the-test" in p.read_bytes()]
    assert not with_the_key and "api_key: '***'" in (output / "config.yaml").read_text()
    history, config, axes, summary, about = offline_records(output)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [h["step"] for h in history] == [line["step"] for line in lines] == [0, 1, 2, 3]
    for logged, written in zip(history, lines, strict=True):
        for name, value in written.items():
            assert logged[name] == pytest.approx(value), name
    assert summary["reward"]["max"] == max(line["reward"] for line in lines[1:])
    assert about == {"name": "run", "group": "g", "tags": ["a", "b"]}
    assert config["rollout"]["num_generations"] == 4
    assert config["environment"]["torch"] == torch.__version__
    assert len(config["environment"]["git_commit"].removesuffix("-dirty")) == 40
    assert ("*", "step") in axes, "wandb's panels use our step as the x axis"
    assert done.stdout.count(f"{COMMAND}{output}/wandb/offline-run-*-") == 1
    assert f"\ndashboard tensorboard --logdir {output / 'tensorboard'}\n" in done.stdout

    shown = event_files(output)
    for name in dict.fromkeys(name for line in lines for name in line if name != "step"):
        points = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert [(event.step, event.value) for event in shown.Scalars(name)] == points, name
    for name in ("reward", "advantage", "length"):  # of 6 problems x 4 completions
        assert shown.Histograms(f"histograms/{name}")[1].histogram_value.num == 24
        assert sum(history[2][f"histograms/{name}/values"]) == 24
    texts = shown.Tensors("completions/text_summary")
    assert [text.step for text in texts] == [1, 2, 3]
    assert texts[1].tensor_proto.string_val[0].decode().count("**reward ") == 4

    records = read_samples(output / "completions" / "step_000002.parquet")
    (media,) = output.glob("wandb/offline-run-*/files/" + history[2]["completions/path"])
    table = json.loads(media.read_text())
    assert table["columns"] == [
        "step", "problem", "prompt", "answer", "completion", "reward", "advantage", "length", "finished",
        "rewards/share_of_digits", "rewards/notes", "logged/characters",
    ]  # fmt: skip
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    for name in ("step", "answer", "completion", "finished"):
        assert [row[name] for row in rows] == [record[name] for record in records], name
    assert [row["logged/characters"] for row in rows] == [str(len(row["completion"])) for row in rows]


@pytest.mark.slow
def test_a_run_without_the_package_goes_on(tmp_path, random_model):
    (tmp_path / "wandb.py").write_text("raise ImportError('no wandb here')")
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"), "logging.wandb=offline", "optim.max_steps=1",
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert "warning: wandb stopped (no wandb here)" in done.stdout
