"""Run code that the model wrote in a sandbox made of operating system features.

:func:`run_python` starts ``sandbox_driver.py`` in another process. That process confines itself by
the functions of ``sandbox_linux.py``, and then runs the code once per test. Each call has a new
sandbox. ``docs/rewards.md`` lists the layers of the sandbox and what they do not protect against.
If the machine cannot provide a layer, no code runs and :class:`SandboxUnavailable` names the layer.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_DRIVER = os.path.dirname(__file__) + "/sandbox_driver.py"


class SandboxUnavailable(ValueError):
    """This machine cannot provide a layer of the sandbox, and ``allow_unsandboxed`` is off."""


class SandboxError(RuntimeError):
    """The sandbox failed before the code ran.

    A failure after that is a failed test, because the code can be its cause.
    """


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox.

    ``memory_mb`` is per process: all processes together take ``processes * memory_mb + disk_mb``.
    """

    test_seconds: float = 2.0
    total_seconds: float = 6.0
    """Time for all tests together."""
    memory_mb: int = 512
    disk_mb: int = 16
    """Memory for the files of the working folder, which are on no disk."""
    processes: int = 8
    """Processes and threads of one test, its first one included."""
    output_kb: int = 1024

    def __post_init__(self) -> None:
        if min(asdict(self).values()) <= 0:
            raise ValueError(f"each limit must be positive, got {self}")


@dataclass(frozen=True)
class SandboxResult:
    """The result of one test."""

    status: str
    """``"passed"`` (a program: ended with status 0), ``"failed"``, ``"timeout"`` or ``"output"``:
    too much of it."""
    output: str = ""
    """The text that a program printed, or its beginning."""


def run_python(
    code: str,
    tests: Sequence[dict[str, str]],
    limits: Limits = Limits(),
    *,
    allow_unsandboxed: bool = False,
) -> list[SandboxResult]:
    """Run ``code`` once per test, each time in a new process.

    A test ``{"code": source}`` runs after ``code`` in the same module and passes if it raises
    nothing. For ``{"input": text}``, ``code`` is a program and ``text`` its stdin; the program's
    output is returned, and the caller compares it.

    Raises:
        SandboxUnavailable: if a layer is missing and ``allow_unsandboxed`` is off.
        SandboxError: if the sandbox failed before the code ran.
    """
    # The driver makes this folder, and only if a layer is missing: else the code has no access to
    # the machine's files.
    folder = f"/tmp/grpo-sandbox-{os.urandom(8).hex()}"
    job = asdict(limits)
    job.update(
        code=code,
        tests=tests,
        allow_unsandboxed=allow_unsandboxed,
        folder=folder,
    )
    # The base interpreter: the sandbox has no virtual environment. -I and -S keep environment
    # variables and site-packages out.
    python = [sys._base_executable, "-I", "-S", "-Xutf8", _DRIVER]
    try:
        output = subprocess.run(
            python,
            input=json.dumps(job).encode(),
            capture_output=True,
            # The driver ends by itself after total_seconds, unless it hangs.
            timeout=limits.total_seconds + 5.0,
            env={},
            cwd="/",
            start_new_session=True,
        ).stdout
    except subprocess.TimeoutExpired as late:
        # The tests that have a result keep it.
        output = late.stdout or b""
    # RecursionError: the code has made thousands of nested folders.
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)

    # The driver may have been killed in the middle of a line, which then has no end.
    messages = [json.loads(line) for line in output.split(b"\n")[:-1]]
    return _results(messages, len(tests), allow_unsandboxed)


def _results(messages: list[dict], num_tests: int, allow_unsandboxed: bool) -> list[SandboxResult]:
    """Return the result of each test from the driver's messages."""
    # The first message names the missing layers, the second is the result of the first test. An
    # error in a later one can be the code's doing, so it is no error of the sandbox.
    for message in messages[:2] or [{"error": "it ended before the first test"}]:
        if "error" in message:
            raise SandboxError(f"the sandbox failed: {message['error']}")
    missing = ", ".join(messages[0]["missing"])
    if missing and not allow_unsandboxed:
        raise SandboxUnavailable(
            f"this machine cannot give the sandbox {missing}; where untrusted code can do no harm, "
            "allow_unsandboxed: true runs it all the same"
        )
    results = [SandboxResult(**message) for message in messages[1:] if "error" not in message]
    # The code may have ended the driver, by using up the machine's memory for example: tests that
    # did not run failed.
    return results + [SandboxResult("failed")] * (num_tests - len(results))
