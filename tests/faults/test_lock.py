"""One run at a time in an output folder; a run that was killed leaves no lock behind."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from harness import Started, run, tiny

from grpo.run.lock import LOCK_FILE, Lock
from train_grpo import main

HOLD = "import sys, time; from pathlib import Path; from grpo.run.lock import Lock; Lock().acquire(Path(sys.argv[1])) or print('held', flush=True); time.sleep(60)"


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_with_the_pid_of_the_first(tmp_path, holder):
    with pytest.raises(
        ValueError, match=rf"is in use by another run \(process {holder.pid} on .+\): wait for it, stop it, or"
    ):
        Lock().acquire(tmp_path)


def test_a_killed_holder_leaves_no_lock(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK_FILE).exists()
    lock = Lock()
    lock.acquire(tmp_path)
    lock.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_deleted_lock_file_is_created_and_locked_again(tmp_path):
    """The one before deletes it between our open and our lock: two would hold two files of one name."""
    first, second = Lock(), Lock()
    first.acquire(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    second.acquire(tmp_path)
    assert (tmp_path / LOCK_FILE).stat().st_ino != 0
    first._handle, handle = None, first._handle  # as if it had been killed
    del handle
    with pytest.raises(ValueError, match="in use"):
        Lock().acquire(tmp_path)
    second.release()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to(path.parent / "other"), "cannot be opened (Too many levels of symbolic links)"),
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "cannot be opened (Is a directory)"),
    ],
)
def test_a_lock_that_is_no_file_is_refused(tmp_path, make, problem):
    (tmp_path / "other").write_text("of somebody else")
    make(tmp_path / LOCK_FILE)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/.lock {problem}: delete it")):
        Lock().acquire(tmp_path)
    assert (tmp_path / "other").read_text() == "of somebody else"


def test_a_run_on_a_locked_folder_gives_a_one_line_error(capsys, tmp_path, random_model, holder):
    (tmp_path / "config.yaml").write_text("")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main([f"output_dir={tmp_path}", f"model.name_or_path={random_model}", "runtime.threads_per_rank=1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(
        f"error: output_dir={tmp_path} is in use by another run (process {holder.pid}"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.slow
def test_two_starts_of_one_command(tmp_path, random_model):
    """Under torchrun, while the first one trains; then the first is killed, and the second may."""
    output = tmp_path / "run"
    first = Started(output, tiny(random_model, output), ranks=2, fault="rank=1 step=1 place=rollout do=sleep:60")
    first.wait_for("FAULT")
    second = Started(output, tiny(random_model, output), ranks=2)
    assert second.end(alone=False) == 1
    assert second.text().count("error: ") == 1
    assert f"is in use by another run (process {first.ranks()[0]} on " in second.text()
    for rank in (0, 1):
        first.kill(signal.SIGKILL, rank)
    assert first.end() == 1
    run(output, tiny(random_model, output), ranks=2)
