"""The runner with real worker processes: real hangs, real deaths, real floods of output."""

import enum
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo.rewards import RewardContractError, RewardRunner, RewardSpec
from grpo.rewards.runner import MAX_LOST_WORKERS
from grpo.workers import process

ROOT = Path(__file__).parents[2]

REWARDS = """
import asyncio, math, os, sys, threading, time

def length(prompts, completions, **columns):
    return [float(len(c)) for c in completions]

def named(completions, answer):                    # takes only what it names
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]

def scaled(completions, scale=1.0):
    return [scale for _ in completions]

def moody(completions, **kwargs):
    for c in completions:
        if "raise" in c: raise RuntimeError("a bad row")
        if "exit" in c: sys.exit(3)
        if "die" in c: os._exit(7)
        if "segfault" in c: os.kill(os.getpid(), 11)
        if "hang" in c: time.sleep(1000)
        if "spin" in c:
            while True: pass
    return [1.0] * len(completions)

def is_best(prompts, completions, calls=None, **kwargs):  # 1 for the largest number of each prompt
    if calls is not None:
        with open(calls, "a") as file:
            print(*completions, file=file)
    if "all" in completions and len(set(prompts)) > 1: raise KeyError("a mistake about the whole batch")
    if "dies" in completions: os._exit(1)
    numbers = [math.inf if c == "all" else float(c) for c in completions]
    best = {}
    for prompt, number in zip(prompts, numbers):
        best[prompt] = max(best.get(prompt, 0), number)
    return [float(number == best[prompt]) for prompt, number in zip(prompts, numbers)]

def where(completions, **kwargs):
    assert threading.current_thread() is threading.main_thread()
    return [float("torch" in sys.modules)] * len(completions)

def pid(completions, **kwargs):
    return [float(os.getpid())] * len(completions)

def forks(completions, **kwargs):                  # the child returns first
    child = os.fork()
    if child == 0:
        return [-1.0] * len(completions)
    os.waitpid(child, 0)
    return [float(c) for c in completions]

def given(completions, value, log_metric, log_extra):
    return eval(value)

def logs(completions, log_metric, log_extra, trainer_state):
    log_metric("mean_length", sum(map(len, completions)) / len(completions))
    log_extra("upper", [c.upper() for c in completions])
    log_extra("count", [10 ** 20 if c == "big" else len(c) for c in completions])
    if "raise" in completions: raise RuntimeError("a bad row")
    return [trainer_state.global_step] * len(completions)

async def logs_later(completions, log_metric, log_extra):
    await asyncio.sleep(0)
    log_metric("mean_length", 0)
    log_metric("not_a_number", math.nan)
    log_extra("later", completions)
    return [1.0] * len(completions)

async def changes(completions, messages, **kwargs):
    messages[0]["content"] = messages[1] = None
    return [1.0] * len(completions)

async def reads(completions, messages, **kwargs):
    return [float(message == {"content": "text"}) for message in messages]

async def sleepy(completions, **kwargs):
    await asyncio.sleep(0.5)
    return [1.0] * len(completions)

started = []

async def waits_for_another(completions, **kwargs):
    started.append(1)
    while len(started) < 2:
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)

async def async_moody(completions, **kwargs):
    for c in completions:
        if "raise" in c: raise RuntimeError("a bad row")
        if "hang" in c: await asyncio.sleep(1000)
        if "block" in c: time.sleep(1000)
        if "cancel" in c: asyncio.current_task().cancel()
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "user_rewards.py"
    file.write_text(REWARDS)
    return str(file)


@pytest.fixture
def run(path):
    """``run("moody", [...])`` -> RewardResult, each time with a fresh runner."""
    runners = []

    def run(
        names,
        completions,
        columns=None,
        *,
        args=None,
        completion_ids=None,
        prompts=None,
        **settings,
    ):
        names = [names] if isinstance(names, str) else names
        runner = RewardRunner(
            [RewardSpec(f"{path}:{n}", 1.0, args or {}) for n in names], **settings
        )
        runners.append(runner)
        return runner.score(
            prompts or ["q"] * len(completions), completions, columns or {}, completion_ids
        )

    yield run
    for runner in runners:
        runner.close()


def column(result, function=0):
    return [row[function] for row in result.values]


def test_a_batch_with_builtins_weights_and_duplicates(path):
    functions = [
        # duck-typed, as the configuration's
        SimpleNamespace(name="accuracy", weight=2.0, args={"mode": "lenient"}),
        RewardSpec(f"{path}:length", 0.1),
        RewardSpec("accuracy"),
    ]
    with closing(RewardRunner(functions)) as runner:
        runner.check(["answer"])
        assert runner.names == ["accuracy", "length", "accuracy_2"]
        result = runner.score(["q"] * 2, ["it is 4", "no"], {"answer": ["4", None]})
        assert result.values == [[1.0, 7.0, 0.0], [None, 2.0, None]]
        assert runner.weights == [2.0, 0.1, 1.0]
        assert result.failures == [0, 0, 0]


def test_functions_run_in_the_main_thread_of_a_worker_without_torch(run):
    import torch  # noqa: F401 - in this process, so that the test would see it inherited

    assert column(run("where", ["a"])) == [0.0]


@pytest.mark.parametrize("word", ["raise", "exit", "segfault"])
def test_one_bad_row_costs_one_reward(run, word, caplog):
    with caplog.at_level(logging.WARNING, "grpo"):
        result = run("moody", ["ok", word, "ok", "ok"])
    assert column(result) == [1.0, None, 1.0, 1.0]
    assert result.failures == [1]
    expected = {"raise": "a bad row", "exit": "SystemExit", "segfault": "signal 11"}[word]
    assert expected in result.first_errors["moody"]
    assert expected in caplog.text
    assert "first for prompt '.." in caplog.text


def test_a_failed_batch_is_called_group_by_group_and_says_so(path, caplog, tmp_path):
    """A reward that compares the completions of a prompt gets all of them, except those of a group
    that raises too."""
    calls = tmp_path / "calls"
    spec = RewardSpec(f"{path}:is_best", args={"calls": str(calls)})
    prompts = ["p", "p", "q", "q", "q", "r", "r"]
    with caplog.at_level(logging.WARNING, "grpo"), closing(RewardRunner([spec])) as runner:
        result = runner.score(prompts, ["1", "2", "1", "x", "2", "4", "3"], {})
        assert column(result) == [0.0, 1.0, 1.0, None, 1.0, 1.0, 0.0]
        assert result.failures == [1]
        called = calls.read_text().splitlines()
        assert called == ["1 2 1 x 2 4 3", "1 2", "1 x 2", "4 3", "1", "x", "2"]
        first = "reward 'is_best' failed on 7 completions at once, and was called group by group"
        assert f"{first}: ValueError: could not convert string to float: 'x'" in caplog.text

        # A retry that succeeds is reported too, once for each type of error.
        for times in (1, 0):
            caplog.clear()
            result = runner.score(["p", "p", "q", "q"], ["1", "all", "2", "1"], {})
            assert column(result) == [0.0, 1.0, 1.0, 0.0]
            assert result.failures == [0]
            assert caplog.text.count("WARNING") == times


@pytest.mark.slow
def test_lost_workers_are_bounded_for_groups_and_for_rows(run, caplog, tmp_path):
    """The batch, 8 groups, then 8 rows: (1 + 8 + 8) limits of time at most if they hang."""
    calls = tmp_path / "calls"
    num_groups = MAX_LOST_WORKERS + 3
    prompts = [f"prompt {number}" for number in range(num_groups) for _ in range(2)]
    completions = ["dies", "1"] * num_groups
    with caplog.at_level(logging.WARNING, "grpo"):
        result = run("is_best", completions, args={"calls": str(calls)}, prompts=prompts)
    assert (
        "'is_best' failed on 22 completions at once, and was called group by group" in caplog.text
    )
    lengths = [len(line.split()) for line in calls.read_text().splitlines()]
    rows = 2 * MAX_LOST_WORKERS - 1  # each second row is well
    assert lengths == [2 * num_groups] + [2] * MAX_LOST_WORKERS + [1] * rows
    assert column(result).count(1.0) == MAX_LOST_WORKERS - 1


def test_a_hanging_row_is_killed(run):
    start = time.perf_counter()
    result = run("moody", ["ok", "spin", "ok"], timeout_s=0.5)
    assert column(result) == [1.0, None, 1.0]
    assert result.failures == [1]
    assert "did not answer within 0.5 s" in result.first_errors["moody"]
    assert time.perf_counter() - start < 60, "without the limit it never ends"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "[1.0]",
            "'given' returned 1 values for 2 completions: \\[1.0\\]; expected a list of 2 values",
        ),
        ("['1.0', 1.0]", "'given' returned '1.0' of type str for completion 0; expected"),
        ("[1.0, math.inf]", "'given' returned inf of type float for completion 1"),
        ("log_metric('mine', '1')", "expected a finite number"),
        (
            "log_extra('note', ['x'])",
            "with 1 values for 2 completions: expected one per completion",
        ),
        (
            "[log_extra('n', [1, 2]), log_extra('n', [1, 2])]",
            "'given_2' called log_extra\\('n', ...\\), as another reward",
        ),
    ],
)
def test_a_broken_contract_is_an_error(run, value, message):
    with pytest.raises(RewardContractError, match=message):
        run(["given", "given"], ["a", "b"], args={"value": value})


def test_what_rewards_log_comes_back_with_the_scores(run):
    result = run(["logs", "logs_later"], ["ab", "raise", "big"], {"answer": ["x"] * 3})
    assert column(result) == [0.0, None, 0.0]
    # The batch raised, so each row is called alone, and what failing calls logged is dropped.
    assert result.metrics == {"mean_length": (2 + 3 + 3 * 0.0, 5.0)}
    assert result.extra == {
        "upper": ["AB", None, "BIG"],
        "count": [2, None, 10**20],
        "later": ["ab", "raise", "big"],
    }
    assert run("logs", ["a", "bcd"]).metrics == {"mean_length": (4.0, 2.0)}, (
        "the same whether called at once or by row"
    )


def test_what_counts_as_numbers(run):
    value = "__import__('numpy').array([1, 2.5, math.nan], dtype='float32')"
    assert column(run("given", ["a"] * 3, args={"value": value})) == [1.0, 2.5, None]


def test_the_worker_lives_across_steps_and_ends_with_close(path):
    with closing(RewardRunner([RewardSpec(f"{path}:pid")])) as runner:
        first = int(runner.score(["q"], ["a"], {}).values[0][0])
        assert runner.score(["q"], ["a"], {}).values == [[float(first)]]
        assert first != os.getpid()
        os.kill(first, signal.SIGKILL)  # between two steps, so that no row is to blame
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        result = runner.score(["q"], ["a"], {})
        second = int(result.values[0][0])
        assert second != first
        assert result.failures == [0]
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_the_child_of_a_reward_that_forks_does_not_answer(path):
    with closing(RewardRunner([RewardSpec(f"{path}:forks")], timeout_s=5.0)) as runner:
        for step in (["1", "2"], ["3", "4"], ["5", "6"]):
            assert column(runner.score(["q"] * 2, step, {})) == [float(text) for text in step]


def test_workers_die_with_their_parent(path):
    code = f"""
