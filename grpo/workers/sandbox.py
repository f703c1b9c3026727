"""Run untrusted Python code in a sandbox made of operating system features. Each call creates a new sandbox.

``docs/rewards.md`` lists the layers of the sandbox and what they do not protect against. If the machine cannot provide
a layer, no code runs and :class:`SandboxUnavailable` names the layer.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_child.py")
_LAUNCH_SECONDS = 5.0
"""Time limit for setting up, in addition to the time limit of the tests. Then the sandbox is killed."""


class SandboxUnavailable(ValueError):
    """This machine cannot provide a layer of the sandbox, and ``allow_unsandboxed`` is off."""


class SandboxError(RuntimeError):
    """The sandbox failed before the code ran. What fails later is a failed test, because the code can be its cause."""


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox. ``memory_mb`` is per process: all processes take ``processes * memory_mb + disk_mb``."""

    test_seconds: float = 2.0
    total_seconds: float = 6.0
    memory_mb: int = 512
    disk_mb: int = 16
    processes: int = 8
    """Processes and threads of one test, its first one included."""
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            kind = (int, float) if name.endswith("seconds") else int
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e6:
                raise ValueError(f"{name} must be positive, and an integer unless it is seconds; got {value!r}")


@dataclass(frozen=True)
class SandboxResult:
    """The result of one test."""

    status: str
    """``"passed"`` (a program ended with status 0), ``"failed"``, ``"timeout"`` or ``"output"`` (too much of it)."""
    output: str
    """The text that a program printed."""


def run_python(
    code: str,
    tests: Sequence[dict[str, str]],
    limits: Limits = Limits(),
    *,
    allow_unsandboxed: bool = False,
    pretend_missing: str = "",
) -> list[SandboxResult]:
    """Run ``code`` once per test, each time in a new process.

    A test ``{"code": source}`` runs after ``code`` in the same module and passes if it raises nothing. For ``{"input":
    text}``, ``code`` is a program and ``text`` its stdin; the program's output is returned, and the caller compares it.
    A missing layer raises :class:`SandboxUnavailable` unless ``allow_unsandboxed``. ``pretend_missing`` is for tests.
    """
    folder = f"/tmp/grpo-sandbox-{os.urandom(8).hex()}"  # made only if a layer is missing
    job = dict(code=code, tests=list(tests), allowed=allow_unsandboxed, missing=pretend_missing, folder=folder)
    # The base interpreter: the sandbox has no virtual environment. The options keep site-packages and environment out.
    python = [getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", "-B", "-X", "utf8", _CHILD]
    streams = dict(input=json.dumps(job | asdict(limits)).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    seconds = limits.total_seconds + _LAUNCH_SECONDS
    try:
        output = subprocess.run(python, **streams, timeout=seconds, env={}, cwd="/", start_new_session=True).stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or b""
    with contextlib.suppress(RecursionError):  # the code has made thousands of nested folders
        shutil.rmtree(folder, ignore_errors=True)
    # A line without its end is of a driver that was killed.
    return _results([json.loads(line) for line in output.split(b"\n")[:-1]], len(tests), allow_unsandboxed)


def _results(answers: list[dict], num_tests: int, allow_unsandboxed: bool) -> list[SandboxResult]:
    """The result of each test. An error is the sandbox's only before the code ran: later, the code can cause it."""
    # The first answer has the missing layers, the second the result of the first test.
    for answer in answers[:2] or [{"error": "it ended before the first test"}]:
        if "error" in answer:
            raise SandboxError(f"the sandbox failed: {answer['error']}")
    if answers[0]["missing"] and not allow_unsandboxed:
        remedy = "where untrusted code can do no harm, allow_unsandboxed: true runs it all the same"
        raise SandboxUnavailable(f"this machine cannot give the sandbox {', '.join(answers[0]['missing'])}; {remedy}")
    results = [SandboxResult(answer["status"], answer["output"]) for answer in answers[1:] if "error" not in answer]
    # The code may have ended the driver, by using up the machine's memory for example: tests that did not run failed.
    return results + [SandboxResult("failed", "")] * (num_tests - len(results))
