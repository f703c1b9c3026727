"""The processes of the sandbox: ``python -I -S sandbox_child.py``, started by ``sandbox.py``.

The *launcher* stays outside the sandbox and waits for the *driver*, process 1 of the sandbox. The driver runs no
untrusted code: it forks one child per test and kills all other processes of the sandbox after each test. Because the
driver is process 1, has no ``/proc`` and cannot be traced, code in the sandbox cannot kill or change it. Every process
of the sandbox dies with the driver, the driver with the launcher, and the launcher with the process that started it.

Stdin has the job as JSON. Stdout has lines of JSON: first ``{"missing": [...]}``, the layers that this machine cannot
provide (if there are any, nothing follows unless that is allowed), then ``{"status": ..., "output": ...}`` per test, or
``{"error": ...}`` if the driver itself fails.
"""

import builtins
import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import sys
import time
import types

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # last: no file of that folder replaces a standard module
import sandbox_linux as linux

del sys.path[-1], sys.modules["sandbox_linux"]


def main() -> None:
    """Confine this process, run each test of the job in a child, and report the results."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller may have ignored it; then no child could be waited for
    job = json.load(sys.stdin)
    layers = {
        "namespaces": linux.enter_namespaces,
        "a file tree of its own": lambda: linux.enter_private_root(job["disk_mb"]),
        "an unprivileged user": linux.drop_user,
        "no capabilities": linux.drop_capabilities,
        "seccomp": linux.deny_system_calls,
    }
    missing = [job["missing"]] if job["missing"] else []
    for layer, enter in layers.items():
        try:
            enter()
        except (OSError, AttributeError, KeyError) as error:  # not Linux, or a machine without a table of system calls
            missing.append(f"{layer} ({error})")
    results = os.fdopen(os.dup(1), "w")
    # If the process that started this one has ended, this fails and no code is run.
    print(json.dumps({"missing": missing}), file=results, flush=True)
    if missing and not job["allowed"]:
        return
    try:
        if missing:
            os.mkdir(job["folder"], 0o700)
            os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd())
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 of a namespace gets only the signals that it handles
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        deadline = time.monotonic() + job["total_seconds"]
        for test in job["tests"]:
            print(json.dumps(_run_test(job, test, deadline, results)), file=results, flush=True)
    except Exception as error:
        print(json.dumps({"error": repr(error)}), file=results, flush=True)


def _run_test(job: dict, test: dict, deadline: float, results) -> dict:
    """Run one test in a child, and kill every process that the test leaves behind."""
    if time.monotonic() >= deadline:
        return {"status": "timeout", "output": ""}
    deadline = min(deadline, time.monotonic() + job["test_seconds"])
    # The child writes this secret when a statement has passed. Code that ends the child early, by os._exit(0), fails.
    secret = os.urandom(16)
    output, output_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            results.close()
            os.close(output)
            _run_code(job, test, output_end, secret)
        except BaseException:
            os._exit(1)
        raise SystemExit  # ends as any program: threads are waited for, atexit functions called, buffers written
    os.close(output_end)
    os.set_blocking(output, False)
    text, ended, code, limit = b"", 0, 0, job["output_kb"] * 1024
    while not ended and len(text) <= limit and time.monotonic() < deadline:
        select.select([output], [], [], 0.001)
        ended, code = os.waitpid(child, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            if chunk := os.read(output, limit + 1):
                text += chunk
            elif not ended:
                time.sleep(0.001)  # the child has closed its output and is still running
    os.close(output)
    _kill_everything()
    if len(text) > limit:
        return {"status": "output", "output": ""}
    if not ended:
        return {"status": "timeout", "output": ""}
    if "input" in test:
        return {"status": "failed" if code else "passed", "output": text.decode(errors="replace")}
    return {"status": "passed" if text == secret and not code else "failed", "output": ""}


def _kill_everything() -> None:
    """Kill all other processes of the sandbox; without a process namespace all descendants: orphans become children."""
    with contextlib.suppress(ChildProcessError):  # then none is left
        while True:
            for process in [-1] if os.getpid() == 1 else _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(process) for process in file.read().split()]


def _run_code(job: dict, test: dict, output: int, secret: bytes) -> None:
    """Run the code and its test in this process. It returns after a program and ends after a statement that passed."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)  # without a process namespace it could outlive the driver
    os.setsid()
    if "input" in test:
        with open(secret.hex(), "x+b") as file:  # a file: some programs ask for the size of stdin
            os.unlink(file.name)
            file.write(test["input"].encode())
            file.seek(0)
            os.dup2(file.fileno(), 0)
        os.dup2(output, 1)
    limits = {
        resource.RLIMIT_AS: job["memory_mb"] << 20,
        resource.RLIMIT_CPU: math.ceil(job["test_seconds"]) + 1,
        resource.RLIMIT_FSIZE: job["disk_mb"] << 20,
        resource.RLIMIT_NPROC: job["processes"] + 1,  # the driver is not part of the test
        resource.RLIMIT_NOFILE: 64,
        **dict.fromkeys([resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE], 0),
    }
    for limit, value in limits.items():
        with contextlib.suppress(ValueError):  # a lower limit is set
            resource.setrlimit(limit, (value, value))
    streams = [os.fdopen(number, mode) for number, mode in enumerate("rww")]
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams
    builtins.exit = builtins.quit = sys.exit  # the module site, which is not imported, defines them
    sys.argv = ["solution.py"]
    module = types.ModuleType("__main__" if "input" in test else "solution")
    sys.modules[module.__name__] = module
    try:
        exec(compile(job["code"], "solution.py", "exec"), module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if "code" in test:
        exec(compile(test["code"], "test.py", "exec"), module.__dict__)
        os.write(output, secret)
        os._exit(0)
    gc.freeze()  # the interpreter ends three times as fast if it does not search the objects of the driver


if __name__ == "__main__":
    main()
