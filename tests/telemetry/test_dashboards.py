"""TensorBoard's event files and trackio's database, read back with their own readers, over an
interruption."""

import json
import shutil
import sqlite3

import pytest

from grpo.config import Config
from grpo.telemetry.dashboards import table_row
from grpo.telemetry.reporter import Reporter

RECORD = {
    "step": 1,
    "completion": "4",
    "rewards": {"a": 1.5, "b": float("nan")},
    "tokens": ["4"],
}


def test_rows_of_completions_with_and_without_tokens_of_tools_have_the_same_columns():
    rows = [table_row(RECORD | {"sampled": sampled}) for sampled in (None, [True, False])]
    assert rows[0].keys() == rows[1].keys() == {"step", "completion", "rewards/a", "rewards/b"}


def event_files(output):
    """TensorBoard's reader of a run's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(output / "tensorboard"))
    reader.Reload()
    return reader


def reporter(folder, first_step=0, **logging):
    config = Config(output_dir=str(folder), logging=logging)
    return Reporter(
        config,
        is_main=True,
        first_step=first_step,
        max_steps=9,
        newest_line=None,
        wandb_run_id=None,
    )


def report_over_an_interruption(folder, **logging):
    """Steps 0 to 4, then from step 2 on step 3 again."""
    first = reporter(folder, **logging)
    first.evaluation(0, {"eval/greedy_accuracy": 0.25}, {}, 0.0)
    for step in range(1, 5):
        first.completions(step, [RECORD])
        first.step({"step": step, "reward": float(step), "rewards/f/mean": float("nan")})
    first.close()
    second = reporter(folder, first_step=2, **logging)
    second.step({"step": 3, "reward": 30.0})
    second.close()


def test_tensorboard_shows_no_step_twice_and_no_point_where_there_is_no_number(tmp_path):
    report_over_an_interruption(tmp_path, tensorboard=True)
    shown = event_files(tmp_path)
    assert shown.Tags()["scalars"] == ["eval/greedy_accuracy", "reward"]
    points = [(event.step, event.value) for event in shown.Scalars("reward")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0)], "3 and 4 are computed again"


# of TensorBoard's own thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path, capfd):
    writer = reporter(tmp_path, tensorboard=True)
    writer.step({"step": 1, "reward": 0.5})
    shutil.rmtree(tmp_path / "tensorboard")
    for step in (2, 3):
        writer.step({"step": step, "reward": 0.5})
    writer.close()
    assert capfd.readouterr().out.count("warning: TensorBoard stopped (") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_trackio_continues_the_run_of_a_resumed_start_alone(tmp_path, monkeypatch):
    # read when the package is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    names = {"trackio": True, "project": "p", "run_name": "r"}
    report_over_an_interruption(tmp_path / "run", **names)
    new = reporter(tmp_path / "run", **names)
    new.step({"step": 1, "reward": 0.5})
    new.close()
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as database:
        rows = database.execute("select run_id, step, metrics from metrics").fetchall()
    assert [step for _, step, _ in rows] == [0, 1, 2, 3, 4, 3, 1], (
        "step 3, which was computed again, is there twice"
    )
    runs = [run for run, _, _ in rows]
    assert len(set(runs[:6])) == 1 and len(set(runs)) == 2
    metrics = json.loads(rows[1][2])
    (completion,) = metrics.pop("completions")["_value"]
    assert metrics == {"reward": 1.0}
    assert completion == {"step": 1, "completion": "4", "rewards/a": 1.5, "rewards/b": None}
