"""``grpo.train`` in this process: what it takes, what it returns, what it leaves behind, and
failures."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import datasets
import pandas
import pytest
import rewards_for_tests
import torch
from conftest import ROOT, environment_of_runs
from outputs import assert_same_weights, lines

from grpo.checkpoint.format import read_state
from grpo.commands.evaluation import main as evaluate
from grpo.config import ConfigError, load_config
from grpo.distributed import World
from grpo.library import PAGE, TrainingResult, train
from grpo.report.__main__ import main as report
from grpo.rewards import RewardRunner, RewardSpec
from grpo.run.signals import Signals

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
FACTOR = 0.5


def settings(model: Path, output: Path, steps: int = 2, **more) -> dict:
    return {
        "output_dir": output,  # a path, not a text
        "model.name_or_path": model,
        "data": {"answer_column": "answer"},
        "rollout": {
            "prompts_per_step": 2,
            "num_generations": 4,
            "max_completion_length": 8,
        },
        "optim": {"learning_rate": 1e-3, "max_steps": steps},
        "eval.before_training": False,
        "runtime": {"precision": "fp32", "threads_per_rank": 1},
    } | more


def share_of(characters: str):
    def share(completions, **columns):
        return [
            FACTOR * sum(c in characters for c in text) / max(len(text), 1) for text in completions
        ]

    return share


class WithGenerator:
    """Cannot be pickled, so it runs in this process, and ``seen`` is filled here."""

    def __init__(self):
        self.generator = (i for i in range(10**9))
        self.seen = []

    def __call__(self, completions, **columns):
        next(self.generator)
        self.seen.append(os.getpid())
        lengths = [float(len(text)) for text in completions]
        completions.clear()  # its own list, as in a worker
        return lengths


def process_state():
    handlers = [
        signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    ]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (
        handlers,
        torch.get_num_threads(),
        deterministic,
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )


def children() -> set[str]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return set(text.split())


@pytest.mark.slow
def test_objects_names_and_a_second_call(random_model, tmp_path, capsys):
    """A closure, a lambda, a function of a module, a builtin and an object that cannot be pickled;
    then the same call again, and others."""

    async def a_little_later(completions, **columns):
        return [1.0 for _ in completions]

    here = WithGenerator()
    before = process_state()
    processes = children()
    rewards = [
        share_of("0123456789"),
        (lambda completions, **columns: [0.0 for _ in completions], 0.25),
        rewards_for_tests.share_of_digits,
        {"name": "format", "weight": 2.0},
        here,
        a_little_later,
    ]
    options = settings(
        random_model, tmp_path / "run", runtime={"precision": "fp32", "deterministic": True}
    )
    with torch.no_grad():
        result = train(options, reward_functions=rewards, dataset=ROWS, eval_dataset=ROWS[:3])
    assert set(here.seen) == {os.getpid()}
    shown = capsys.readouterr().out
    assert shown.count("runs in this process") == 1
    assert "TypeError: cannot pickle 'generator' object" in shown
    assert process_state() == before
    assert children() == processes

    assert result.steps == 2
    assert result.checkpoint == tmp_path / "run" / "checkpoint-2"
    for name in (
        "share",
        "lambda",
        "share_of_digits",
        "format",
        "WithGenerator",
        "a_little_later",
    ):
        assert f"rewards/{name}/mean" in result.metrics[-1]
    assert result.before == {}
    assert "eval/rewards/share" in result.after
    written = load_config(["--config", str(tmp_path / "run" / "config.yaml")])
    assert [(f.name, f.weight) for f in written.reward.functions] == [
        ("python:share", 1.0),
        ("python:lambda", 0.25),
        ("rewards_for_tests:share_of_digits", 1.0),
        ("format", 2.0),
        ("python:WithGenerator", 1.0),
        ("python:a_little_later", 1.0),
    ]
    assert written.data.dataset == written.data.eval_dataset == "python:rows"

    again = train(options, reward_functions=rewards, dataset=ROWS, eval_dataset=ROWS[:3])
    assert again == result == TrainingResult.load(tmp_path / "run")
    assert "already complete" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"reward\.functions"):
        train(options, reward_functions=rewards[1:], dataset=ROWS, eval_dataset=ROWS[:3])
    with pytest.raises(ConfigError, match="content of the training rows"):
        train(options, reward_functions=rewards, dataset=ROWS[1:], eval_dataset=ROWS[:3])
    assert process_state() == before
    assert children() == processes


@pytest.mark.slow
def test_the_run_is_that_of_the_command_and_other_commands_say_what_they_lack(
    random_model, tmp_path, capsys
):
    """The same bits as from a file with the same rows; evaluation and report on a folder that names
    Python objects."""
    rows = tmp_path / "rows.jsonl"
    pandas.DataFrame(ROWS).to_json(rows, orient="records", lines=True)
    reward = share_of("0123456789")
    folder = tmp_path / "object"
    options = settings(random_model, folder)
    train(options, reward_functions=reward, dataset=datasets.Dataset.from_list(ROWS))
    train(options, reward_functions=reward, dataset=str(rows), output_dir=tmp_path / "file")
    assert lines(folder) == lines(tmp_path / "file")
    assert_same_weights(folder / "checkpoint-2", tmp_path / "file" / "checkpoint-2")

    capsys.readouterr()
    configuration = ["--config", str(folder / "config.yaml")]
    assert evaluate([*configuration, f"data.eval_dataset={rows}"]) == 2
    assert (
        "error: reward 'python:share' was an object passed to grpo.train()"
        in capsys.readouterr().err
    )
    assert evaluate([*configuration, "reward.functions=[accuracy]", "data.eval_split=test"]) == 2
    assert "stands for rows passed to grpo.train()" in capsys.readouterr().err
    assert report([str(folder), "--output", str(tmp_path / "report.html")]) == 0
    assert "python:share" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(config={"optim": 3}), "optim is a section"),
        (dict(reward_functions=[3]), "3 is no function or class, and no name of one"),
        (dict(reward_functions=lambda completions, gold: [1.0]), "reward 'lambda' needs the column(s) gold"),
        (dict(dataset=["a"]), "a split of a dataset (dataset['train']), a DataFrame: row 1 is 'a'"),
        (dict(reward_functions={"name": "format", "args": {"x": len}}), "Unable to serialize unknown type"),
        (dict(reward_funcs=len), "'reward.functions'? in Python train(reward_functions="),
        (dict(dataset=[]), "data.dataset=python:rows has no rows"),
    ],
)  # fmt: skip
def test_mistakes_are_value_errors_and_leave_nothing(arguments, message, tmp_path, random_model):
    before = process_state()
    processes = children()
    given = dict(config=settings(random_model, tmp_path / "run"), dataset=ROWS) | arguments
    with pytest.raises(ValueError) as error:
        train(given.pop("config"), **given)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()
    assert (process_state(), children()) == (before, processes)


def test_all_mistakes_of_a_call_are_said_at_once(tmp_path):
    with pytest.raises(ValueError) as error:
        train(
            {"output_dir": str(tmp_path / "run")},
            model="Qwen/Qwen2.5-0.5B",
            optim="adamw_8bit",
            use_vllm=True,
            args=object(),
            eval={"evry": 5},
            seed=-1,
        )
    lines = str(error.value).splitlines()
    starts = (
        "unknown key 'use_vllm'",
        "unknown key 'args'",
        "seed=-1: ",
        "model is a section: ",
    )
    starts += (
        "optim is a section: optim.name is adamw (TRL's adamw_torch_fused) or adamw8bit",
        "unknown key 'eval.evry'; did you mean 'eval.every'?",
    )
    assert len(lines) == len(starts)
    assert all(any(line.startswith(start) for line in lines) for start in starts)


def test_a_failing_step_raises_and_the_same_call_continues(random_model, tmp_path):
    """A reward that this process runs fails in the third step; the steps before it are saved."""
    broken = [True]
    generator = (i for i in range(99))

    def fails_later(completions, trainer_state, **columns):
        next(generator)  # a generator cannot be pickled, so this runs here
        if broken and trainer_state.global_step == 2:
            raise RuntimeError("the judge is away")
        return [float(len(text)) for text in completions]

    before = process_state()
    options = settings(random_model, tmp_path / "run", steps=3)
    with pytest.raises(ValueError, match="fails_later") as error:
        train(options, reward_functions=fails_later, dataset=ROWS)
    assert "saved checkpoint-2" in "".join(error.value.__notes__)
    assert read_state(tmp_path / "run" / "checkpoint-2")["step"] == 2
    assert process_state() == before
    broken.clear()
    assert train(options, reward_functions=fails_later, dataset=ROWS).steps == 3


def test_a_function_object_with_other_code_is_refused(random_model, tmp_path):
    options = settings(random_model, tmp_path / "run", steps=1)

    def length(completions, **columns):
        return [float(len(text)) for text in completions]

    train(options, reward_functions=length, dataset=ROWS)
    assert train(options, reward_functions=length, dataset=ROWS).steps == 1

    def length(completions, **columns):
        return [-float(len(text)) for text in completions]

    with pytest.raises(ValueError, match="content of python:length: checkpoint '"):
        train(options, reward_functions=length, dataset=ROWS)


@pytest.mark.slow
def test_a_signal_saves_and_ends_the_call(random_model, tmp_path):
    main = threading.get_ident()
    generator = (i for i in range(9))

    def interrupts(completions, trainer_state, **columns):
        next(generator)  # a generator cannot be pickled, so this runs here
        if trainer_state.global_step == 1:
            signal.pthread_kill(main, signal.SIGINT)
        return [0.0 for _ in completions]

    before = process_state()
    with pytest.raises(KeyboardInterrupt):
        train(
            settings(random_model, tmp_path / "run", steps=3),
            reward_functions=interrupts,
            dataset=ROWS,
        )
    assert process_state() == before
    assert TrainingResult.load(tmp_path / "run").checkpoint.name == "checkpoint-1"


def test_a_second_interrupt_ends_an_update_but_not_the_process(monkeypatch):
    monkeypatch.setattr("grpo.run.signals.SAME_SIGNAL_SECONDS", 0.0)
    world = World(0, 1, torch.device("cpu"))
    handlers = Signals(world)
    try:
        signal.raise_signal(signal.SIGINT)
        assert handlers.vote() == (False, True)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        handlers.close()


def test_function_objects_run_in_workers_that_can_be_killed(tmp_path):
    """What hangs is killed; constants, modules, helpers and classes of the same module go along; an
    async object here has a time limit."""
    generator = (i for i in range(9))

    def hangs(completions, **columns):
        while True:
            time.sleep(0.01)

    async def hangs_here(completions, **columns):
        await asyncio.sleep(60 + next(generator))

    partial = functools.partial(rewards_for_tests.share_of_digits)
    functions = {
        "hangs": hangs,
        "hangs_here": hangs_here,
        "share": share_of("1"),
        "partial": partial,
    }
    specs = [
        RewardSpec(f"python:{name}", function=function) for name, function in functions.items()
    ]
    with closing(RewardRunner(specs, timeout_s=0.5)) as runner:
        result = runner.score(["p"], ["1a"], {})
    assert result.values == [[None, None, 0.25, 1.0]]
    assert result.failures == [1, 1, 0, 0]
    (note,) = runner.notes
    assert "hangs_here" in note


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("from grpo import train", {"torch"}),
        (
            "import grpo.workers.host, grpo.rewards.calls, grpo.turns.sessions",
            {"torch", "numpy", "pydantic"},
        ),
        (
            "from grpo.config import load_config; load_config(['rollout.top_k=3'])",
            {"torch", "transformers", "datasets", "numpy"},
        ),
    ],
)
def test_importing_imports_nothing_heavy(code, heavy):
    """A typing error is reported at once, without the seconds that these imports take."""
    code = f"{code}; import sys; assert not {heavy!r} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


SCRIPT = """
import sys
from grpo import train
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
for seed in (0, 1):
    result = train(%r, reward_functions=lambda completions, **kw: [len(t) for t in completions], dataset=rows,
                   seed=seed, output_dir=f"{sys.argv[1]}/{seed}")
    print(f"result {result.steps} {len(result.metrics)}", flush=True)
