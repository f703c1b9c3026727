"""Ranks that die, hang, run out of memory or see numbers that are none: the others do not hang, and no more than a
step is lost."""

import signal

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
    output, fault = tmp_path / "run", f"rank=0 step=3 place=save do=kill once={tmp_path}/once"
    arguments = tiny(random_model, output, *SAVES)
    done = run(output, arguments, ranks=2, torchrun=["--max-restarts=1"], fault=fault)
    printed = done.text()
    assert printed.count("FAULT kill") == 1 and "resuming " in printed
    assert_same_run(straight, output, STEPS)
    assert not list(output.glob(".partial*"))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rollout", "forward"])
def test_out_of_memory_on_one_rank(tmp_path, random_model, straight, place):
    """Named, by that rank; the state before the step is saved, though it was not time to."""
    output = tmp_path / "run"
    started = Started(
        output,
        tiny(random_model, output, *SAVES),
        ranks=2,
        fault=f"rank=1 step=3 place={place} do=oom once={tmp_path}/once",
    )
    assert started.end() == 1
    printed = started.text()
    phase = {"rollout": "rollout", "forward": "update"}[place]
    assert f"error: [rank 1] in phase {phase!r}: RuntimeError: " in printed
    assert "can't allocate memory" in printed
    assert "note: saved checkpoint-3: the same command continues from there" in printed
    done = run(output, tiny(random_model, output, *SAVES), ranks=2)
    assert "checkpoint-3 at step 3" in done.text()
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["rollout", "forward"])
def test_a_rank_that_hangs(tmp_path, random_model, straight, place):
    """Ends at ``runtime.timeout_s``; who waited and who hung say in which phase."""
    output = tmp_path / "run"
    arguments = [*tiny(random_model, output, *SAVES), "runtime.timeout_s=12"]
    fault = f"rank=1 step=3 place={place} do=hang once={tmp_path}/once"
    started = Started(output, arguments, ranks=2, fault=fault)
    started.wait_for("FAULT")
    assert started.end() == 1
    printed = started.text()
    if place == "rollout":  # a rollout may be broken off: torchrun's SIGTERM wakes the rank that hung
        assert "[rank 1] stopped in phase 'rollout'" in printed
        assert "[rank 0] stopped in phase 'after reward'" in printed, "at the vote"
    else:
        assert "error: [rank 0] in phase 'update': RuntimeError: " in printed and "Timed out waiting 12000ms" in printed
        assert "[rank 1] rank 0 has failed in phase 'update'; this rank was in phase 'update', and ends" in printed
    assert "saved checkpoint-3" in printed
    run(output, tiny(random_model, output, *SAVES), ranks=2)
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
def test_a_rank_fails_and_the_others_wait_for_it_in_a_collective(tmp_path, random_model, straight):
    """As with NCCL, where no error reaches them: they end, and the steps after the last checkpoint are lost."""
    output = tmp_path / "run"
    arguments = tiny(random_model, output, *SAVES)
    fault = f"rank=1 step=3 place=backward do=raise linger=25 once={tmp_path}/once"
    started = Started(output, arguments, ranks=2, fault=fault, torchrun=[])
    started.wait_for("[rank 0] rank 1 has failed in phase 'update'; this rank was in phase 'update', and ends")
    assert 1 in started.ranks(), "rank 1 is still connected"
    assert started.end(patience=40) == 1
    assert "error: [rank 1] in phase 'update': RuntimeError: a fault was asked for" in started.text()
    assert "checkpoint-2 at step 2" in run(output, arguments, ranks=2).text()
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
def test_a_stop_signal_while_a_rank_hangs(tmp_path, random_model, straight):
    """Torchrun sends SIGTERM when a rank was killed; under NCCL the others cannot follow, say so, and get SIGKILL."""
    output = tmp_path / "run"
    arguments = tiny(random_model, output, *SAVES)
    fault = f"rank=1 step=3 place=backward do=hang once={tmp_path}/once"
    started = Started(output, arguments, ranks=2, fault=fault)
    started.wait_for("FAULT")
    started.kill(signal.SIGTERM, 0)
    started.wait_for("[rank 0] was asked to stop 10 s ago and is still in phase 'update'")
    started.kill(signal.SIGKILL)
    started.end()
    assert "checkpoint-2 at step 2" in run(output, arguments, ranks=2).text()
    assert_same_run(straight, output, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("number", ["nan"])
def test_a_gradient_that_is_not_finite_on_one_rank(tmp_path, random_model, number):
    """All ranks leave that update out; then the run goes on. With ``stop`` all stop, and the weights are those
    before it."""
    output, fault = tmp_path / "run", f"rank=1 step=3 place=backward do={number} once={tmp_path}/once"
    options = ["checkpoint.save_steps=1", "checkpoint.keep=99", "optim.lr_scheduler_type=constant"]
    done = run(output, tiny(random_model, output, *options), ranks=2, fault=fault)
    assert done.text().count("warning: a gradient is not finite") == 1
    assert [line["skipped_updates"] for line in lines(output)[1:]] == [0, 0, 0, 1, 0, 0]
    weights = [bits(output, step)["model.safetensors"] for step in range(1, STEPS + 1)]
    assert weights[2] == weights[3] and len(set(weights)) == STEPS - 1
    stopped = tmp_path / "stopped"
    started = Started(stopped, tiny(random_model, stopped, "optim.on_nonfinite=stop"), ranks=2, fault=fault + "2")
    assert started.end() == 1
    assert "had a gradient that is not finite: lower optim.learning_rate" in started.text()
    assert {path.name for path in stopped.glob("checkpoint-*")} == {"checkpoint-3"}
    assert bits(stopped, 3)["model.safetensors"] == weights[2]
