"""Run untrusted Python code in a sandbox made of operating system features. Each call creates a new sandbox and deletes it.

``docs/rewards.md`` lists the layers of the sandbox and what they do not protect against. If the machine cannot provide a layer, no code
runs and :class:`SandboxUnavailable` names the layer.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_child.py")
_GRACE_SECONDS = 10.0
"""The launcher ends the sandbox at its time limit. A launcher that has not ended this many seconds later is stuck and is killed."""


class SandboxUnavailable(ValueError):
    """This machine cannot provide a layer of the sandbox, and ``allow_unsandboxed`` is off."""


class SandboxError(RuntimeError):
    """The sandbox failed before the code ran. What fails later is a failed test, because the code can be its cause."""


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox. ``memory_mb`` is per process, so all processes and files take at most ``processes * memory_mb + disk_mb``."""

    test_seconds: float = 2.0
    total_seconds: float = 6.0
    memory_mb: int = 512
    disk_mb: int = 16
    processes: int = 8
    """Processes and threads of one test, its first one included."""
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            whole = name not in ("test_seconds", "total_seconds")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 1e6:
                raise ValueError(f"{name} must be a positive {'integer' if whole else 'number'}, got {value!r}")


@dataclass(frozen=True)
class SandboxResult:
    """The result of one test."""

    status: str
    """``"passed"`` (for a program: it ended with status 0), ``"failed"``, ``"timeout"`` or ``"output"`` (it printed too much)."""
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

    Args:
        tests: ``{"code": source}`` runs after ``code`` in the same module and passes if it raises nothing. With ``{"input": text}``,
            ``code`` is a program and ``text`` its stdin; the program's output is returned, and the caller compares it.
        limits: for all tests together.
        allow_unsandboxed: run the code also if a layer of the sandbox is missing.
        pretend_missing: the name of a layer to report as missing, for tests of this function.

    Raises:
        SandboxUnavailable: if a layer is missing and ``allow_unsandboxed`` is off.
        SandboxError: if the sandbox failed before the first test.
    """
    job = dict(
        code=code, tests=list(tests), allow_unsandboxed=allow_unsandboxed, missing=pretend_missing, **asdict(limits)
    )
    # The base interpreter, because the sandbox has no virtual environment; the options keep out site-packages and environment.
    python = [getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", "-B", "-X", "utf8"]
    streams = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with subprocess.Popen([*python, _CHILD], **streams, env={}, cwd="/", start_new_session=True) as launcher:
        answers = []
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            # stdin stays open until this call ends: its end tells the launcher that this process has died.
            launcher.stdin.write(json.dumps(job).encode() + b"\n")
            launcher.stdin.flush()
            # A line without its end is of a driver that was killed.
            answers = [json.loads(line) for line in launcher.stdout if line.endswith(b"\n")]
            launcher.wait(limits.total_seconds + _GRACE_SECONDS)
        launcher.kill()
    return _results(answers, len(tests), allow_unsandboxed)


def _results(answers: list[dict], num_tests: int, allow_unsandboxed: bool) -> list[SandboxResult]:
    """The result of each test. An error of the sandbox counts only if no test had begun: later, the code can be its cause."""
    if not answers:
        raise SandboxError("the sandbox ended before the first test")
    for answer in answers[:2]:  # the first has the missing layers, the second the result of the first test
        if "error" in answer:
            raise SandboxError(f"the sandbox failed: {answer['error']}")
    if answers[0]["missing"] and not allow_unsandboxed:
        raise SandboxUnavailable(
            f"this machine cannot give the sandbox {', '.join(answers[0]['missing'])}, so the code of completions is not run; "
            "on a machine where untrusted code can do no harm, allow_unsandboxed: true runs it with the remaining layers"
        )
    results = [SandboxResult(answer["status"], answer["output"]) for answer in answers[1:] if "error" not in answer]
    # The code may have ended the driver, by using up the machine's memory for example: tests that did not run count as failed.
    return results + [SandboxResult("failed", "")] * (num_tests - len(results))
