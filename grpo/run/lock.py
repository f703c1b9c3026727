"""A lock on the output folder, so that only one run writes there. The kernel holds it and releases it when the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

LOCK_FILE = ".lock"


class Lock:
    """Held by the main rank for the whole run. The file names the holder (process id, host); the lock is the kernel's ``flock``."""

    path: Path | None = None
    _handle: int | None = None

    def acquire(self, folder: Path) -> None:
        """Take the lock on an existing folder, unless this object holds it already; ValueError if another run holds it."""
        path = folder / LOCK_FILE
        if self._handle is not None:
            return
        while self._handle is None:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            except OSError as error:
                is_no_file = error.errno in (errno.ELOOP, errno.EISDIR)
                remedy = "delete it" if is_no_file else "another user's run may hold it; choose another output_dir"
                raise ValueError(f"{path} cannot be opened ({error.strerror}): {remedy}") from None
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                raise ValueError(f"{path} is not a regular file: delete it")
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
                print(f"warning: {folder} cannot be locked ({error.strerror}): start no second run there", flush=True)
            # The previous holder may have deleted the file between the open and the lock: then lock the new file.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), os.stat(path)):
                    self._handle, self.path = handle, path
            if self._handle is None:
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n{socket.gethostname()}\n".encode())

    def release(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):  # the folder may have been deleted
                self.path.unlink()
            os.close(self._handle)
            self._handle = self.path = None
