"""One run at a time in an output folder; a run that was killed leaves no lock behind."""

import os
import signal

import pytest
from harness import Started, run, tiny

from grpo.checkpoint.resume import Lock
from train_grpo import main


def test_a_run_on_a_locked_folder_gives_a_one_line_error(capsys, tmp_path, random_model):
    lock = Lock()
    lock.acquire(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert (
        main(
            [
                f"output_dir={tmp_path}",
                f"model.name_or_path={random_model}",
                "runtime.threads_per_rank=1",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    says = f"error: output_dir={tmp_path} is in use by another run (process {os.getpid()}"
    assert error.count("\n") == 1
    assert error.startswith(says)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    lock.release()


@pytest.mark.slow
def test_two_starts_of_one_command(tmp_path, random_model):
    """Under torchrun, while the first one trains; then the first is killed, and the second may."""
    output = tmp_path / "run"
    first = Started(
        output,
        tiny(random_model, output),
        ranks=2,
        fault="rank=1 step=1 place=rollout do=sleep:60",
    )
    first.wait_for("FAULT")
    second = Started(output, tiny(random_model, output), ranks=2)
    assert second.end(alone=False) == 1
    assert second.text().count("error: ") == 1
    assert f"is in use by another run (process {first.ranks()[0]} on " in second.text()
    for rank in (0, 1):
        first.kill(signal.SIGKILL, rank)
    assert first.end() == 1
    run(output, tiny(random_model, output), ranks=2)
