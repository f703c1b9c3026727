"""``runtime.profile``: the trace of one step, which names the phases."""

import gzip
import json

import pytest
from conftest import run_trainer, small_run


@pytest.mark.slow
def test_the_trace_of_a_step_names_its_phases(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"), "runtime.profile=1", "optim.max_steps=2",
        "eval.before_training=false",
    )  # fmt: skip
    (path,) = (tmp_path / "run").glob("trace_*")
    assert path.name == "trace_step_1.json.gz" and str(path) in done.stdout
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events]
    phases = {phase: names.count(phase) for phase in ("rollout", "reward", "logprobs", "update")}
    assert phases == {"rollout": 2, "reward": 1, "logprobs": 1, "update": 1}, "one step, its weights copied first"
    assert "aten::mm" in names or "aten::addmm" in names
