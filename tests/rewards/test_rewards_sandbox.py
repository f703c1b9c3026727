"""The sandbox attacked. Every attack is bounded itself, in case the sandbox fails."""

import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grpo.rewards import RewardRunner, RewardSpec, load_reward
from grpo.rewards.code import check_rows, extract_code, read_tests
from grpo.workers import sandbox
from grpo.workers.sandbox import (
    Limits,
    SandboxError,
    SandboxUnavailable,
    _results,
    run_python,
)

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the sandbox needs Linux"
)
ROOT = Path(__file__).parents[2]
LIMITS = Limits(
    test_seconds=1.5,
    total_seconds=4.0,
    memory_mb=256,
    disk_mb=4,
    processes=8,
    output_kb=256,
)
SHORT = dataclasses.replace(LIMITS, test_seconds=0.5)


@pytest.fixture(scope="module")
def sandboxed():
    """Skip where the machine has no sandbox to attack; whether it then refuses is tested below, on
    every machine."""
    try:
        run_python("", [{"code": ""}], LIMITS)
    except SandboxUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def attack(sandboxed, own_sandboxes):
    """``attack(code)`` -> its result. Then a second test must pass in the same sandbox, and no
    process may be left."""

    def attack(code, limits=LIMITS):
        result, after = run_python(
            f"if input() == 'attack':\n{textwrap.indent(code.strip(), ' ')}\n",
            [{"input": "attack"}, {"input": "-"}],
            limits,
        )
        assert after.status == "passed"
        assert not own_sandboxes()
        return result

    return attack


@pytest.fixture
def own_sandboxes(tmp_path, monkeypatch):
    """``own_sandboxes()`` -> the processes of this test's sandboxes, whose path no other test
    has."""
    folder = tmp_path / "workers"
    folder.symlink_to(ROOT / "grpo" / "workers")
    child = str(folder / "sandbox_driver.py")
    monkeypatch.setattr("grpo.workers.sandbox._DRIVER", child)

    def processes():
        found = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if child.encode() in (folder / "cmdline").read_bytes():
                        found.add(int(folder.name))
        return found

    return processes


def test_fraction_of_tests_passed(sandboxed):
    reward = load_reward("python_tests")
    code = "Sure:\n```python\ndef double(x):\n    return x * 2\n```\nThat is it."
    tests = [
        "assert double(2) == 4",
        "assert double('a') == 'aa'",
        "assert double(1) == 3",
        "assert triple(1) == 3",
    ]
    programs = [{"input": "2 3\n", "output": "5"}, {"input": "1 1", "output": "3\n"}]
    texts = [code, code, "no code here", "print(sum(map(int, input().split())))", code]
    rows = [tests, '["assert double(2) == 4"]', tests, programs, None]
    assert reward([""] * 5, texts, tests=rows) == [0.5, 1.0, 0.0, 0.5, None]
    assert reward(
        [""], [f"<answer>{code}</answer>"], tests=[tests[:1]], tag="answer", value=3.0
    ) == [3.0]
    assert reward([""], [code], tests=[tests[:1]], tag="answer") == [0.0]


def test_through_the_runner(sandboxed):
    spec = RewardSpec("python_tests", 1.0, {"total_seconds": 0.5})
    with contextlib.closing(RewardRunner([spec], timeout_s=10.0)) as runner:
        runner.check(["tests"])
        hang = "while True: pass"
        right = "def f(): return 1"
        texts = [
            right,
            hang,
            "import os\nos._exit(0)",
            "import sys\nsys.exit(0)",
            "def f(:",
        ]
        result = runner.score([""] * 5, texts, {"tests": [["assert f() == 1"]] * 5})
    # Code that hangs scores 0: it is the policy's fault.
    assert [row[0] for row in result.values] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert result.failures == [0]
    late = pytest.raises(
        ValueError, match=r"total_seconds = 0\.5 must be less than reward\.timeout_s"
    )
    with late, contextlib.closing(RewardRunner([spec], timeout_s=0.5)) as runner:
        runner.check({})


