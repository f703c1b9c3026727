"""Helpers for files, processes, standard streams, and environment variables that PyTorch reads. The
module does not import torch."""

import contextlib
import ctypes
import importlib
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class UserError(ValueError):
    """A mistake of the user. The message is one line that says what would work. A run prints the
    message without a traceback."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of the error's type if the message
    is empty."""
    text = str(error).strip() or type(error).__name__
    lines = text.splitlines()
    # A line that ends in a colon says nothing without the next line.
    first_lines = lines[:2] if lines[0].endswith(":") else lines[:1]
    return " ".join(map(str.strip, first_lines))


def printable(text: str) -> str:
    """Return the text with control and format characters escaped. In a terminal these characters
    could move the cursor or hide text."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)


def write_atomically(path: str | Path, content: str | Callable[[Path], None]) -> None:
    """Write a file so that a reader sees the old content or the new content, never a part.

    A symbolic link stays, and its target is replaced. A device or a pipe cannot be replaced by a
    file, so the content is written into it.

    Args:
        content: UTF-8 text, or a function that gets a path and writes the file there.
    """

    def write(file: Path) -> None:
        if callable(content):
            content(file)
        else:
            file.write_text(content, encoding="utf-8")

    path = Path(path)
    if path.exists() and not path.is_file():
        write(path)
        return
    path = path.resolve()
    # The temporary file is in the same folder, since a rename is atomic only within one file
    # system.
    temporary = path.with_name(path.name + ".tmp")
    # An old file of this name may be a link to another file, or a pipe.
    temporary.unlink(missing_ok=True)
    write(temporary)
    os.replace(temporary, path)


def sync(path: str | Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(partial: Path, final: Path) -> None:
    """Write the files of a complete folder through to disk, then rename the folder to its final
    name. An older folder with the final name is replaced."""
    paths = list(partial.rglob("*"))
    files = [path for path in paths if path.is_file()]
    # safetensors writes files that only their owner can read. All files get the mode of the other
    # files.
    mode = max(file.stat().st_mode for file in files)
    for file in files:
        file.chmod(mode)
    # After a power cut, a folder with its final name must hold every byte of its files.
    for path in [*paths, partial]:
        sync(path)
    # A kill before the rename below leaves the complete folder under its first name.
    if final.is_symlink():
        final.unlink()
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    sync(final.parent)


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel (Linux only) to send this process a signal when the thread that started it
    ends."""
    if sys.platform.startswith("linux"):
        # Python has no prctl. 1 is PR_SET_PDEATHSIG of <linux/prctl.h>.
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal_number), 0, 0, 0)


def seconds_waited_for_core() -> float:
    """Return how many seconds this thread was ready to run and waited for a CPU core. Return 0 if
    the kernel does not count these seconds."""
    path = Path("/proc/thread-self/schedstat")
    if not path.exists():
        return 0.0
    _, nanoseconds_waited, _ = path.read_text().split()
    return int(nanoseconds_waited) / 1e9


@contextlib.contextmanager
def signs_of_life(
    work: str,
    how_far: Callable[[], str] = str,
    is_shown: bool = True,
    every_s: int = 30,
) -> Iterator[None]:
    """Print a line on stderr every ``every_s`` seconds until the block ends: the work, followed by
    ``how_far()``. A terminal gets no line, because it has progress bars."""
    if not is_shown or sys.stderr.isatty():
        yield
        return
    has_ended = threading.Event()

    def print_lines() -> None:
        seconds = every_s
        while not has_ended.wait(every_s):
            print(f"{work}{how_far()}: {seconds} s so far", file=sys.stderr, flush=True)
            seconds += every_s

    # A daemon does not keep a process alive whose main thread has ended.
    threading.Thread(target=print_lines, daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def ignore_broken_pipes() -> None:
    """Let this process continue when its output cannot be written: nobody reads it any more (a
    closed pipe, terminal or stream), or the disk is full."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The shell has closed this stream (`>&-`), and the next file that is opened would get
            # its number. os.open() takes the lowest free number, which is this one.
            os.open(os.devnull, os.O_RDWR)
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        # A program that calls grpo.train may have replaced this stream. The replacement stays.
        if stream is getattr(sys, f"__{name}__"):
            output = io.BufferedWriter(_Output(number, "w", closefd=False))
            text = io.TextIOWrapper(
                output,
                errors="backslashreplace",
                line_buffering=True,
            )
            setattr(sys, name, text)


class _Output(io.FileIO):
    """Standard stream that becomes /dev/null at the first write that fails."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            # The descriptor itself is redirected, since libraries in C print to it too.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import the package ``module``, which the optional dependencies ``extra`` install.

    Raises:
        ValueError: if the package is missing. The message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{needed_by} needs the package {module} ({error}): pip install -e '.[{extra}]'"
        ) from None


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ENVIRONMENT_DEFAULTS = {
    # On the CPU, oneDNN keeps a kernel with scratch memory for each of up to 1,024 shapes
    # (benchmarks/memory.py).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    # The allocator's segments of fixed size fragment. Segments that grow fail only with collectives
    # in CUDA graphs (pytorch/pytorch#158029).
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Environment variables with the values that a run sets. They keep memory from growing when
sequence lengths differ from step to step."""


def set_environment_defaults() -> None:
    """Set each variable of ``ENVIRONMENT_DEFAULTS`` that the user has not set. Call this function
    before torch is imported."""
    # The user may have set the allocator's settings under an older name. PyTorch reads only one of
    # the names, so ours must not be set too.
    has_allocator_settings = any(name in os.environ for name in ALLOCATOR_VARIABLES)
    for name, value in ENVIRONMENT_DEFAULTS.items():
        if not (has_allocator_settings and name in ALLOCATOR_VARIABLES):
            os.environ.setdefault(name, value)


def without_environment_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment for another program, without the variables that
    :func:`set_environment_defaults` has set."""
    return {
        name: value
        for name, value in environment.items()
        if ENVIRONMENT_DEFAULTS.get(name) != value
    }  # fmt: skip
