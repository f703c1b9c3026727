"""Asked to stop: all ranks agree, the newest whole state is kept, the same command ends with the
same bits."""

import re
import signal
import time

import pytest
from harness import Started, assert_same_run, run, tiny

STEPS = 6


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, random_model):
    """``ranks -> output`` of runs that nothing happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    outputs = {}

    def of(ranks: int):
        if ranks not in outputs:
            outputs[ranks] = folder / str(ranks)
            run(outputs[ranks], tiny(random_model, outputs[ranks]), ranks=ranks)
        return outputs[ranks]

    return of


def continued(uninterrupted, model, output, *, ranks: int, from_step: int) -> None:
    done = run(output, tiny(model, output), ranks=ranks)
    assert f"checkpoint-{from_step} at step {from_step}" in done.text()
    assert_same_run(uninterrupted(ranks), output, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_process_stops_during_a_rollout(tmp_path, random_model, uninterrupted, number):
    output = tmp_path / "run"
    started = Started(output, tiny(random_model, output), fault="place=rollout step=2 do=hang")
    started.wait_for("FAULT")
    started.kill(number)
    assert started.end() == 128 + number
    assert f"stopped at step 2 of {STEPS}" in started.text()
    assert "Traceback" not in started.text()
    continued(uninterrupted, random_model, output, ranks=1, from_step=2)


# where the signal finds the ranks -> the steps whose checkpoint they may leave
PLACES = {
    "rollout": ("rank=1 place=rollout step=2 do=sleep:4 once={once}", (2,)),
    # 3: the rank that gets the signal waits in a vote, which ends the rollout on both before it is noticed. 2: it was
    # slow, and got the signal before it reached the vote.
    "reward": ("rank=0 place=score step=2 do=sleep:4 once={once}", (2, 3)),
    # A sleep in the backward stands for a long update: it is brought to its end, then the whole
    # step is there.
    "update": ("rank=1 place=backward step=2 do=sleep:4 once={once}", (3,)),
    "evaluation": ("rank=1 place=eval step=2 do=sleep:4 once={once}", (3,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "to"),
    [
        ("rollout", "torchrun"),
        ("rollout", "rank 0"),
        ("reward", "rank 1"),
        ("update", "torchrun"),
        ("evaluation", "rank 0"),
    ],
)
def test_two_ranks_stop_together(tmp_path, random_model, uninterrupted, place, to):
    """Also where one alone is told, and it is not the one that takes long."""
    fault, steps = PLACES[place]
    output = tmp_path / "run"
    launched = {"torchrun": []} if to == "torchrun" else {}
    fault = fault.format(once=tmp_path / "once")
    started = Started(output, tiny(random_model, output), ranks=2, fault=fault, **launched)
    started.wait_for("FAULT")
    started.kill(signal.SIGTERM, None if to == "torchrun" else int(to[-1]))
    assert started.end() != 0
    printed = started.text()
    stopped_at = re.findall(rf"stopped at step (\d) of {STEPS}", printed)
    assert len(stopped_at) == 1
    assert int(stopped_at[0]) in steps
    if to != "torchrun":
        # A rank that has finished may get the launcher's SIGTERM as well, while it exits.
        assert (
            {128 + signal.SIGTERM}
            <= set(started.process.codes)
            <= {128 + signal.SIGTERM, -signal.SIGTERM}
        )
    assert "forcefully exiting" not in printed, "within torchrun's 30 seconds of grace"
    continued(uninterrupted, random_model, output, ranks=2, from_step=int(stopped_at[0]))


@pytest.mark.slow
def test_ctrl_c_reaches_ranks_twice_and_counts_once(tmp_path, random_model, uninterrupted):
    """A terminal sends SIGINT to all processes of the group, and torchrun passes it on once
    more."""
    output = tmp_path / "run"
    started = Started(
        output,
        tiny(random_model, output),
        ranks=2,
        fault="place=rollout step=2 do=hang",
        torchrun=[],
    )
    started.wait_for("FAULT")
    for rank in (0, 1, None):
        started.kill(signal.SIGINT, rank)
    assert started.end() != 0
    assert f"stopped at step 2 of {STEPS}" in started.text()
    continued(uninterrupted, random_model, output, ranks=2, from_step=2)


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(tmp_path, random_model, uninterrupted):
    """The first cannot be followed (one rank sleeps inside the update, the other waits for it in a
    collective)."""
    output = tmp_path / "run"
    started = Started(
        output,
        tiny(random_model, output, "checkpoint.save_steps=1"),
        ranks=2,
        fault="rank=1 place=forward step=2 do=hang",
    )
    started.wait_for("FAULT")
    for rank in (0, 1):
        started.kill(signal.SIGTERM, rank)
    time.sleep(5)
    assert len(started.ranks()) == 2, "they try to bring the step to its end"
    for rank in (0, 1):
        started.kill(signal.SIGTERM, rank)
    assert started.end() != 0
    assert "stopping, once an update or a save that has begun is complete" in started.text()
    assert "KeyboardInterrupt: second SIGTERM" in started.text()
    run(output, tiny(random_model, output, "checkpoint.save_steps=1"), ranks=2)
    assert_same_run(uninterrupted(2), output, STEPS)


@pytest.mark.slow
def test_sigusr1_saves_and_training_continues(tmp_path, random_model, uninterrupted):
    """To a rank that does not write."""
    output = tmp_path / "run"
    arguments = tiny(random_model, output, "checkpoint.keep=9")
    started = Started(
        output,
        arguments,
        ranks=2,
        fault=f"rank=1 place=rollout step=2 do=sleep:2 once={tmp_path}/once",
    )
    started.wait_for("FAULT")
    started.kill(signal.SIGUSR1, 1)
    assert started.end() == 0
    assert {path.name for path in output.glob("checkpoint-*")} == {
        "checkpoint-3",
        f"checkpoint-{STEPS}",
    }
    assert_same_run(uninterrupted(2), output, STEPS)
