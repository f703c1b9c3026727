"""Small helpers that several rooms need, and the environment variables that PyTorch reads when it is imported. Imports no torch."""

import ctypes
import errno
import importlib
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import BinaryIO


class UserError(ValueError):
    """An error that the user can mend. Its message is one line that says how; a run shows it without a traceback."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name if it has none; a line that ends in a colon is joined with the next."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in (lines[:2] if lines[0].endswith(":") else lines[:1]))


def printable(text: str) -> str:
    """The text with control and format characters escaped, so that it cannot move the cursor of a terminal or hide parts of itself."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\u{ord(c):04x}" for c in text)


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading; OSError for a folder, a pipe or a device, which may hold no end or never answer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def write_atomically(path: str | Path, content: str | Callable[[Path], None]) -> None:
    """Write a file so that a reader sees the old content or the new, never a part: write a temporary file beside it, then rename.

    ``content`` is UTF-8 text, or a function that writes the file it is given.
    """
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link to another file, or a pipe
    if isinstance(content, str):
        temporary.write_text(content, encoding="utf-8")
    else:
        content(temporary)
    os.replace(temporary, path)


def sync(path: str | Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(partial: Path, final: Path) -> None:
    """Give a complete folder its name when all its files are on disk, as readable as each other; replaces an older one."""
    mode = max(path.stat().st_mode for path in partial.rglob("*") if path.is_file())
    for path in [*partial.rglob("*"), partial]:
        if path.is_file():
            path.chmod(mode)  # safetensors' files are for their owner alone
        sync(path)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    sync(final.parent)


def end_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel (Linux; elsewhere nothing happens) to send this process a signal when the thread that started it ends."""
    if sys.platform.startswith("linux"):
        pr_set_pdeathsig = 1  # <linux/prctl.h>
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal_number), 0, 0, 0)


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import a package that pyproject.toml lists as the optional dependency ``extra``.

    If it is not installed: a ``ValueError`` that names ``needed_by`` and the command that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{needed_by} needs the package {module} ({error}): pip install -e '.[{extra}]'") from None


NUM_CACHED_KERNELS = 64
CACHE_NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def set_environment_defaults() -> None:
    """Set what makes memory steady while lengths differ from step to step, unless the user has set it. Called before torch is imported.

    CPU: oneDNN, and PyTorch's interface to it, keep a kernel with its scratch memory for each of up to 1,024 shapes: half a GiB after
    20 short steps of a model of 7M parameters under bf16 (``benchmarks/memory.py``).

    Inductor, which compiles 8-bit AdamW and parts of decode steps, would start 16 processes in each rank.

    CUDA: segments of fixed size would fragment, so let the allocator grow its segments. CUDA graphs keep pools of their own either way.
    Known to fail with such segments: collectives inside of CUDA graphs (pytorch/pytorch#158029), which are not used here, and sharing CUDA
    tensors between processes. torch 2.11 and later read ``PYTORCH_ALLOC_CONF`` (2.9 did not, pytorch/pytorch#183387);
    ``PYTORCH_CUDA_ALLOC_CONF``, its older name, still wins over it.
    """
    for name in CACHE_NAMES:
        os.environ.setdefault(name, str(NUM_CACHED_KERNELS))
    os.environ.setdefault(COMPILE_THREADS, "1")
    if not any(name in os.environ for name in ALLOCATOR_NAMES):
        os.environ["PYTORCH_ALLOC_CONF"] = EXPANDABLE


def without_environment_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of the environment for another program, without what :func:`set_environment_defaults` set."""
    defaults = {name: str(NUM_CACHED_KERNELS) for name in CACHE_NAMES}
    defaults |= {"PYTORCH_ALLOC_CONF": EXPANDABLE, COMPILE_THREADS: "1"}
    return {name: value for name, value in environment.items() if defaults.get(name) != value}