import sys, time
from grpo.rewards import RewardRunner, RewardSpec
runner = RewardRunner([RewardSpec({path + ":pid"!r}), RewardSpec({path + ":moody"!r})], timeout_s=100)
print(int(runner.score(["q"], ["a"], {{}}).values[0][0]), flush=True)
runner.score(["q"], ["spin"], {{}})
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait(timeout=60)
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _runs(worker):
        time.sleep(0.05)
    assert not _runs(worker)


def _runs(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_column_holds_members_of_the_functions_enum():
    """A class that no worker can import is the same class in the function and in the columns of
    each step."""

    class Grade(enum.Enum):
        GOOD = "good"
        BAD = "bad"

    def judge(completions, grade, **columns):
        return [float(each is Grade.GOOD) for each in grade]

    with closing(RewardRunner([RewardSpec("python:judge", function=judge)])) as runner:
        for _ in range(2):
            result = runner.score(["q"] * 2, ["a", "b"], {"grade": [Grade.GOOD, Grade.BAD]})
            assert column(result) == [1.0, 0.0]


def test_async_rewards_of_a_step_run_concurrently(run):
    """Each of the two returns only when the other has started: one after the other, the first would
    time out."""
    result = run(["waits_for_another", "length", "waits_for_another"], ["a", "b"])
    assert result.values == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert result.failures == [0, 0, 0]


def test_async_rewards_have_copies_of_their_own(run):
    result = run(
        ["changes", "reads"],
        ["a", "b"],
        {"messages": [{"content": "text"}, {"content": "text"}]},
    )
    assert result.values == [[1.0, 1.0], [1.0, 1.0]]


def test_async_rows_fail_alone(run):
    result = run(["async_moody", "sleepy"], ["ok", "raise", "hang", "cancel"], timeout_s=1.0)
    assert column(result) == [1.0, None, None, None]
    assert column(result, 1) == [1.0] * 4
    assert result.failures == [3, 0]


@pytest.mark.slow
def test_a_coroutine_that_blocks_the_loop_is_killed(run, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.2)
    result = run(["async_moody", "sleepy"], ["ok", "block"], timeout_s=0.8)
    assert column(result) == [1.0, None]
    assert column(result, 1) == [1.0, 1.0]
    assert result.failures == [1, 0]


def test_check_finds_mistakes_before_the_first_step(path, tmp_path):
    (tmp_path / "exits.py").write_text("import os\nos._exit(5)\n")
    for name, args, columns, message in [
        (f"{path}:scaled", {"scael": 2.0}, None, "has no argument 'scael'"),
        ("format", {"pattern": "("}, None, "reward 'format': .*unterminated subpattern"),
        (
            "accuracy",
            {},
            ["solution"],
            "'accuracy' needs the column\\(s\\) answer; the rows have solution",
        ),
        (f"{path}:named", {}, ["x"], "'named' needs the column\\(s\\) answer"),
        (
            f"{tmp_path}/exits.py:f",
            {},
            None,
            "reward '.*' cannot be loaded: its worker process exited with status 5",
        ),
    ]:
        with (
            closing(RewardRunner([RewardSpec(name, 1.0, args)])) as runner,
            pytest.raises(ValueError, match=message) as caught,
        ):
            runner.check(columns)
        assert "\n" not in str(caught.value)


def test_the_working_folder_is_that_of_the_start_and_last_on_the_path(tmp_path, monkeypatch):
    code = "    if 'die' in completions: os._exit(1)\n    return [1.0] * len(completions)\n"
    (tmp_path / "relative_rewards.py").write_text(
        f"import os\ndef fragile(completions, **_):\n{code}"
    )
    for standard in ("json", "asyncio", "pickle"):
        (tmp_path / f"{standard}.py").write_text(
            "raise RuntimeError('a file of the working folder')"
        )
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as under python -c
    monkeypatch.chdir(tmp_path)
    with closing(RewardRunner([RewardSpec("relative_rewards:fragile")])) as runner:
        runner.check(["answer"])
        monkeypatch.chdir("/")
        assert column(runner.score(["q"] * 2, ["die", "ok"], {})) == [None, 1.0]


PRINTS_AND_WAITS = """
import asyncio, time

def prints(completions, **columns):
    print("a line")
    return [1.0] * len(completions)

def work(text):
    time.sleep(1000 if text == "hang" else 0)
    return 1.0

async def waits(completions, **columns):
    return [await asyncio.to_thread(work, text) for text in completions]
"""


@pytest.fixture
def prints_and_waits(tmp_path):
    path = tmp_path / "prints_and_waits.py"
    path.write_text(PRINTS_AND_WAITS)
    return path


def test_output_that_nobody_reads_costs_no_reward(prints_and_waits):
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with closing(RewardRunner([RewardSpec(f"{prints_and_waits}:prints")])) as runner:
            values = column(runner.score(["q"] * 2, ["a", "b"], {}))
    finally:
        os.dup2(stderr, 2)
        for descriptor in (stderr, writer):
            os.close(descriptor)
    assert values == [1.0, 1.0]


def test_threads_that_hang_cost_no_later_reward(prints_and_waits, monkeypatch):
    """asyncio.to_thread has min(32, cores + 4) threads, which hung ones would use up."""
    with closing(RewardRunner([RewardSpec(f"{prints_and_waits}:waits")], timeout_s=0.05)) as runner:
        for _ in range(14):
            runner.score(["q"], ["hang"], {})
        assert column(runner.score(["q"] * 2, ["a", "b"], {})) == [1.0, 1.0]
