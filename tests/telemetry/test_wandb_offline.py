"""wandb in whole runs without a server: what the offline files hold; and TensorBoard's event
files."""

import json

import pytest
from conftest import ROOT, run_trainer, small_run
from test_dashboards import event_files
from wandb_files import wandb_records

from grpo.telemetry.samples import read_samples


def offline_records(output):
    """A run in wandb's own file: history, configuration and axes."""
    history = []
    config = {}
    axes = set()
    (path,) = output.glob("wandb/offline-run-*/*.wandb")
    for record in wandb_records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = record.history.item
            history.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
            )
        elif kind == "metric":
            axes.add((record.metric.glob_name or record.metric.name, record.metric.step_metric))
        elif kind == "run":
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return history, config, axes


@pytest.mark.slow
def test_an_offline_run_has_the_same_metrics_as_the_jsonl_file(tmp_path, random_model):
    output = tmp_path / "run"
    rewards = f"{ROOT}/tests/rewards_for_tests.py"
    functions = f"[{{name: '{rewards}:share_of_digits', args: {{api_key: sk-of-the-test}}}}, '{rewards}:notes']"
    done = run_trainer(
        *small_run(random_model, output),
        "logging.wandb=offline",
        "logging.tensorboard=true",
        "optim.max_steps=3",
        "eval.every=2",
        f"reward.functions={functions}",
        ranks=2,
    )
    with_the_key = [
        p for p in output.rglob("*") if p.is_file() and b"sk-of-the-test" in p.read_bytes()
    ]
    assert not with_the_key and "api_key: '***'" in (output / "config.yaml").read_text()
    history, config, axes = offline_records(output)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [h["step"] for h in history] == [line["step"] for line in lines] == [0, 1, 2, 3]
    shown = event_files(output)
    for logged, written in zip(history, lines, strict=True):
        for name, value in written.items():
            assert logged[name] == pytest.approx(value), name
            if name != "step":
                points = {event.step: event.value for event in shown.Scalars(name)}
                assert points[written["step"]] == pytest.approx(value), name
    assert config["rollout"]["num_generations"] == 4
    assert ("*", "step") in axes, "wandb's panels use our step as the x axis"
    assert (
        f"wandb     offline; send this run with: wandb sync {output}/wandb/offline-run-*-"
        in done.stdout
    )

    records = read_samples(output / "completions" / "step_000002.parquet")
    (media,) = output.glob("wandb/offline-run-*/files/" + history[2]["completions/path"])
    table = json.loads(media.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    for name in ("step", "answer", "completion", "finished", "logged"):
        assert [row[name] for row in rows] == [record[name] for record in records], name
    assert "rewards/notes" in rows[0] and "tokens" not in rows[0]
