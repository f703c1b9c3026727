"""One run at a time in an output folder. The kernel holds the lock: a process that is killed leaves none behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path

NAME = ".lock"


class Lock:
    """Held by the main rank from the first look at ``output_dir`` to the end. The file says who holds it (pid, host); without its
    holder it means nothing."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._handle: int | None = None

    def acquire(self, folder: Path) -> None:
        """Take the lock on a folder that exists; harmless if it is held already.

        Raises:
            ValueError: if another run holds it.
        """
        if self._handle is not None:
            return
        path = folder / NAME
        while self._handle is None:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = " on ".join(os.read(handle, 300).decode(errors="replace").split())
                os.close(handle)
                raise ValueError(
                    f"output_dir={folder} is in use by another run (process {holder or 'unknown'}): "
                    "wait for it, stop it, or choose another output_dir"
                ) from None
            except OSError as error:  # a network file system without locks
                print(f"warning: no lock on {folder} ({error.strerror}): start no second run there", flush=True)
            # The holder before us may have deleted the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    self._handle, self.path = handle, path
            if self._handle is None:
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n{socket.gethostname()}\n".encode())

    def release(self) -> None:
        if self._handle is None:
            return
        with contextlib.suppress(OSError):  # the folder may have gone
            self.path.unlink()
        os.close(self._handle)
        self._handle = self.path = None