def test_what_programs_need_works(attack):
    result = attack("""
import asyncio, collections, decimal, itertools, json, math, random, re, tempfile, threading
async def main(): await asyncio.sleep(0.001); print("async")
asyncio.run(main())
thread = threading.Thread(target=print, args=("thread",)); thread.start()
with tempfile.TemporaryFile("w+") as f: f.write("file"); f.seek(0); print(f.read())
""")
    assert result.status == "passed"
    assert sorted(result.output.split()) == ["async", "file", "thread"]


IGNORE_SIGNALS = (
    "import signal, time\nfor s in set(range(1, 32)) - {9, 19}: signal.signal(s, signal.SIG_IGN)\n"
)
NO_END = {
    "drips output": IGNORE_SIGNALS + "while True: print('x', flush=True); time.sleep(0.001)",
    "other file": "import os; os.mkfifo('/sandbox/f'); os.dup2(os.open('/sandbox/f', os.O_RDWR), 1); os.read(1, 1)",
    "stops": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.parametrize("code", NO_END.values(), ids=NO_END)
def test_code_without_an_end(attack, code):
    start = time.perf_counter()
    assert attack(code, SHORT).status == "timeout"
    assert time.perf_counter() - start < 50, "without the limit it takes 60 s or never ends"


def test_many_processes(attack):
    result = attack("""
import os, time
begun = 0
for _ in range(200):
    try:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        begun += 1
    except OSError: break
print(begun)
""")
    assert int(result.output) < LIMITS.processes + 1


def test_sandboxes_do_not_count_the_processes_of_each_other(sandboxed):
    """Each sandbox starts as many processes as its limit allows, while the others run theirs."""
    code = """
import os, time
begun = 0
for _ in range(20):
    try:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        begun += 1
    except OSError: break
time.sleep(2)
print(begun)
"""
    limits = dataclasses.replace(LIMITS, test_seconds=20.0, total_seconds=30.0)

    def processes_begun(_):
        (result,) = run_python(code, [{"input": ""}], limits)
        return int(result.output)

    alone = processes_begun(0)
    # As another user than root, the launcher of the sandbox counts as one of its processes.
    assert alone >= limits.processes - 2
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(processes_begun, range(4)))
    assert together == [alone] * 4


def test_allocation(attack):
    result = attack(
        """
blocks = []
try:
    for _ in range(1000): blocks.append(bytearray(10 << 20))   # 10 GB, but no more
except MemoryError: pass
count = len(blocks); del blocks
print(count * 10)
""",
        dataclasses.replace(LIMITS, test_seconds=6, total_seconds=9),
    )
    assert 0 < int(result.output) <= LIMITS.memory_mb


def test_allocation_outside_the_address_space(attack):
    result = attack("""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
try: os.memfd_create("x"); print("memfd")
except OSError: pass
if libc.shmget(0, 1 << 20, 0o1600) >= 0: print("shm")
total = 0
try:
    for i in range(100):
        with open(f"/sandbox/{i}", "wb") as f: total += f.write(bytes(1 << 20))
except OSError: pass
print(total >> 20)
""")
    assert int(result.output) <= LIMITS.disk_mb


def test_flood_of_output(attack):
    result = attack("for _ in range(1024): print('x' * (1 << 20))")
    assert result.status == "output"
    assert result.output == "x" * (LIMITS.output_kb << 10)


@pytest.fixture
def open_folder():
    """One that everybody may read and write, so that it is the sandbox that protects it and not its
    permissions."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def test_reading_files_outside(attack, open_folder):
    secret = open_folder / "secret"
    secret.write_text("the secret")
    secret.chmod(0o644)
    result = attack(f"""
import os
for path in [{str(secret)!r}, {__file__!r}, "/etc/passwd", "/etc/hostname", "/proc/1/environ", "/proc/self/maps",
             "/dev/mem", {"/.." + str(secret)!r}]:
    try: print(path, open(path).read()[:50])
    except OSError: pass
print(sorted(os.listdir("/")), os.listdir("/sandbox"), os.environ.get("PATH"), len(os.environ))
""")
    assert "secret" not in result.output
    assert __file__ not in result.output
    assert "/proc" not in result.output
    assert "/etc/" not in result.output
    assert result.output.strip().endswith("[] None 2")


def test_writing_files_outside(attack, open_folder):
    victim = open_folder / "victim"
    victim.write_text("unharmed")
    victim.chmod(0o666)
    result = attack(f"""
