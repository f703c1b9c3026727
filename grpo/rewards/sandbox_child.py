"""The processes of the sandbox: ``python -I -S sandbox_child.py``, started by ``sandbox.py``. Uses the standard library only.

The *launcher* stays outside the sandbox. It kills the sandbox at the time limit, or when its stdin ends because the process that started
it has died. The *driver* is process 1 of the sandbox. It runs no untrusted code: it forks one child per test and kills all other
processes of the sandbox after each test. Because the driver is process 1, has no ``/proc`` and cannot be traced, code in the sandbox
cannot kill or change it, and every process of the sandbox dies when the driver dies.

Stdout has lines of JSON: first ``{"missing": [...]}``, the layers that this machine cannot provide (without ``allow_unsandboxed`` nothing
follows if there are any), then ``{"status": ..., "output": ...}`` per test, or ``{"error": ...}`` if the driver itself fails.
"""

import atexit
import builtins
import contextlib
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import types

sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # last: no file of that folder replaces a standard module
import sandbox_linux as linux

del sys.path[-1], sys.modules["sandbox_linux"]

LAUNCH_SECONDS = 5.0
"""Time limit for setting up, in addition to the time limit of the tests."""


def main() -> None:
    """The launcher: read the job, create the sandbox, wait for the driver, clean up."""
    job = json.loads(_read_line(0))
    own = linux.FIRST_PRIVATE_UID + os.getpid() if os.geteuid() == 0 else os.geteuid()
    missing: list[str] = []
    folder = tempfile.mkdtemp(prefix="grpo-sandbox-")
    for uid in (own, linux.NOBODY, os.geteuid()):  # in a container, root may be able to use few other user ids, or none
        with contextlib.suppress(OSError):
            os.chown(folder, uid, -1)
            break
    results = os.dup(1)
    try:
        _try_layer(missing, "namespaces", linux.enter_namespaces, uid)
        if missing:
            # Without a process namespace: make this process the parent of all orphans of the sandbox, so that it can find them.
            _try_layer([], "", linux.prctl, linux.PR_SET_CHILD_SUBREAPER, 1)
        driver = os.fork()
        if driver == 0:
            _drive(job, missing, folder, uid, results)
        os.close(results)
        _wait(driver, job["total_seconds"] + LAUNCH_SECONDS)
        if missing:
            _kill_descendants()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_line(descriptor: int) -> bytes:
    # Not sys.stdin: bytes that it reads ahead would be in the memory of every child, and poll() must still see the end of the file.
    chunks = [b""]
    while not chunks[-1].endswith(b"\n"):
        chunks.append(os.read(descriptor, 1 << 16))
        if not chunks[-1]:
            sys.exit(1)
    return b"".join(chunks)


def _try_layer(missing: list[str], layer: str, function, *arguments) -> None:
    """Set up a layer of the sandbox; add its name to ``missing`` if that fails."""
    try:
        function(*arguments)
    except (OSError, AttributeError) as error:  # AttributeError: not Linux
        missing.append(f"{layer} ({error.strerror or error})" if isinstance(error, OSError) else layer)


def _wait(driver: int, seconds: float) -> None:
    """Wait until the driver ends, the time is over or stdin ends. With a process namespace, no process of the sandbox is left then."""
    deadline = time.monotonic() + seconds
    poller = select.poll()
    poller.register(0, 0)  # reports POLLHUP only
    while time.monotonic() < deadline and not poller.poll(10):
        if os.waitpid(driver, os.WNOHANG)[0]:
            return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(driver, signal.SIGKILL)
    os.waitpid(driver, 0)


