"""Runs that sample with real vLLM servers, which they start; and kills of either process at any
moment."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from conftest import ROOT
from harness import Started, run
from outputs import lines
from vllm_server import vllm_command

from grpo.commands.evaluation import main

pytestmark = pytest.mark.slow
PATIENCE = 600
"""Seconds for a run of a few steps, of which a server takes 15 to start on a quiet machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


def engine(output: Path) -> list[str]:
    weights = output.parent / "weights"
    weights.mkdir(exist_ok=True)
    return [
        "rollout.engine=vllm",
        f"rollout.vllm_command={vllm_command()}",
        f"rollout.weights_folder={weights}",
    ]


def settings(assets: Path, output: Path, *more: str) -> list[str]:
    data = assets / "data" / "gsm8k"
    return [
        f"--config={ROOT}/configs/gsm8k_cpu.yaml",
        f"output_dir={output}",
        f"model.name_or_path={assets}/models/gsm8k-7m",
        *(
            f"data.dataset={data}/train.jsonl",
            "data.config_name=null",
            "data.train_split=train[:64]",
        ),
        *(
            f"data.eval_dataset={data}/test.jsonl",
            "data.eval_split=train[:8]",
            "eval.max_samples=8",
        ),
        *(
            "rollout.prompts_per_step=4",
            "rollout.num_generations=4",
            "rollout.max_completion_length=128",
        ),
        *(
            "optim.max_steps=3",
            "optim.warmup_steps=0",
            "runtime.threads_per_rank=1",
            "checkpoint.save_steps=1",
        ),
        *engine(output),
        *more,
    ]


def servers_of(output: Path) -> list[int]:
    """Pids of the servers of this run: those whose port is in its log, and their processes."""
    ports = re.findall(r"'port': (\d+)", (output / "vllm.log").read_text())
    options = {f"--port={port}".encode() for port in ports}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if options.intersection(words):
            found.append(int(process.name))
    return found


def wait_until_gone(output: Path) -> None:
    deadline = time.monotonic() + 60
    while servers_of(output):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def steps_of(output: Path) -> list[dict]:
    return [line for line in lines(output) if "reward" in line]


def check(output: Path) -> None:
    """Three steps, each once, whose log-probs are those of the update."""
    steps = steps_of(output)
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["sampling/logprob_difference"] < 1e-4
        assert line["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3)
    wait_until_gone(output)


def test_a_run_of_an_adapter_is_killed_and_continued_and_its_checkpoint_evaluated_with_both_engines(
    assets, folder
):
    output = folder / "killed"
    arguments = settings(assets, output, "lora.rank=4", "optim.learning_rate=1e-3")
    first = Started(output, arguments)
    first.wait_for("step 1/3", timeout=PATIENCE)
    assert servers_of(output)
    time.sleep(random.random() * 3)
    first.kill(signal.SIGKILL)
    first.end()
    wait_until_gone(output)
    run(output, arguments, timeout=PATIENCE)
    check(output)
    assert list((folder / "weights").iterdir()) == []

    command = ["--model", str(output / "checkpoint-3"), "runtime.threads_per_rank=1"]
    tables = {
        name: evaluated(command, name, folder / f"{name}.json") for name in ("builtin", "vllm")
    }
    assert tables["vllm"] == tables["builtin"]


def evaluated(command: list[str], engine: str, output: Path) -> list:
    """The greedy completions and results of an evaluation."""
    assert main([*command, f"rollout.engine={engine}", "--output", str(output)]) == 0
    (model,) = json.loads(output.read_text())["models"]
    return [problem["greedy"] for problem in model["problems"]]


def test_two_sharded_ranks_share_a_server_and_continue_when_it_was_killed(assets, folder):
    output = folder / "shared"
    arguments = settings(assets, output, "runtime.parallel=fsdp")
    started = Started(output, arguments, ranks=2)
    started.wait_for("step 1/3", timeout=PATIENCE)
    servers = servers_of(output)
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    assert started.end(timeout=PATIENCE) == 1
    (error,) = re.findall("^error: .*", started.text(), re.M)
    assert "has ended (exit code -9)" in error
    assert f"see {output}/vllm.log" in error
    run(output, arguments, ranks=2, timeout=PATIENCE)
    check(output)
