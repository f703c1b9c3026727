"""Run code that the model wrote in a sandbox made of operating system features.

:func:`run_python` starts ``sandbox_driver.py`` in another process. That process confines itself by
the functions of ``sandbox_linux.py``, and then runs the code once per test. Each call has a new
sandbox. ``docs/rewards.md`` lists the layers of the sandbox and what they do not protect against.
If the machine cannot provide a layer, :class:`SandboxUnavailable` names the layer and no code runs,
unless ``allow_unsandboxed`` is on: then, on Linux, the code runs with the layers that the machine
can provide.

A test is of one of two kinds. A *statement* test ``{"code": source}`` runs ``source`` after the
code, in the same module, and passes if nothing raises. A *program* test ``{"input": text}`` runs
the code as a program with ``text`` as its stdin, and passes if the program ends with status 0. Its
output is returned, and the caller compares it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_DRIVER_SECONDS = 5.0
"""Time for the driver to start, to confine itself and to end, besides the time for the tests."""
_DRIVER = os.path.dirname(__file__) + "/sandbox_driver.py"


class SandboxUnavailable(ValueError):
    """This machine cannot provide a layer of the sandbox, and ``allow_unsandboxed`` is off."""


class SandboxError(RuntimeError):
    """The driver sent no message, or reported an error before the first test had a result.

    Usually no code has run then. Any other failure of the driver gives failed tests, because the
    code can be its cause.
    """


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox.

    A test takes at most ``processes * memory_mb + disk_mb`` of memory.
    """

    test_seconds: float = 2.0
    """Time for one test."""
    total_seconds: float = 6.0
    """Time for all tests together."""
    memory_mb: int = 512
    """Address space of each process, in MiB."""
    disk_mb: int = 16
    """Size of all files in the working folder, in MiB. The folder is in memory, on no disk."""
    processes: int = 8
    """Number of processes and threads of one test, its first process included."""
    output_kb: int = 1024
    """Output of one program test, in KiB. More of it ends the test."""

    def __post_init__(self) -> None:
        if min(asdict(self).values()) <= 0:
            raise ValueError(f"each limit must be positive, got {self}")


@dataclass(frozen=True)
class SandboxResult:
    """The result of one test."""

    status: str
    """One of these:

    - ``"passed"``: the statement raised nothing, or the program ended with status 0.
    - ``"failed"``: the code or the statement raised an exception, the process ended in another way
      (by a signal, or before the statement was through), or the driver ended before the result.
    - ``"timeout"``: the test did not end in time, or ``Limits.total_seconds`` had passed before it.
    - ``"output"``: the test printed more than ``Limits.output_kb``.
    """
    output: str = ""
    """The text that a program printed, up to ``Limits.output_kb``. Empty for a statement."""


def run_python(
    code: str,
    tests: Sequence[dict[str, str]],
    limits: Limits,
    *,
    allow_unsandboxed: bool = False,
) -> list[SandboxResult]:
    """Run ``code`` once per test, each time in a new process of the same sandbox.

    Files that one test leaves in the working folder are there in the next test.

    Args:
        tests: statement and program tests; the top of this file describes both.
        allow_unsandboxed: run the code although a layer of the sandbox is missing.

    Raises:
        SandboxUnavailable: if a layer is missing and ``allow_unsandboxed`` is off.
        SandboxError: if the sandbox failed, usually before the code ran.
    """
    # Working folder of the code if a layer of the sandbox is missing. Only then does the driver
    # make this folder. It is named here so that it is removed below, however the driver ends.
    folder = f"/tmp/grpo-sandbox-{os.urandom(8).hex()}"
    job = asdict(limits)
    job.update(
        code=code,
        tests=tests,
        allow_unsandboxed=allow_unsandboxed,
        folder=folder,
    )
    # The interpreter from which the virtual environment was made: the file tree of the sandbox has
    # no virtual environment. -I and -S keep environment variables and site-packages out.
    python = [sys._base_executable, "-I", "-S", "-Xutf8", _DRIVER]
    try:
        output = subprocess.run(
            python,
            input=json.dumps(job).encode(),
            # This captures stderr too, which is dropped: the driver reports the errors of main() on
            # stdout.
            capture_output=True,
            # The driver ends by itself after total_seconds, unless it hangs.
            timeout=limits.total_seconds + _DRIVER_SECONDS,
            env={},
            cwd="/",
            # Without this, a Ctrl-C in the terminal would end the driver and so fail the test. The
            # driver still ends with this process, by end_with_parent().
            start_new_session=True,
        ).stdout
    except subprocess.TimeoutExpired as late:
        # run() has killed the driver. The tests that have ended keep their results, and _results()
        # counts the others as failed.
        output = late.stdout or b""
    # The code may have made thousands of nested folders, at which rmtree raises RecursionError.
    # What rmtree has not yet removed then stays in /tmp.
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)

    # The driver may have been killed in the middle of a line, which then has no end.
    messages = [json.loads(line) for line in output.split(b"\n")[:-1]]
    return _results(messages, len(tests), allow_unsandboxed)


def _results(messages: list[dict], num_tests: int, allow_unsandboxed: bool) -> list[SandboxResult]:
    """Return the result of each test from the driver's messages."""
    if not messages:
        messages = [{"error": "it ended before the first test"}]
    # The first message names the missing layers, the second is the result of the first test. An
    # error in their place counts as a failure of the sandbox, although the code of the first test
    # may have run already. An error in a later message counts as the code's doing.
    for message in messages[:2]:
        if "error" in message:
            raise SandboxError(f"the sandbox failed: {message['error']}")
    missing = ", ".join(messages[0]["missing"])
    if missing and not allow_unsandboxed:
        raise SandboxUnavailable(
            f"this machine cannot give the sandbox {missing}; where untrusted code can do no harm, "
            "allow_unsandboxed: true runs it all the same"
        )
    results = [SandboxResult(**message) for message in messages[1:] if "error" not in message]
    # The code may have ended the driver, by using up the machine's memory for example. So tests
    # without a result count as failed.
    return results + [SandboxResult("failed")] * (num_tests - len(results))
