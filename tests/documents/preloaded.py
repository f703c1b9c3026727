"""A ``python`` for the commands of the documents that has imported PyTorch and the trainer before, for speed.

A server imports them once, from the folder that the commands run in and with their environment variables. The program
``python`` that this module writes sends it the arguments, the folder, the environment and its three files, and ends
with the exit code; the command itself runs in a fork of the server. Everything else (``python -c``, ``-m pytest``,
torchrun) runs in a new interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PRELOAD = ("train_grpo", "grpo.evaluation", "datasets", "transformers.models.auto.modeling_auto")
PROGRAM = """#!{python} -IS
import json, os, socket, sys
words = sys.argv[1:] or ["-"]
module = words[1] if words[0] == "-m" and words[1:] else ""
if os.path.basename(sys.argv[0]) == "pytest":
    words = ["-m", "pytest", *words]
elif not words[0].endswith(".py") and (not module.startswith("grpo.") or module == "grpo.distributed.torchrun"):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
told = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [len(told).to_bytes(8, "big")], [0, 1, 2])
server.sendall(told)
sys.exit(int(server.recv(8) or b"1"))
"""


@contextlib.contextmanager
def preloaded_python(folder: Path, tree: Path, environment: dict[str, str]) -> Iterator[Path]:
    """The path of such a ``python``, beside a ``pytest``, in the new ``folder``; for commands that run in ``tree``."""
    folder.mkdir()
    address = str(folder / "server")
    for name in ("python", "pytest"):
        (folder / name).write_text(PROGRAM.format(python=sys.executable, address=address))
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        cwd=tree,
        env=environment | {"PYTHONPATH": str(tree)},
        start_new_session=True,
    )
    try:
        while not os.path.exists(address):
            assert server.poll() is None, "the server has failed"
            time.sleep(0.05)
        yield folder / "python"
    finally:
        server.kill()
        server.wait()


def serve(address: str) -> None:
    """Import, then run a command in a fork for each connection."""
    for name in PRELOAD:
        __import__(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen()
    os.rename(address + ".new", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears away those that answer
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
        connection.close()


def answer(connection: socket.socket) -> None:
    """Run one command, send its exit code; end it where its caller has been killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    told = b""
    while len(told) < int.from_bytes(size, "big"):
        told += connection.recv(65536)
    pid = os.fork()
    if pid == 0:
        connection.close()
        os.setsid()
        run(*json.loads(told), files)
    for file in files:
        os.close(file)
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if select.select([connection], [], [], 0.02)[0]:  # the caller sends nothing more: it is gone
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(str(os.waitstatus_to_exitcode(ended[1]) % 256).encode())
    os._exit(0)


def run(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> None:
    """In the new process: become what ``python WORDS`` would be."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    open_streams()
    if words[0] == "-m":
        sys.path[0] = folder
        sys.argv = words[1:]
        end_as_interpreter(lambda: runpy.run_module(words[1], run_name="__main__", alter_sys=True))
    else:
        sys.path[0] = str(Path(words[0]).resolve().parent)
        sys.argv = words
        end_as_interpreter(lambda: runpy.run_path(words[0], run_name="__main__"))


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from processes import end_as_interpreter, open_streams

    sys.path[0] = os.getcwd()
    serve(sys.argv[1])