import errno, os
for path in [{str(victim)!r}, {"/.." + str(victim)!r}, {str(open_folder / "new")!r}, "/new", "/etc/new",
             os.path.join(os.path.dirname(os.__file__), "new.py")]:
    try: open(path, "w").write("harm"); print("wrote", path)
    except OSError: pass
for path in ["/dev/null", "/etc/ld.so.cache", os.__file__]:
    try: os.chmod(path, 0o666)
    except OSError as error: print(path * (error.errno not in (errno.EROFS, errno.ENOENT)), end="")
open("/sandbox/mine", "w").write("x"); open("/tmp/mine too", "w").write("x"); open("/dev/null", "w").write("x")
""")
    assert result.status == "passed"
    assert result.output == ""
    assert victim.read_text() == "unharmed"
    assert not (open_folder / "new").exists()


def test_programs_of_the_host(attack):
    result = attack("""
import glob, os
programs = [p for p in [*glob.glob("/lib*/ld-*.so*"), "/usr/lib/git-core/git"] if os.access(p, os.X_OK)]
assert programs, "no program to try"
for program in programs:
    if os.fork() == 0:
        try: os.execv(program, [program, "--version"])
        except OSError: os._exit(0)
    os.wait()
""")
    assert result.status == "passed"
    assert result.output == ""


MOUNTS = """
import os, sys
from grpo.workers import sandbox_linux as linux
from grpo.workers.sandbox import Limits, run_python
linux.unshare(linux.CLONE_NEWNS)
linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)

def mount_two(folder):
    for path in (folder, folder + "/below"):
        os.makedirs(path, exist_ok=True)
        linux.mount("none", path, "tmpfs", linux.MS_NOEXEC, "mode=1777")
    attack = "try: open(path + '/new', 'w'); print('wrote')\\n except OSError as e: print(e.errno)"
    return f"for path in ({folder!r}, {folder + '/below'!r}):\\n {attack}"