"""


@pytest.mark.slow
def test_two_ranks_and_one_of_a_script_in_another_folder(random_model, tmp_path):
    """Under torchrun and alone, twice in one process."""
    script = tmp_path / "script.py"
    options = settings(str(random_model), "set below")
    script.write_text(SCRIPT % options)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
    ]
    environment = environment_of_runs({"PYTHONPATH": str(ROOT)})
    for launch, ranks in ((launcher, 2), ([sys.executable], 1)):
        command = [*launch, str(script), str(tmp_path / f"ranks{ranks}")]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("result 2 2") == 2 * ranks, done.stdout
    for seed in "01":
        rewards = [
            [line["reward"] for line in lines(tmp_path / f"ranks{n}" / seed)] for n in (1, 2)
        ]
        assert rewards[0] == pytest.approx(rewards[1], abs=1e-4)


@pytest.mark.parametrize("name", ["train_grpo.py", "train_grpo"])
def test_a_copy_of_the_page_or_a_folder_beside_the_program_is_refused(
    name, random_model, tmp_path, monkeypatch
):
    """Which of two pages runs must not depend on the folder. Only a folder that Python finds before
    is one."""
    other = tmp_path / name
    if name.endswith(".py"):
        other.write_bytes(PAGE.read_bytes())
    else:
        other.mkdir()
        monkeypatch.setattr(
            sys,
            "path",
            [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT],
        )
    monkeypatch.delitem(sys.modules, "train_grpo", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as error:
        train(
            settings(random_model, tmp_path / "run"),
            dataset=ROWS,
            reward_functions=share_of("1"),
        )
    shown = other if name.endswith(".py") else "no file train_grpo.py"
    found = f"Python finds {shown} in place of {PAGE}, which grpo.train() runs: rename it, or pip"
    assert str(error.value).startswith(found)
    assert "train_grpo" not in sys.modules
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_a_thread_is_refused(tmp_path, random_model):
    """Both would draw from the generators of the process, and each would have other bits than
    alone."""
    from grpo.library import RUN_LOCK

    with RUN_LOCK, pytest.raises(ValueError, match="is running in this process"):
        train(
            settings(random_model, tmp_path),
            dataset=ROWS,
            reward_functions=lambda completions, **_: [0.0] * 4,
        )
    assert RUN_LOCK.acquire(blocking=False), "the refused call does not hold the lock"
    RUN_LOCK.release()


def test_a_result_leaves_out_what_was_not_computed(tmp_path):
    lines = [
        {"step": 0, "eval/greedy_accuracy": 0.25, "eval/rewards/judge": None},
        {"step": 1, "reward": None, "entropy": None},
        {
            "step": 2,
            "reward": 0.5,
            "entropy": 0.1,
            "eval/greedy_accuracy": 0.5,
            "eval/rewards/judge": None,
        },
    ]
    with pytest.raises(ValueError, match=r"is not a run: metrics\.jsonl has no step"):
        TrainingResult.load(tmp_path)
    written = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(written + '{"step": 3, "rew')  # the process was killed
    result = TrainingResult.load(tmp_path)
    assert result.before == {"eval/greedy_accuracy": 0.25}
    assert result.after == {"eval/greedy_accuracy": 0.5}
    assert result.metrics == lines
    assert "reward of the first and of the last step: 0.500, 0.500" in repr(result)
