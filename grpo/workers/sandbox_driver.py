"""The program that confines itself and then runs tests: ``python -I -S sandbox_driver.py``.

Its first process, the *launcher*, stays outside the sandbox. It waits for the *driver*, process 1
of the sandbox. The driver runs no untrusted code: it forks one child per test and kills all other
processes of the sandbox after each test. Because the driver is process 1, has no ``/proc`` and
cannot be traced, code in the sandbox cannot kill or change it. Every process of the sandbox dies
with the driver, the driver with the launcher, and the launcher with the process that started it.

Stdin has the job as JSON. Stdout has lines of JSON: first ``{"missing": [...]}``, the layers that
this machine cannot provide (if there are any, nothing follows unless that is allowed), then per
test ``{"status": ..., "output": ...}``, for a statement the status alone, or ``{"error": ...}`` if
the driver itself fails.
"""

import builtins
import contextlib
import gc
import json
import math
import os
import resource
import signal
import sys
import time
from types import ModuleType, SimpleNamespace

# The folder is last in the path, and not for long: none of its files replaces a standard module,
# and the code of a test cannot import one.
sys.path.append(os.path.dirname(__file__))
import sandbox_linux as linux

del sys.path[-1], sys.modules["sandbox_linux"]


def main() -> None:
    """Confine this process, run each test of the job in a child, and print the results."""
    # If the caller ignores SIGCHLD, so does this process, and waitpid would find no child.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Process 1 of a namespace gets only the signals that it handles. Python handles SIGINT, by
    # which a test could interrupt the driver.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job = SimpleNamespace(**json.load(sys.stdin))

    # The order matters: mounts need root, the change of the user needs a capability, and seccomp
    # denies mounts.
    missing = []
    layers = {
        "namespaces and a file tree of its own": lambda: linux.enter_namespaces(job.disk_mb),
        "an unprivileged user": linux.drop_user,
        "no capabilities": linux.drop_capabilities,
        "seccomp": linux.deny_system_calls,
    }
    for layer, enter in layers.items():
        try:
            enter()
        except Exception as error:
            # Whatever the reason is, this layer is missing: the kernel refuses it, this is not
            # Linux, or the table of system calls has no column for this machine.
            missing.append(f"{layer} ({error})")

    # If the process that started this one has ended, this fails and no code is run.
    print(json.dumps({"missing": missing}), flush=True)
    if missing and not job.allow_unsandboxed:
        return
    try:
        if missing:
            # The working folder of the sandbox may be missing, too.
            os.mkdir(job.folder, 0o700)
            os.chdir(job.folder)
        os.environ.clear()
        os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd())
        deadline = time.monotonic() + job.total_seconds
        for test in job.tests:
            print(json.dumps(_run_test(job, test, deadline)), flush=True)
    except Exception as error:
        print(json.dumps({"error": repr(error)}), flush=True)


def _run_test(job: SimpleNamespace, test: dict, deadline: float) -> dict:
    """Run one test in a child, and kill every process that the test leaves behind."""
    start = time.monotonic()
    if start >= deadline:
        return {"status": "timeout"}
    deadline = min(deadline, start + job.test_seconds)

    # The child writes this secret when a statement has passed. Code that ends the child early, by
    # os._exit(0), fails.
    secret = os.urandom(16)
    is_statement = "code" in test
    output, output_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(output)
            _run_code(job, test, output_end)
            if is_statement:
                os.write(output_end, secret)
                os._exit(0)
        except BaseException:
            os._exit(1)
        # A program ends as any other: threads are waited for, atexit functions called, buffers
        # written.
        raise SystemExit
    os.close(output_end)

    # Waits for the child, not for the end of its output: code can close the pipe, and a daemon can
    # keep it open.
    os.set_blocking(output, False)
    limit = job.output_kb * 1024
    text = b""
    ended = 0
    code = 0
    while not ended and len(text) <= limit and time.monotonic() < deadline:
        time.sleep(0.0005)
        ended, code = os.waitpid(child, os.WNOHANG)
        # After the wait, so that the last turn reads all that the child has left in the pipe.
        with contextlib.suppress(BlockingIOError):
            text += os.read(output, limit + 1)
    os.close(output)
    _kill_everything()

    has_passed = text == secret if is_statement else code == 0
    status = "passed" if has_passed else "failed"
    if len(text) > limit:
        status = "output"
    elif not ended:
        status = "timeout"
    # The output of a statement may be the secret.
    if is_statement:
        return {"status": status}
    return {"status": status, "output": text[:limit].decode(errors="replace")}


def _kill_everything() -> None:
    """Kill all other processes of the sandbox, until none is left."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while True:
            processes = ["-1"]
            # Without a process namespace, -1 would be all processes of this user. Orphans have
            # become children of this process.
            if os.getpid() != 1:
                with open("/proc/thread-self/children") as file:
                    processes = file.read().split()
            for process in processes:
                os.kill(int(process), signal.SIGKILL)
            os.waitpid(-1, 0)


def _run_code(job: SimpleNamespace, test: dict, output: int) -> None:
    """Run the code and its test in this process. An exception is a failed test."""
    # Without a process namespace it could outlive the driver, or end it by a signal to its group.
    linux.end_with_parent()
    os.setsid()
    # The streams of the driver lead out of the sandbox. They end here, before any code runs.
    null = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    is_program = "input" in test
    if is_program:
        # A file: some programs ask for the size of stdin.
        with open(".stdin", "x+") as file:
            os.unlink(file.name)
            file.write(test["input"])
            file.seek(0)
            os.dup2(file.fileno(), 0)
        os.dup2(output, 1)

    # Against allocation, loops, large files, fork bombs and core dumps.
    limits = {
        resource.RLIMIT_AS: job.memory_mb << 20,
        resource.RLIMIT_CPU: math.ceil(job.test_seconds) + 1,
        resource.RLIMIT_FSIZE: job.disk_mb << 20,
        # The driver is not part of the test.
        resource.RLIMIT_NPROC: job.processes + 1,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        # ValueError: the machine has set a lower limit, which stays.
        with contextlib.suppress(ValueError):
            resource.setrlimit(limit, (value, value))

    # Opened anew: descriptor 0 may be a file now, which can seek, and was a pipe.
    sys.stdin = sys.__stdin__ = os.fdopen(0)
    sys.stdout.reconfigure(errors="strict")
    # The module site, which -S leaves out, defines these.
    builtins.exit = builtins.quit = sys.exit
    sys.argv = ["solution.py"]
    module = ModuleType("__main__" if is_program else "solution")
    sys.modules[module.__name__] = module
    try:
        exec(compile(job.code, "solution.py", "exec"), module.__dict__)
    except SystemExit as end:
        # sys.exit() ends a program well, and does not keep a statement from running after it.
        if end.code not in (None, 0):
            raise
    if not is_program:
        exec(compile(test["code"], "test.py", "exec"), module.__dict__)
    # The interpreter ends three times as fast if it does not search the objects of the driver.
    gc.freeze()


if __name__ == "__main__":
    main()