attack = mount_two(os.path.dirname(os.__file__) + "/curses")
print(run_python(attack, [{"input": ""}], Limits())[0].output)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_mounts_below_the_libraries_are_read_only(sandboxed, tmp_path):
    """Two mounts, one below the other, in a mount namespace of the new process."""
    run = subprocess.run(
        [sys.executable, "-c", MOUNTS, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.stdout.split() == [str(errno.EROFS)] * 2, run.stderr


def test_sockets(attack):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = attack(f"""
import socket
for family, address in [(socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, "/sandbox/s")]:
    try: s = socket.socket(family); print("socket"); s.connect(address); print("connected")
    except OSError: pass
""")
    assert result.output == ""


def test_killing_the_parent_and_everything(attack):
    result = attack("""
import os, signal
for victim in (os.getppid(), 1, -1):
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
        try: os.kill(victim, number)
        except OSError: pass
print(os.getppid())
""")
    assert result.output == "1\n"
    attack(f"import os\ntry: os.kill({os.getpid()}, 9)\nexcept OSError: pass")


def test_altering_the_driver(attack):
    result = attack("""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0), libc.unshare(0x10000000), libc.setns(0, 0))
print(libc.mount(b"a", b"/sandbox", b"tmpfs", 0, b""))
import os, resource, signal, time
limits = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
changes = [lambda limit=limit: resource.prlimit(1, limit, (0, 0)) for limit in limits]
changes += [lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.sched_setaffinity(1, {0})]
changes += [lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))]
for change in changes:
    try: change(); print("changed")
    except OSError: pass
resource.setrlimit(resource.RLIMIT_STACK, (1 << 22, 1 << 22))
for number in range(1, 65):
    os.kill(1, number)
time.sleep(0.05)
""")
    assert result.output.split() == ["-1"] * 4


def test_a_driver_that_fails_while_the_code_runs_is_a_failed_test():
    passed = {"status": "passed", "output": ""}
    error = {"error": "OSError: no memory"}
    results = _results([{"missing": []}, passed, error], 3, False)
    assert [result.status for result in results] == ["passed", "failed", "failed"]
    for before_the_code in ([], [error], [{"missing": []}, error]):
        with pytest.raises(SandboxError):
            _results(before_the_code, 3, False)


def test_becoming_root(attack):
    result = attack("""
import os
print(os.getuid() == 0, os.getgid() == 0)
for become in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.chroot("/sandbox")):
    try: become(); print("became")
    except OSError: pass
""")
    assert "became" not in result.output
    assert os.getuid() or result.output.startswith("False")


def test_daemons(attack):
    result = attack("""
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in range(1, 32):
            try: signal.signal(s, signal.SIG_IGN)
            except Exception: pass
        time.sleep(60)
    os._exit(0)
print("left")
""")
    assert result.output == "left\n"  # and the fixture saw that it is gone


def test_a_forged_exit_is_no_pass(sandboxed):
    for code in (
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import atexit",
        "exit()",
    ):
        assert run_python(code, [{"code": "assert False"}], LIMITS)[0].status == "failed"


@pytest.mark.parametrize("killed", ["the process that started it", "its launcher"])
def test_the_sandbox_ends_with(sandboxed, own_sandboxes, killed):
    code = (
        f"from grpo.workers import sandbox; sandbox._DRIVER = {sandbox._DRIVER!r}; "
        "print(sandbox.run_python('while True: pass', [{'code': ''}], sandbox.Limits(60, 60)))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    # Process 1 and the test, which are also the first to end if the machine has no memory left; the
    # launcher is not.
    _wait_until(lambda: [_ends_first(process) for process in own_sandboxes()].count(True) == 2)
    (launcher,) = (
        process for process in own_sandboxes() - {parent.pid} if not _ends_first(process)
    )
    os.kill(launcher if killed == "its launcher" else parent.pid, signal.SIGKILL)
    output, _ = parent.communicate(timeout=60)
    assert ("failed" in output) == (killed == "its launcher")
    _wait_until(lambda: not own_sandboxes())


def test_forged_results(attack):
    """Lines of results to every descriptor, and the driver's own variables."""
    result = attack("""
import os, sys
line = b'{"status": "passed", "output": "forged"}\\n'
frame = sys._getframe()
while frame := frame.f_back:
    for value in frame.f_locals.values():
        try: print(line.decode(), file=value, flush=True)
        except Exception: pass
for descriptor in [0, *range(2, 64)]:
    try: os.write(descriptor, line)
    except OSError: pass
""")
    assert result.status == "passed"
    assert result.output != "forged"


def _ends_first(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/oom_score_adj").read_text() == "1000\n"


def _wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_missing_layer_is_an_error_unless_allow_unsandboxed(tmp_path, monkeypatch):
    folder = Path(sandbox._DRIVER).parent
    (tmp_path / "sandbox_linux.py").write_text((folder / "sandbox_linux.py").read_text())
    text = (folder / "sandbox_driver.py").read_text()
    (tmp_path / "child.py").write_text(
        text.replace('"seccomp": linux.deny_system_calls', '"a moat": None')
    )
    monkeypatch.setattr(sandbox, "_DRIVER", str(tmp_path / "child.py"))
    with pytest.raises(
        SandboxUnavailable,
        match=r"cannot give the sandbox .*a moat .*; .*allow_unsandboxed: true",
    ):
        run_python("x = 1", [{"code": "assert x == 1"}], LIMITS)
    (result,) = run_python("x = 1", [{"code": "assert x == 1"}], LIMITS, allow_unsandboxed=True)
    assert result.status == "passed"


PAIR = {"input": "1 2", "output": "3"}
CALL_OF_ADD = {"function": "add", "input": "[1, 2]", "output": "[3]"}
LOOP = "for x in range(3):\n    assert f(x)"
RAISES = "if f(2) != 4: raise ValueError"
LIVE_CODE_BENCH = {
    "input": "1\n2\n",
    "output": "3",
    "testtype": "functional",
    "metadata": {"func_name": "add"},
}


@pytest.mark.parametrize(
    ("given", "tests"),
    [
        (None, []), ("", []),
        ("assert f()", [{"code": "assert f()"}]), (LOOP, [{"code": LOOP}]),
        (["check(f)", RAISES], [{"code": "check(f)"}, {"code": RAISES}]),
        ({"input": 12, "output": ["3", "4"], "type": "stdin_stdout"}, [{"input": "12", "output": "3\n4"}]),
        ({"inputs": ["1 2"], "outputs": ["3"]}, [PAIR]),  # APPS, TACO
        ({"input": ["1 2"], "output": ["3"]}, [PAIR]),  # CodeContests
        ([PAIR | {"testtype": "stdin"}], [PAIR]),
        ([LIVE_CODE_BENCH], [CALL_OF_ADD]),
        ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, [CALL_OF_ADD | {"output": "[[3], 3]"}]),
    ],
)  # fmt: skip
def test_tests_are_read_in_the_forms_in_which_they_are_published(given, tests):
    assert read_tests(given, None) == tests
    if not isinstance(given, str | None):
        assert read_tests(json.dumps(given), None) == tests


def test_humaneval_leaves_the_call_of_check_to_us():
    text = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n"
    assert read_tests(text, "double") == [{"code": f"{text}\ncheck(double)"}]


@pytest.mark.parametrize(
    "given",
    [
        "42", 42, json.dumps(json.dumps([PAIR])), str([PAIR]),  # JSON in JSON, the repr of Python
        ["f(2) == 4"], ["assert (f(2) == 4, 'wrong')"],  # no assert; a tuple is always true
        ["assert f(2) =="], ["def test_f():\n    assert f(2) == 4"],  # pytest alone would call test_f
        ["def check(candidate):\n    assert candidate(2) == 4"],  # HumanEval without entry_point
        [{"input": "1"}], [{"input": "1", "output": "2", "type": "functional"}], {"inputs": ["1"], "outputs": []},
        [PAIR, {"input": [1, 2], "output": 3, "fn_name": "add"}],
    ],
)  # fmt: skip
def test_any_other_test_is_refused_at_the_start(given):
    rows = [{"tests": [PAIR]}, {"tests": given}]
    spec = RewardSpec("python_tests")
    with pytest.raises(
        ValueError, match=r"^FILE, line 2, column tests: .* is no test that can be read"
    ) as caught:
        check_rows([spec], rows, "FILE", ["line 1", "line 2"], has_pattern=False)
    assert "\n" not in str(caught.value)


def test_functions_are_called_and_their_results_compared_outside(sandboxed):
    tests = {"inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"], "fn_name": "add"}
    texts = [
        "def add(x, y):\n    print('noise')\n    return x + y\nif __name__ == '__main__':\n    print(add(1, 1))",
        "class Solution:\n    def add(self, x: List[int], y: Optional[str]):\n        return x + y",
        "def add(x, y): return 3",
        "class Right:\n    __eq__ = lambda *_: True\ndef add(x, y): return Right()",
        "pass",
    ]
    scores = load_reward("python_tests")([""] * len(texts), texts, tests=[tests] * len(texts))
    assert scores == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_programs_are_judged_by_what_they_print(sandboxed):
    codes = [
        "print(3); exit()",
        "import atexit, io, sys\nsys.stdout = buffer = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(buffer.getvalue()))\nprint(3)",
        "import os; print(os.fstat(0).st_size and 3)",
        "print(3); exit(1)",
        "exit()",
    ]
    results = run_python("exec(eval(input()))", [{"input": repr(code)} for code in codes], Limits())
    expected = [("passed", "3\n")] * 3 + [("failed", "")] + [("passed", "")]
    assert [(result.status, result.output) for result in results] == expected


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("first\n```\nx = 1\n```\nbetter\n```py\nx = 2\n```\n", "x = 2\n"),
        ("````\nx = '```'\n````", "x = '```'\n"),
        ("1. So:\n   ```python\n   if x:\n       y = 1\n   ```\n", "if x:\n    y = 1\n"),
        ('<think>print "No"</think>\n```python\nx = 1\n```', "x = 1\n"),
        ("`` ` ```\n``` ", None),
        ("x" * 200_000, None),
    ],
)
def test_extract_code(text, code):
    assert extract_code(text, None) == code
