"""``runtime.profile``: the trace of one step, which names the phases."""

import gzip
import json
import math
from collections import defaultdict

import pytest
from conftest import run_trainer, small_run


def assert_well_formed(events):
    """What viewers of the Trace Event Format need: events with finite times; two events of a thread are nested or do not overlap."""
    threads = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str) and event["ph"] in ("X", "M", "i", "s", "f"), event
        assert math.isfinite(event["ts"]) and {"pid", "tid"} <= set(event), event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["name"]))
    assert sum(map(len, threads.values())) > 1000
    for spans in threads.values():
        open_until = []
        for start, minus_duration, name in sorted(spans):
            end = start - minus_duration
            while open_until and open_until[-1] <= start + 1e-3:  # microseconds with three decimals
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 2e-3, f"{name} at {start} ends after the event around it"
            open_until.append(end)


@pytest.mark.slow
def test_the_trace_of_a_step_names_its_phases(tmp_path, random_model):
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "runtime.profile=1",
        "optim.max_steps=2",
        "eval.before_training=false",
    )
    (path,) = (tmp_path / "run").glob("trace_*")
    assert path.name == "trace_step_1.json.gz" and str(path) in done.stdout
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    assert_well_formed(events)
    names = [event.get("name") for event in events]
    for phase in ("weights", "rollout", "reward", "logprobs", "update"):
        assert names.count(phase) == 1, "one step"
    assert "aten::mm" in names or "aten::addmm" in names