def _kill_descendants() -> None:
    """Kill the processes of a sandbox without a process namespace: all descendants, because orphans become children of a subreaper."""
    deadline = time.monotonic() + LAUNCH_SECONDS
    while time.monotonic() < deadline:
        children = ""
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            children = file.read()
        for child in children.split():
            with contextlib.suppress(OSError):
                os.kill(int(child), signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _drive(job: dict, missing: list[str], folder: str, uid: int, results: int) -> None:
    """The driver: confine this process, then run each test in a child. Never returns."""
    status = 1
    try:
        isolated = not missing
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 of a namespace gets only the signals that it handles
        with contextlib.suppress(OSError, AttributeError):
            linux.end_with_parent()
        # Without memory, the kernel ends the sandbox and not the reward worker or the trainer.
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        if isolated:
            _try_layer(missing, "a file tree of its own", linux.enter_private_root, folder, uid, job["disk_mb"])
        work = linux.WORK if not missing else folder
        if os.geteuid() == 0:
            if uid:
                _try_layer(missing, "an unprivileged user", linux.drop_user, uid)
            else:
                missing.append("an unprivileged user")
            with contextlib.suppress(OSError, AttributeError):  # a change of user clears the parent-death signal
                linux.end_with_parent()
        _try_layer(missing, "no capabilities", linux.drop_capabilities)
        if job["missing"]:  # pretend_missing of run_python
            missing.append(job["missing"])
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.chdir(work)
        os.environ.clear()
        os.environ.update(HOME=work, TMPDIR=work)
        tempfile.tempdir = None  # the launcher's folder, remembered
        _try_layer(missing, "seccomp", _check_in_child, linux.deny_system_calls)
        _write(results, {"missing": missing})
        if not missing or job["allow_unsandboxed"]:
            deadline = time.monotonic() + job["total_seconds"]
            for test in job["tests"]:
                limit = min(deadline, time.monotonic() + job["test_seconds"])
                _write(results, _run_test(job, test, limit, results, isolated))
        status = 0
    except BaseException as error:
        _write(results, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(status)


def _check_in_child(function) -> None:
    """Call ``function`` in a child: the driver must not be confined, it still has to fork. ``OSError`` if the call fails."""
    child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise OSError(0, "the kernel refuses the filter")


def _write(descriptor: int, message: dict) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _run_test(job: dict, test: dict, deadline: float, results: int, isolated: bool) -> dict:
    """Run one test in a child, and kill every process that the test leaves behind. An error while it runs is a failed test."""
    if time.monotonic() >= deadline:
        return {"status": "timeout", "output": ""}
    # The child writes this secret when a statement has passed. Code that ends the child early, by os._exit(0), cannot pass.
    secret = os.urandom(16)
    report, report_end = os.pipe()
    output, output_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(results), os.close(report), os.close(output)
            os.setsid()
            _test_process(job, test, output_end)
            os.write(report_end, secret)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(report_end), os.close(output_end)
    status, text = "failed", b""
    with contextlib.suppress(Exception):
        status, text = _read_output(child, output, deadline, job["output_kb"] * 1024)
    _kill_everything(child, isolated)
    os.set_blocking(report, False)
    with contextlib.suppress(BlockingIOError):
        if status == "ended":
            status = "passed" if "input" in test or os.read(report, 64) == secret else "failed"
    os.close(report), os.close(output)
    return {"status": "failed" if status == "ended" else status, "output": text.decode(errors="replace")}


def _read_output(child: int, output: int, deadline: float, limit: int) -> tuple[str, bytes]:
    """Read the child's output until the child ends ("ended" with status 0), prints more than ``limit`` bytes, or reaches its deadline."""
    text = b""
    os.set_blocking(output, False)
    ended = code = 0
    while True:
        if time.monotonic() > deadline:
            return "timeout", b""
        ended, code = (ended, code) if ended else os.waitpid(child, os.WNOHANG)
        if select.select([output], [], [], 0 if ended else 0.005)[0]:
            chunk = os.read(output, 1 << 16)
            text += chunk
            if len(text) > limit:
                return "output", b""
            if chunk:
                continue
            if not ended:
                time.sleep(0.002)  # the child has closed its output and is still running
        if ended:
            return "failed" if code else "ended", text


def _kill_everything(child: int, isolated: bool) -> None:
    if (isolated and os.getpid() == 1) or os.geteuid() >= linux.FIRST_PRIVATE_UID:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # every other process of the sandbox, or of its own user id
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _set_resource_limits(job: dict) -> None:
    limits = {
        "RLIMIT_AS": job["memory_mb"] << 20,
        "RLIMIT_CPU": math.ceil(job["test_seconds"]) + 1,
        "RLIMIT_FSIZE": job["disk_mb"] << 20,
        "RLIMIT_NPROC": job["processes"] + 1,  # the driver is not part of the test
        "RLIMIT_NOFILE": 64,
        **dict.fromkeys(["RLIMIT_CORE", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE"], 0),
    }
    for name, value in limits.items():
        if hasattr(resource, name):
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))


def _test_process(job: dict, test: dict, output: int) -> None:
    """Run the code and its test in this process. Returns if the test passes, raises if it fails."""
    is_program = "input" in test
    if is_program:
        with tempfile.TemporaryFile(dir=".", buffering=0) as file:  # a file: some programs ask for the size of stdin
            file.write(test["input"].encode())
            file.seek(0)
            os.dup2(file.fileno(), 0), os.dup2(output, 1)
    os.close(output)
    _set_resource_limits(job)
    with contextlib.suppress(OSError, AttributeError):  # then the driver has reported the layer as missing
        linux.deny_system_calls()
    streams = [os.fdopen(number, mode) for number, mode in enumerate("rww")]
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams
    builtins.exit = builtins.quit = sys.exit  # the module site, which is not imported, defines them
    sys.argv = ["solution.py"]
    module = types.ModuleType("__main__" if is_program else "solution")
    sys.modules[module.__name__] = module
    try:
        exec(compile(job["code"], "solution.py", "exec"), module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    if not is_program:
        exec(compile(test["code"], "test.py", "exec"), module.__dict__)
        return
    # The end of a program: the interpreter waits for threads, calls what is registered, and writes what is buffered.
    for thread in [t for t in threading.enumerate() if t is not threading.current_thread() and not t.daemon]:
        thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, streams[1]):
        with contextlib.suppress(Exception):  # the program may have closed or replaced it
            stream.flush()


if __name__ == "__main__":
    main()
