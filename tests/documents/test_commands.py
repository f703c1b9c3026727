"""Every command of the README and the documents is executed, in a copy of the tree, cut to a size
of seconds.

The cuts: one step on an untrained model with few problems, two ranks instead of eight, this machine
instead of several and of the Hub. A benchmark is only started with --help, to check its options
(those of learning.md run once each). pytest only collects its tests. Nothing else is changed. What
is a plain ``python train_grpo.py`` or ``python -m`` runs in a fork of a process that has imported
the trainer, all else in a shell."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run_forked, save_random_model
from hub_service import hub, pointed_at, publish

NOT_HERE = (
    "python -m venv .venv-trl",
    "python tests/faults/soak.py",
    "python examples/yaml_from_trl.py",
    "source .venv/bin/activate",
)
"""Not executed: the first installs TRL from the network, ``tests/faults/test_soak.py`` and
``test_yaml_from_trl.py`` run the next two, and ``environment()`` does the last. Nor are commands
with vllm, which ``tests/faults/test_vllm_runs.py`` runs."""
RECIPES = [ROOT / "docs" / "recipes.md", ROOT / "docs" / "learning.md"]
"""Their commands need a Hub: they have a test of their own."""
FILES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks" / "README.md",
]

CUTS = (
    "optim.max_steps=1 data.max_train_samples=64 data.max_eval_samples=4 eval.num_samples=1 eval.temperature=0 "
    "rollout.max_completion_length=12 eval.max_completion_length=12 optim.lr_scheduler_type=constant "
    "runtime.threads_per_rank=1 runtime.precision=fp32"
)


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(path: Path) -> list[str]:
    """The commands of a document, without their comments; those of pytest also from within a
    sentence."""
    lines = "\n".join(blocks(path, "bash")).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(pytest [^`]+)`", path.read_text(encoding="utf-8"))
    found = [
        command
        for line in lines
        if (
            command := re.sub(
                r"(^|\s)#.*$",
                "",
                line,
            ).strip()
        )
    ]
    return [
        command for command in found if not command.startswith(NOT_HERE) and "vllm" not in command
    ]


@pytest.fixture(scope="module")
def tree(tmp_path_factory, random_model):
    """A copy of what is tracked, with the files that the documents speak of as yours."""
    folder = tmp_path_factory.mktemp("tree") / "copy"
    for name in ("grpo", "configs", "examples", "tests", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    shutil.copytree(random_model, folder / "FOLDER")
    shutil.copy(folder / "configs" / "tiny_arithmetic.yaml", folder / "configs" / "X.yaml")
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"One more.\n#### {i + 1}"} for i in range(280)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (code,) = (
        block for block in blocks(ROOT / "README.md", "python") if "# my_rewards.py" in block
    )
    (folder / "my_rewards.py").write_text(code)
    return folder


def cut(command: str) -> str:
    for old, new in {
        ".venv/bin/": f"{Path(sys.executable).parent}/",
        "checkpoint-150": "checkpoint-1",
        "checkpoint-30": "checkpoint-1",
        "--model runs/sft": "--model FOLDER",  # written by Python code of the page
        "--nproc_per_node=8": "--nproc_per_node=2",
        "NPROC_PER_NODE=8": "NPROC_PER_NODE=1",
        "$GRPO_TEST_ASSETS/data/gsm8k/test.jsonl": "train.jsonl",
        "10.0.0.1": "127.0.0.1",
        "29500": str(20000 + os.getpid() % 20000),
        "ruff check .": "ruff check grpo",
        "--check .": "--check grpo",  # not the reader's files
    }.items():
        command = command.replace(old, new)
    if "benchmarks/" in command:
        program = re.search(r"python \S+", command)[0]
        options = " ".join(re.findall(r"--[\w-]+", command))
        return f'help="$({program} --help)"; for option in {options}; do grep -q -- "$option" <<< "$help"; done'
    data = " data.dataset=train.jsonl data.config_name=null" if "gsm8k" in command else ""
    if data and "gsm8k_cpu" not in command:
        data += " data.eval_dataset=train.jsonl data.eval_split=train"
    if "grpo.sweep" in command:
        return cut_sweep(command)
    if "grpo.evaluation" in command:
        return re.sub(r"--model (?!runs/)\S+", "--model FOLDER", command) + f"{data} {CUTS}"
    if command.startswith("pytest"):
        return command + " --collect-only -q"
    if "launch.sh test" in command:
        file = "faults/test_soak.py" if "slow" in command else "algorithm/test_seeding.py"
        return f"{command} --collect-only -q tests/{file}"
    if "--help" in command or not ("launch.sh" in command or "train_grpo.py" in command):
        return command
    if "gsm8k_from_trl" in command:
        data += " logging.wandb=disabled"
    longer = {"optim.max_steps=160": " optim.max_steps=2", "runtime.profile": " optim.max_steps=3"}
    steps = next((steps for word, steps in longer.items() if word in command), "")
    return f"{command} model.name_or_path=FOLDER{data} {CUTS}{steps}"


def cut_sweep(command: str) -> str:
    """A sweep of one seed, with one value of the first key that it varies, into its own folder."""
    if "--table-only" in command:
        return command
    first, *others = re.findall(r"--vary \S+", command)
    for option in others:
        command = command.replace(f" {option}", "", 1)
    command = command.replace(first, first.partition(",")[0])
    return re.sub(r"--seeds \S+", "", command) + f" --seeds 0 model.name_or_path=FOLDER {CUTS}"


def environment() -> dict[str, str]:
    return os.environ | {
        "GRPO_NO_SETUP": "1",
        "PYTHON": sys.executable,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NPROC_PER_NODE": "1",  # else launch.sh asks PyTorch, which takes seconds
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GRPO_TEST_ASSETS": os.environ.get("GRPO_TEST_ASSETS", "."),
    }


def is_forked(command: str) -> bool:
    """True for a command that needs no shell and no new interpreter."""
    is_python = command.startswith(("python train_grpo.py", "python -m grpo."))
    return is_python and "sweep" not in command and not set(command) & set("$|;&<>*`")


def execute(tree: Path, together: list[str], **variables: str) -> None:
    """Run commands at once (one, or those of several machines); all must end well."""
    if not variables and is_forked(together[0]):
        _, script, *arguments = shlex.split(together[0])
        if script == "-m":
            script = "tests/module.py"
        done = run_forked(tree / script, arguments, timeout=240, env=environment(), folder=tree)
        assert done.returncode == 0, f"{together[0]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return
    started = [
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tree,
            env=environment() | variables,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for command in together
    ]
    try:
        for command, process in zip(together, started, strict=True):
            printed = process.communicate(timeout=240)[0]
            assert process.returncode == 0, f"{command}\n{printed[-3000:]}"
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):  # with all that it has started
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        path
        for path in FILES
        if blocks(
            path,
            "bash",
        )
        and path not in RECIPES
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_command_works(tree, path):
    for name, setting in (("tiny_arithmetic", ""), ("dr_grpo", " algorithm.name=dr_grpo")):
        # The runs that the commands of README.md and algorithm.md leave behind.
        if path.name != "README.md" and not (tree / "runs" / name / "checkpoint-1").exists():
            command = f"python train_grpo.py --config configs/tiny_arithmetic.yaml output_dir=runs/{name}{setting}"
            execute(tree, [cut(command)])
    # Several commands may be the same one after the cut.
    for together in machines(list(dict.fromkeys(cut(command) for command in commands(path)))):
        if (
            re.search(r"configs/(X|gsm8k_smol\S+)\.yaml", together[0])
            and "output_dir=" not in together[0]
        ):
            number = len(list((tree / "runs").glob("X-*")))
            together = [f"{command} output_dir=runs/X-{number}" for command in together]
        execute(tree, together)


def machines(lines: list[str]) -> list[list[str]]:
    """Commands of one run over several machines together; if a document names the first alone, the
    second too."""
    runs: list[list[str]] = []
    for line in lines:
        if "node_rank=1" in line:
            runs[-1] = [runs[-1][0], line]
        elif "node_rank=0" in line:
            runs.append([line, line.replace("node_rank=0", "node_rank=1")])
        else:
            runs.append([line] * (2 if "--nnodes=2" in line else 1))
    return runs


def cut_recipe(command: str) -> str:
    """A command of recipes.md or learning.md at the size of seconds."""
    command = command.replace("checkpoint-200", "checkpoint-1")
    if command.startswith("pytest"):
        return f"{command} --collect-only -q"
    if "grpo.sweep" in command:
        return f"{command} --table-only"  # checks every variant, and runs none
    if "learning_vs_trl.py" in command:
        return "python benchmarks/learning_vs_trl.py --table-only"
    if "presets_learn.py" in command:
        return f"{command} --steps 1 --seeds 0 --presets grpo"
    if "gsm8k_learns.py" in command:
        return command + (
            ""
            if "--table-only" in command
            else " --steps 1 --seeds 0 --problems 2 --output results/g.json"
        )
    programs = ("launch.sh", "train_grpo.py", "grpo.evaluation")
    assert any(program in command for program in programs), f"unknown: {command}"
    return f"{command} {CUTS} optim.min_lr=null rollout.prompts_per_step=2 eval.max_samples=2"


@pytest.mark.slow
def test_every_command_of_the_recipes_works(tree, tmp_path):
    """With models and data by their own names, from a Hub on this machine; the built-in model is an
    untrained one."""
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy, ignore=shutil.ignore_patterns("runs"))
    shutil.rmtree(copy / "FOLDER")
    save_random_model(copy / "FOLDER", max_position_embeddings=2048)
    for path in (copy / "configs").glob("tiny_*.yaml"):
        path.write_text(
            path.read_text()
            .replace("builtin:tiny", "FOLDER")
            .replace("eval: {", "eval: {max_samples: 2, ")
        )
    (copy / "assets" / "data" / "gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        shutil.copy(copy / "train.jsonl", copy / "assets" / "data" / "gsm8k" / f"{name}.jsonl")
    shutil.copytree(copy / "FOLDER", copy / "assets" / "models" / "gsm8k-7m")
    rows = [json.loads(line) for line in (copy / "train.jsonl").open()]
    publish(tmp_path / "hub", rows, rows[:9])
    for name in (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "meta-llama/Llama-3.2-1B-Instruct",
    ):
        shutil.copytree(copy / "FOLDER", tmp_path / "hub" / "models" / name)
    executed = []
    with hub(tmp_path / "hub") as (endpoint, _):
        variables = pointed_at(endpoint, tmp_path / "cache") | {
            "GRPO_TEST_ASSETS": str(copy / "assets")
        }
        for command in map(cut_recipe, [command for path in RECIPES for command in commands(path)]):
            execute(copy, [command], **variables)
            executed.append(command)
    assert len(executed) >= 6
    assert (copy / "runs" / "gsm8k_smollm2_1.7b" / "evaluation.json").exists()
