"""The program that confines itself and then runs tests: ``python -I -S sandbox_driver.py``.

Its first process, the *launcher*, stays outside the sandbox. It waits for the *driver*, process 1
of the sandbox. The driver runs no untrusted code: it forks one child per test and kills all other
processes of the sandbox after each test. Because the driver is process 1, has no ``/proc`` and
cannot be traced, code in the sandbox cannot kill or change it. Every process of the sandbox dies
with the driver, the driver with the launcher, and the launcher with the process that started it.
If the machine has no process namespaces and ``allow_unsandboxed`` is on, the first process is the
driver itself, and there is no launcher.

Stdin has the job as JSON. Stdout has messages, each a line of JSON:

- ``{"missing": [...]}`` names the layers that this machine cannot provide. If there are any, no
  other message follows, unless ``allow_unsandboxed`` is on.
- ``{"status": ..., "output": ...}`` follows for each test; the output only for a program.
- ``{"error": ...}`` is the last message if the driver itself fails.

``sandbox.py`` says what a statement test and a program test are.
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

# This folder is last in the path, so that none of its files replaces a standard module.
sys.path.append(os.path.dirname(__file__))
import sandbox_linux as linux

# The code of a test must not import files of this folder.
sys.path.pop()
del sys.modules["sandbox_linux"]


def main() -> None:
    """Confine this process, run each test of the job in a child, and print the results."""
    # A process inherits which signals are ignored. If the trainer ignored SIGCHLD, the kernel would
    # drop the exit status of each child, and waitpid could not return it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Processes of a namespace can send its process 1 only the signals for which it has a handler.
    # Python installs a handler for SIGINT, so that a test could interrupt the driver.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    job = SimpleNamespace(**json.load(sys.stdin))

    # The order matters. Mounts need a capability, which the change of the user takes away; where
    # enter_namespaces() has to change the user first, a user namespace gives the capability back.
    # The change of the user needs capabilities, which drop_capabilities() takes away. The seccomp
    # filter denies mounts, and needs PR_SET_NO_NEW_PRIVS, which drop_capabilities() sets.
    # enter_namespaces() forks: the launcher stays in that function, and only the child, which is
    # the driver, returns from it.
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
            # The layer is missing, whatever the reason: the kernel refuses it, the libc of another
            # system than Linux lacks the function, or the table of system calls has no column for
            # this machine.
            missing.append(f"{layer} ({error})")

    # If nobody reads stdout any more, this raises an exception and no code is run.
    print(json.dumps({"missing": missing}), flush=True)
    if missing and not job.allow_unsandboxed:
        return
    try:
        if missing:
            # The missing layer may be the file tree with the working folder of the sandbox.
            os.mkdir(job.folder, 0o700)
            os.chdir(job.folder)
        # The environment was empty when Python started, and Python may have added LC_CTYPE.
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
    test_deadline = min(deadline, start + job.test_seconds)

    # The child writes this secret when a statement has passed. So code that ends the child early,
    # by os._exit(0), does not pass. Code that looks for the secret in its memory can forge a pass.
    secret = os.urandom(16)
    is_statement = "code" in test
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            _run_code(job, test, write_end)
            if is_statement:
                os.write(write_end, secret)
                # The statement has passed. The threads and atexit functions of the code are no part
                # of it, so they are not waited for.
                os._exit(0)
        except BaseException:
            # Otherwise main() would catch the exception in this child, which would then end with
            # status 0, as if the program had passed.
            os._exit(1)
        # The usual end of Python: the threads, atexit functions and buffers of a program are part
        # of the program. main() does not catch SystemExit.
        raise SystemExit
    os.close(write_end)

    # The loop waits for the end of the child, not for the end of its output: code can close the
    # pipe, and a daemon can keep the pipe open.
    os.set_blocking(read_end, False)
    limit = job.output_kb * 1024
    text = b""
    ended_pid = 0
    while not ended_pid and len(text) <= limit and time.monotonic() < test_deadline:
        # At most this much later, the end of the child is noticed. Meanwhile the core is free.
        time.sleep(0.0005)
        ended_pid, wait_status = os.waitpid(child, os.WNOHANG)
        # After waitpid, so that the last read gets all that the child has left in the pipe.
        with contextlib.suppress(BlockingIOError):
            # One byte more than the limit shows that the output is too large.
            text += os.read(read_end, limit + 1)
    os.close(read_end)
    _kill_everything()

    if len(text) > limit:
        status = "output"
    elif not ended_pid:
        status = "timeout"
    elif is_statement:
        status = "passed" if text == secret else "failed"
    else:
        status = "passed" if wait_status == 0 else "failed"
    # The pipe of a statement test is meant for the secret, so its text is no output.
    if is_statement:
        return {"status": status}
    return {"status": status, "output": text[:limit].decode(errors="replace")}


def _kill_everything() -> None:
    """Kill all other processes of the sandbox, until none is left."""
    # When none is left, os.kill or os.waitpid raises, which ends the loop.
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while True:
            if os.getpid() == 1:
                # -1 means all other processes of the namespace.
                os.kill(-1, signal.SIGKILL)
            else:
                # Without a process namespace, -1 would mean all processes of this user. Orphans of
                # the test have become children of this process, by PR_SET_CHILD_SUBREAPER in
                # enter_namespaces(). Only Linux has this file: on other systems the driver fails
                # here, and no test has a result.
                with open("/proc/thread-self/children") as file:
                    children = file.read().split()
                for child in children:
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _run_code(job: SimpleNamespace, test: dict, output: int) -> None:
    """Run the code and its test in this child. If the code raises, so does this function.

    Args:
        output: write end of the pipe for the output of a program.
    """
    # Without a process namespace, this child could outlive the driver, or end the driver by a
    # signal to the process group of both.
    linux.end_with_parent()
    os.setsid()
    # The driver's streams lead out of the sandbox, so they are replaced before any code runs.
    null = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    is_program = "input" in test
    if is_program:
        # Stdin is a file, not a pipe, since some programs ask for the size of stdin. An earlier
        # test may have left something of this name, such as a link or a pipe. "x" does not open
        # it, but raises, so that this test fails.
        with open(".stdin", "x+") as file:
            os.unlink(file.name)
            file.write(test["input"])
            file.seek(0)
            os.dup2(file.fileno(), 0)
        os.dup2(output, 1)

    limits = {
        resource.RLIMIT_AS: job.memory_mb << 20,
        # CPU time of all threads of a process together, in case the driver cannot kill the test. At
        # least one second more than the test's time: a busy thread meets the driver's deadline
        # first, and counts as timeout.
        resource.RLIMIT_CPU: math.ceil(job.test_seconds) + 1,
        resource.RLIMIT_FSIZE: job.disk_mb << 20,
        # The kernel counts the processes of a user. The driver has the same user as the test, hence
        # one more. If enter_namespaces() needed a user namespace, the launcher has this user, too,
        # and a test can have one process fewer than job.processes.
        resource.RLIMIT_NPROC: job.processes + 1,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        # If the machine has set a lower limit, setrlimit raises ValueError, and that limit stays.
        with contextlib.suppress(ValueError):
            resource.setrlimit(limit, (value, value))

    # Python opened sys.stdin on a pipe, which cannot seek. Descriptor 0 is now another file.
    sys.stdin = sys.__stdin__ = os.fdopen(0)
    # In UTF-8 mode (-Xutf8), stdout accepts text that is no valid Unicode. Without this mode and in
    # a UTF-8 locale, a program that prints such text fails. It shall fail here, too.
    sys.stdout.reconfigure(errors="strict")
    # The module site defines these two, but -S leaves site out.
    builtins.exit = builtins.quit = sys.exit
    sys.argv = ["solution.py"]
    module = ModuleType("__main__" if is_program else "solution")
    sys.modules[module.__name__] = module
    try:
        exec(compile(job.code, "solution.py", "exec"), module.__dict__)
    except SystemExit as end:
        # A program may end by sys.exit() with status 0. A statement still has to run after it: code
        # must not skip its test.
        if end.code not in (None, 0):
            raise
    if not is_program:
        exec(compile(test["code"], "test.py", "exec"), module.__dict__)
    # At its end, the interpreter searches all objects for garbage. It ends three times as fast if
    # it leaves out those that exist now.
    gc.freeze()


if __name__ == "__main__":
    main()
