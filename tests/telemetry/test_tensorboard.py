"""TensorBoard's event files, read back with its own reader: names, an interruption, failures.

``test_wandb_offline.py`` compares the files of a whole run with ``metrics.jsonl``.
"""

import shutil

import pytest
import torch
from test_samples import record

from grpo.config import Config
from grpo.telemetry.reporter import Reporter


def event_files(output):
    """TensorBoard's reader of a run's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(output / "tensorboard"), size_guidance={"tensors": 0, "histograms": 0})
    reader.Reload()
    return reader


def reporter(folder, first_step=0, **logging):
    config = Config(output_dir=str(folder), logging={"tensorboard": True} | logging)
    return Reporter(config, is_main=True, first_step=first_step, max_steps=9)


def points(output, name):
    return [(event.step, event.value) for event in event_files(output).Scalars(name)]


def test_a_prefix_gives_trls_names_and_an_interrupted_run_shows_no_step_twice(tmp_path):
    first = reporter(tmp_path)
    for step in range(5):
        line = {"step": step, "eval/greedy_accuracy": step / 8}
        first.step(line if step == 0 else line | {"reward": float(step), "rewards/f/mean": float("nan")})
    first.close()
    second = reporter(tmp_path, first_step=2)
    second.step({"step": 3, "reward": 30.0})
    second.close()
    assert points(tmp_path, "reward") == [(1, 1.0), (2, 2.0), (3, 30.0)], "3 and 4 are computed again"
    assert points(tmp_path, "eval/greedy_accuracy") == [(0, 0.0), (1, 0.125), (2, 0.25)]
    names = {"eval/greedy_accuracy", "reward"}
    assert set(event_files(tmp_path).Tags()["scalars"]) == names, "no point where there is no number"


def test_histograms_and_completions_are_shown_with_their_step(tmp_path):
    writer = reporter(tmp_path, every=2)
    writer.histogram("reward", torch.tensor([[0.0, float("nan")], [1.0, 3.0]]))
    writer.histogram("length", torch.tensor([float("inf")]))
    writer.completions(2, [record(logged={})])
    writer.step({"step": 2, "reward": 0.5})
    writer.step({"step": 4, "reward": 0.5})
    writer.close()
    shown = event_files(tmp_path)
    assert shown.Tags()["histograms"] == ["histograms/reward"], "no histogram of nothing"
    (rewards,) = shown.Histograms("histograms/reward")
    assert (rewards.step, rewards.histogram_value.num, rewards.histogram_value.sum) == (2, 3, 4)
    (text,) = shown.Tensors("completions/text_summary")
    assert text.step == 2
    shown_text = text.tensor_proto.string_val[0].decode()
    assert shown_text.startswith("**reward 1.5**, a nan, b/c 1.5, advantage -0.5, 2 tokens\n\nprompt\n\n    2+2")
    assert "    output_dir: " in shown.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path, capfd):
    writer = reporter(tmp_path)
    writer.step({"step": 1, "reward": 0.5})
    shutil.rmtree(tmp_path / "tensorboard")
    for step in (2, 3):
        writer.step({"step": step, "reward": 0.5})
    writer.close()
    assert capfd.readouterr().out.count("warning: TensorBoard stopped (") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
