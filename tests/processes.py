"""Trainer processes for tests, without the 7 seconds of imports that a new interpreter needs.

A server process (``multiprocessing``'s forkserver, one for each pytest worker) imports the trainer
once; each run is a fork of it, with its own signals, threads, exit code and output. Several ranks
are several forks that find each other through a store in the pytest process, as torchrun's ranks
do. What needs a new interpreter (environment variables that libraries read on import, what an
import prints, torchrun itself) is started with ``subprocess`` instead."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRELOAD = (
    "train_grpo", "grpo.evaluation", "grpo.data.tiny", "datasets", "pyarrow.parquet", "tokenizers",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.modeling_auto",
)  # fmt: skip
GRACE_SECONDS = 30.0
"""How long ranks have to follow SIGTERM after another rank has failed, as torchrun has it."""
_lock = threading.Lock()
_context = None


def _server():
    """Start the server at first use, with the variables that libraries read on import."""
    global _context
    with _lock:
        if _context is None:
            before = dict(os.environ)
            os.environ.update(
                OMP_NUM_THREADS="1",
                TOKENIZERS_PARALLELISM="false",
                PYTHONPATH=f"{ROOT}:{ROOT}/tests",
            )
            try:
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload(list(PRELOAD))
                multiprocessing.forkserver.ensure_running()
            finally:
                os.environ.clear()
                os.environ.update(before)
            _context = context
    return _context


def _run(
    script: str,
    arguments: list[str],
    environment: dict[str, str],
    stdin: str,
    stdout: str,
    stderr: str,
    folder: str,
) -> None:
    """In the new process: become what ``python script arguments`` would be in ``folder``."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in ((0, stdin), (1, stdout), (2, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    open_streams()
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ignores the first
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    end_as_interpreter(lambda: runpy.run_path(script, run_name="__main__"))


def open_streams() -> None:
    """Make the files 0, 1 and 2 Python's streams."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def end_as_interpreter(program: Callable[[], object]) -> None:
    """Run a program and end this process as its interpreter would: exit code, threads, exit
    handlers, output."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Forked:
    """Some ranks of one command; the part of ``subprocess.Popen`` that tests use.

    Without ``ranks`` one process without a launcher's variables. The exit code of several ranks is
    torchrun's: 0, or 1 as soon as one failed (the others then get SIGTERM)."""

    def __init__(
        self,
        script,
        arguments,
        *,
        ranks: int | None,
        env: dict[str, str],
        stdout,
        stderr,
        stdin=os.devnull,
        folder=ROOT,
    ) -> None:
        context = _server()
        self._single = ranks is None
        self.returncode = None
        self._told: float | None = None
        shared: dict[str, str] = {}
        if ranks is not None:
            from torch.distributed import TCPStore

            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            shared = {
                "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
            }  # fmt: skip
        self.processes = []
        for rank in range(ranks or 1):
            own = shared | (
                {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks is not None else {}
            )
            files = (str(stdin), str(stdout), str(stderr))
            words = (str(script), list(map(str, arguments)), own | env, *files, str(folder))
            process = context.Process(target=_run, args=words, daemon=False)
            process.start()
            self.processes.append(process)

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each rank, negative for a signal; None while it runs."""
        return [process.exitcode for process in self.processes]

    @property
    def pid(self) -> int:
        return self.processes[0].pid

    def alive(self) -> dict[int, int]:
        """Rank -> pid of the processes that have not ended."""
        return {
            rank: process.pid
            for rank, process in enumerate(self.processes)
            if process.exitcode is None
        }

    def poll(self) -> int | None:
        codes = self.codes
        if self.returncode is None:
            if self._single:
                self.returncode = codes[0]
            elif None not in codes:
                self.returncode = int(any(codes))
            elif any(codes):  # a rank has failed
                now = time.monotonic()
                if self._told is None:
                    self._told = now
                    self.send_signal(signal.SIGTERM)
                elif now - self._told > GRACE_SECONDS:
                    self.kill()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 1e9)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.processes[0].name, timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        for pid in self.alive().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
