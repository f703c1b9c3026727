"""Ranks that die, hang, run out of memory or see NaN: the others do not hang, and no more than a
step is lost."""

import json
import signal
import time

import pytest
from harness import Started, assert_same_run, bits, run, tiny
from outputs import lines

STEPS = 6
SAVES = ("checkpoint.save_steps=2", "algorithm.num_iterations=2")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, random_model):
    output = tmp_path_factory.mktemp("straight") / "run"
    run(output, tiny(random_model, output, *SAVES), ranks=2)
    return output


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank(tmp_path, random_model, straight):
    """``kill -9`` during a save: one command, the same bits."""
    output = tmp_path / "run"
    fault = f"rank=0 step=3 place=save do=kill once={tmp_path}/once"
    arguments = tiny(random_model, output, *SAVES)
    done = run(output, arguments, ranks=2, torchrun=["--max-restarts=1"], fault=fault)
    printed = done.text()
    assert printed.count("FAULT kill") == 1
    assert "resuming " in printed
    assert_same_run(straight, output, STEPS)
    assert not list(output.glob(".partial*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["rank=1 step=3 place=rollout do=kill", "rank=0 step=3 place=backward do=kill"]
)
def test_a_killed_rank_ends_the_run_and_the_same_command_continues(
    tmp_path, random_model, straight, fault
):
    output = tmp_path / "run"
    arguments = tiny(random_model, output, *SAVES)
    started = Started(output, arguments, ranks=2, fault=f"{fault} once={tmp_path}/once")
    assert started.end() == 1
    assert started.text().count("FAULT kill") == 1
    assert "resuming " in run(output, arguments, ranks=2).text()
    assert_same_run(straight, output, STEPS)
    assert not list(output.glob(".partial*"))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rollout", "forward"])
def test_out_of_memory_on_one_rank(tmp_path, random_model, straight, place):
    """Named, by that rank; the state before the step is saved, though it was not time to."""
    output = tmp_path / "run"
    fault = f"rank=1 step=3 place={place} do=oom once={tmp_path}/once"
    arguments = tiny(random_model, output, *SAVES)
    started = Started(output, arguments, ranks=2, fault=fault)
    assert started.end() == 1
    printed = started.text()
    phase = {"rollout": "rollout", "forward": "update"}[place]
    assert f"error: [rank 1] in phase {phase!r}: RuntimeError: " in printed
    assert "can't allocate memory" in printed
    assert "note: saved checkpoint-3: the same command or call continues from there" in printed
    assert "checkpoint-3 at step 3" in run(output, arguments, ranks=2).text()
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rollout", "forward"])
def test_a_rank_that_hangs(tmp_path, random_model, straight, place):
    """Ends at ``runtime.timeout_s``; the rank that waited says in which phase."""
    output = tmp_path / "run"
    arguments = [*tiny(random_model, output, *SAVES), "runtime.timeout_s=12"]
    fault = f"rank=1 step=3 place={place} do=hang once={tmp_path}/once"
    started = Started(output, arguments, ranks=2, fault=fault)
    started.wait_for("FAULT")
    assert started.end() == 1
    printed = started.text()
    # a rollout may be broken off: torchrun's SIGTERM wakes the rank that hung
    if place == "rollout":
        assert "error: [rank 1] in phase 'rollout': RuntimeError: " in printed
        assert "error: [rank 0] in phase 'after reward': RuntimeError: " in printed, "at the vote"
    else:  # torchrun's SIGKILL ends the other rank
        assert "error: [rank 0] in phase 'update': RuntimeError: " in printed
    assert "Timed out waiting 12000ms" in printed
    assert "saved checkpoint-3" in printed
    run(output, tiny(random_model, output, *SAVES), ranks=2)
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank(tmp_path, random_model):
    """All ranks leave that update out, and the run goes on."""
    output = tmp_path / "run"
    fault = f"rank=1 step=3 place=backward do=nan once={tmp_path}/once"
    options = [
        "checkpoint.save_steps=1",
        "checkpoint.keep=99",
        "optim.lr_scheduler_type=constant",
    ]
    done = run(output, tiny(random_model, output, *options), ranks=2, fault=fault)
    assert done.text().count("warning: a gradient is not finite") == 1
    assert [line["skipped_updates"] for line in lines(output)[1:]] == [0, 0, 0, 1, 0, 0]
    weights = [bits(output, step)["model.safetensors"] for step in range(1, STEPS + 1)]
    assert weights[2] == weights[3]
    assert len(set(weights)) == STEPS - 1


@pytest.mark.slow
def test_torchrun_killed_takes_its_ranks_along(tmp_path, random_model):
    output = tmp_path / "run"
    started = Started(
        output,
        tiny(random_model, output),
        ranks=2,
        fault="rank=1 step=2 place=rollout do=sleep:60",
        torchrun=[],
    )
    started.wait_for("FAULT")
    started.kill(signal.SIGKILL)
    assert started.end() == -signal.SIGKILL
    assert "stopped at step 2" in started.text()
    assert json.loads((output / "checkpoint-2" / "trainer" / "state.json").read_text())["step"] == 2


@pytest.mark.slow
def test_torchrun_killed_before_its_ranks_are_ready(tmp_path, random_model):
    """They wait for each other at a store that is no more: none stays behind."""
    output = tmp_path / "run"
    started = Started(output, tiny(random_model, output), ranks=2, torchrun=[])
    deadline = time.monotonic() + 60
    while len(started.ranks()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(2)
    started.kill(signal.SIGKILL)
    assert started.end(patience=120) == -signal.SIGKILL
    run(output, tiny(random_model, output), ranks=2)
