"""Small helpers that several rooms need, and environment variables that PyTorch reads. Imports no
torch."""

import ctypes
import importlib
import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class UserError(ValueError):
    """An error that the user can mend. Its message is one line that says how; a run shows it
    without a traceback."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the next if it ends in a colon; its type's name if
    it has none."""
    text = str(error).strip() or type(error).__name__
    lines = text.splitlines()
    shown = lines[:2] if lines[0].endswith(":") else lines[:1]
    return " ".join(map(str.strip, shown))


def printable(text: str) -> str:
    """The text with control and format characters escaped: it cannot move a terminal's cursor or
    hide a part."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)


def write_atomically(path: str | Path, content: str | Callable[[Path], None]) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    A link stays, and its target is replaced. A device or a pipe cannot be replaced by a file: it is
    written into. ``content`` is UTF-8 text, or a function that writes the file at a path."""

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
    temporary = path.with_name(path.name + ".tmp")
    # It may be a link to another file, or a pipe.
    temporary.unlink(missing_ok=True)
    write(temporary)
    os.replace(temporary, path)


def sync(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(partial: Path, final: Path) -> None:
    """Give a complete folder its name when its files are on disk and equally readable; replaces an
    older one."""
    paths = list(partial.rglob("*"))
    files = [path for path in paths if path.is_file()]
    # Those of safetensors are for their owner alone.
    mode = max(file.stat().st_mode for file in files)
    for file in files:
        file.chmod(mode)
    for path in [*paths, partial]:
        sync(path)
    if final.is_symlink():
        final.unlink()
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    sync(final.parent)


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel (Linux only) to send this process a signal when the thread that started it
    ends."""
    if sys.platform.startswith("linux"):  # 1 is PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(1, int(signal_number), 0, 0, 0)


def seconds_waited_for_core() -> float:
    """Seconds that this thread was ready to run and waited for a CPU core; 0 where the kernel does
    not count them."""
    path = Path("/proc/thread-self/schedstat")
    if not path.exists():
        return 0.0
    waited = path.read_text().split()[1]
    return int(waited) / 1e9


def ignore_broken_pipes() -> None:
    """Let this process go on when its output has no reader (a closed pipe, terminal or stream), or
    a full disk."""
    for number in range(3):
        try:
            os.fstat(number)
        except (
            OSError
        ):  # closed by the shell (`>&-`): the next file that is opened would get its number
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, so this one
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # else the caller's own stream
            output = io.BufferedWriter(_Output(number, "w", closefd=False))
            text = io.TextIOWrapper(output, errors="backslashreplace", line_buffering=True)
            setattr(sys, name, text)


class _Output(io.FileIO):
    """A standard stream that becomes /dev/null when nobody can read it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(data)


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import a package of the optional dependency ``extra``; ValueError with the command that
    installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{needed_by} needs the package {module} ({error}): pip install -e '.[{extra}]'"
        ) from None


ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ENVIRONMENT_DEFAULTS = {
    # On CPU, oneDNN keeps a kernel with scratch memory for each of up to 1,024 shapes
    # (benchmarks/memory.py).
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    # Segments of fixed size fragment. Growing ones fail only with collectives in CUDA graphs
    # (pytorch/pytorch#158029).
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Settings that make memory steady while lengths differ from step to step."""


def set_environment_defaults() -> None:
    """Set ``ENVIRONMENT_DEFAULTS``, unless the user has set them. Called before torch is
    imported."""
    # An older name of the allocator's settings wins over the newer one.
    has_allocator = any(name in os.environ for name in ALLOCATOR_NAMES)
    for name, value in ENVIRONMENT_DEFAULTS.items():
        if not (has_allocator and name in ALLOCATOR_NAMES):
            os.environ.setdefault(name, value)


def without_environment_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment for another program, without what :func:`set_environment_defaults`
    set."""
    return {
        name: value
        for name, value in environment.items()
        if ENVIRONMENT_DEFAULTS.get(name) != value
    }  # fmt: skip
