"""Run code that nobody has read: Python in a sandbox of the operating system, thrown away after use.

What confines it, and what does not, is in ``docs/rewards.md``. Where the machine cannot give one of the layers,
:class:`SandboxUnavailable` says which, and nothing is run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

_CHILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox_child.py")
_GRACE_SECONDS = 10.0
"""The launcher ends its sandbox by itself; this much later it is held to be stuck."""


class SandboxUnavailable(ValueError):
    """A layer of the sandbox cannot be had on this machine, and running without it was not allowed."""


class SandboxError(RuntimeError):
    """The sandbox itself failed; it says nothing about the code."""


@dataclass(frozen=True)
class Limits:
    """Of one sandbox. Memory is per process: ``processes * memory_mb`` is the most it can take, and ``disk_mb`` comes on top."""

    test_seconds: float = 2.0
    total_seconds: float = 6.0
    memory_mb: int = 512
    disk_mb: int = 16
    processes: int = 8
    """Processes and threads of one test, the first one included."""
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            whole = name not in ("test_seconds", "total_seconds")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 1e6:
                raise ValueError(f"{name} must be a positive {'integer' if whole else 'number'}, got {value!r}")


@dataclass(frozen=True)
class Verdict:
    """Of one test."""

    status: str
    """``"passed"`` (a program: ended well), ``"failed"``, ``"timeout"`` or ``"output"`` (printed too much)."""
    output: str
    """What a program printed."""


def run_python(
    code: str,
    tests: Sequence[dict[str, str]],
    limits: Limits = Limits(),
    *,
    allow_unsandboxed: bool = False,
    pretend_missing: str = "",
) -> list[Verdict]:
    """Run ``code`` once per test, each time in a process of its own.

    Args:
        code: Python source.
        tests: ``{"code": source}``, run after ``code`` in the same module and passed if it raises nothing; or
            ``{"input": text}``: ``code`` is a program, ``text`` its stdin; its output is returned for the caller to judge.
        limits: of all of it together.
        allow_unsandboxed: run also where a layer of the sandbox is missing.
        pretend_missing: for tests: a layer to treat as missing.

    Raises:
        SandboxUnavailable: if a layer is missing and that was not allowed.
        SandboxError: if the sandbox failed.
    """
    job = {
        **asdict(limits),
        "code": code,
        "tests": list(tests),
        "allow_unsandboxed": allow_unsandboxed,
        "missing": pretend_missing,
    }
    launcher = subprocess.Popen(
        # The base interpreter: isolated from the environment and from site-packages, it needs no virtual environment.
        [getattr(sys, "_base_executable", None) or sys.executable, "-I", "-S", "-B", "-X", "utf8", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    with launcher:
        try:
            # stdin stays open until we are done: its end tells the launcher that we are gone.
            launcher.stdin.write(json.dumps(job).encode() + b"\n")
            launcher.stdin.flush()
            answers = [json.loads(line) for line in launcher.stdout]
            launcher.wait(limits.total_seconds + _GRACE_SECONDS)
        except (BrokenPipeError, json.JSONDecodeError, subprocess.TimeoutExpired) as error:
            launcher.kill()
            raise SandboxError(f"the sandbox ended in the middle of it: {error}") from error
    return _verdicts(answers, len(tests), allow_unsandboxed)


def _verdicts(answers: list[dict], tests: int, allow_unsandboxed: bool) -> list[Verdict]:
    for answer in answers:
        if "error" in answer:
            raise SandboxError(f"the sandbox failed: {answer['error']}")
    if not answers or "missing" not in answers[0]:
        raise SandboxError("the sandbox ended before it had begun")
    if answers[0]["missing"] and not allow_unsandboxed:
        raise SandboxUnavailable(
            f"this machine cannot give the sandbox {', '.join(answers[0]['missing'])}, so the completions' code is not run; "
            "where it may do harm, allow_unsandboxed: true runs it with the layers that are left"
        )
    verdicts = [Verdict(answer["status"], answer["output"]) for answer in answers[1:]]
    # Without a process namespace the code can kill its driver; it gains nothing by it.
    return verdicts + [Verdict("failed", "")] * (tests - len(verdicts))
