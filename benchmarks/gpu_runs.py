"""Checks of ``gpu.py`` that start the trainer: killed and continued, memory."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_common import ROOT, Bench, Found, NotRun, check, expect

from grpo.tasks.tiny import build_tiny_model

try:
    import train_grpo
    from grpo.run.saver import Saver

    MISSING = None
except ModuleNotFoundError as error:  # pydantic, where only torch and transformers are installed
    if error.name.startswith(("grpo", "train_grpo")):
        raise
    MISSING = error.name

REWARD = (
    "reward.functions=[{name: tag_groups, args: {pattern: (0)|(1)|(2)|(3)|(4)|(5)|(6)|(7)|(8)|(9), max_value: 1.0}}]"
)
"""The number of different digits in a completion: random models get a gradient from it, too."""
VOLATILE = ("step_time", "tokens_per_second", "time/")


@dataclass
class Trainer:
    """A fork that runs the trainer."""

    child: int
    log: Path

    def end(self) -> tuple[int, str]:
        """Wait for it; the exit code (negative for a signal) and the output."""
        _, status = os.waitpid(self.child, 0)
        return os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace")

    def complete(self) -> str:
        """Wait for it, expect that it ended well; the output."""
        code, text = self.end()
        expect(code == 0, f"{self.log.stem}: exit code {code}: {' / '.join(text.splitlines()[-4:])}")
        return text


def start(bench: Bench, name: str, *settings: str, main: Callable | None = None, env: dict | None = None) -> Trainer:
    """Start a short run in ``scratch/<name>``; ``main`` takes the place of :func:`train_grpo.main`."""
    if MISSING:
        raise NotRun(f"no {MISSING}")
    arguments = [
        f"--config={ROOT}/configs/tiny_arithmetic.yaml",
        f"model.name_or_path={tiny_model(bench)}",
        *small_run(bench),
    ]
    arguments += [f"output_dir={bench.scratch / name}", *settings]
    log = bench.scratch / f"{name}.txt"
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(env or {})
        code = 1
        try:
            code = (main or train_grpo.main)(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return Trainer(child, log)


def start_building(bench: Bench) -> int | None:
    """Build ``builtin:tiny`` in a fork while other checks run, which takes a minute of CPU; its process id."""
    if MISSING or bench.is_small or (child := os.fork()):
        return None if MISSING or bench.is_small else child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        torch.set_num_threads(4)
        build_tiny_model()
    finally:
        (bench.scratch / "tiny").touch()
        os._exit(0)


def tiny_model(bench: Bench) -> str:
    if bench.is_small:
        return str(bench.model_folder)
    while not (bench.scratch / "tiny").exists():
        time.sleep(0.1)
    return "builtin:tiny"


def small_run(bench: Bench) -> list[str]:
    steps, prompts, length = (3, 2, 6) if bench.is_small else (8, 8, 48)
    return [
        REWARD, f"runtime.device={bench.device.type}", "runtime.deterministic=true", "runtime.precision=bf16",
        f"rollout={{prompts_per_step: {prompts}, num_generations: 4, max_completion_length: {length}, temperature: 1.5}}",
        "algorithm.beta=0.04", f"optim.max_steps={steps}", "checkpoint.save_steps=1", "checkpoint.keep=100",
        "eval.before_training=false", "eval.num_samples=1", "eval.temperature=0", "data.max_eval_samples=1",
        "logging.log_completions=0", "runtime.rehearse=false", "runtime.threads_per_rank=1", "reward.num_workers=1",
    ]  # fmt: skip


def lines_of(folder: Path) -> list[dict]:
    """The metrics of each step, without times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(VOLATILE)} for row in rows]


def results_of(folder: Path) -> tuple[list[dict], dict[str, str]]:
    """Metrics without times, and the digests of weights and optimizer at the end."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    files = json.loads((last / "manifest.json").read_text())["files"]
    digests = {name: files[name]["sha256"] for name in ("model.safetensors", "trainer/states/__0_0.distcp")}
    return lines_of(folder), {"last": last.name} | digests


def whole_run(bench: Bench) -> Path:
    """The folder of a run without interruption; an earlier check may have made it."""
    if not (bench.scratch / "whole.txt").exists():
        text = start(bench, "whole").complete()
        expect("not captured" not in text, next((line for line in text.splitlines() if "not captured" in line), ""))
    return bench.scratch / "whole"


@check(240)
def kill_and_resume(bench: Bench) -> Found:
    """a tiny run under runtime.deterministic, ended by kill -9 and continued, has the bits of one that was not"""
    whole = whole_run(bench)
    killed, folder = start(bench, "killed"), bench.scratch / "killed"
    deadline = time.monotonic() + 100
    while not (folder / "checkpoint-1" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(killed.child, signal.SIGKILL)
    code, text = killed.end()
    expect(code == -signal.SIGKILL, f"the run ended before it was killed: {code} {text[-300:]}")
    steps = [path.name for path in folder.glob("checkpoint-*")]
    text = start(bench, "killed").complete()
    expect(len(steps) < len(list(folder.glob("checkpoint-*"))), "the run was complete when it was killed")
    (expected, digests), (found, found_digests) = results_of(whole), results_of(folder)
    unequal = [row["step"] for row, other in zip(expected, found, strict=False) if row != other]
    expect(len(found) == len(expected) and not unequal, f"metrics differ at steps {unequal} of {len(expected)}")
    expect(found_digests == digests, f"weights or optimizer state differ: {found_digests} instead of {digests}")
    expect(any(row.get("grad_norm", 0) > 0 for row in expected), "every gradient is 0: such a run shows nothing")
    return {"checkpoints before the kill": len(steps), "steps": len(expected)}


def large_run(bench: Bench, *more: str) -> list[str]:
    """One or two steps of the random model; every row has the full length, as its model never ends one."""
    length, tokens = (16, 100) if bench.is_small else (256, 8192)
    return [
        f"model.name_or_path={bench.model_folder}", "runtime.deterministic=false", "runtime.rehearse=true", "optim.max_steps=2",
        f"rollout={{prompts_per_step: 4, num_generations: 8, max_completion_length: {length}}}", f"optim.tokens_per_microbatch={tokens}", *more,
    ]  # fmt: skip


def without_saving(arguments: list[str]) -> int:
    """The trainer without checkpoints, which are gigabytes here."""
    nothing = lambda *_: None  # noqa: E731
    with (
        patch.object(Saver, "dry_run", nothing),
        patch.object(Saver, "save_if_due", nothing),
        patch.object(Saver, "save_newest", nothing),
    ):
        return train_grpo.main(arguments)


def measured_peaks(arguments: list[str]) -> int:
    """The trainer; prints the peak of the memory rehearsal and that of the steps."""
    train, reset = train_grpo.train, torch.cuda.reset_peak_memory_stats

    def measured(run):
        rehearsed = torch.cuda.max_memory_allocated()
        reset()
        train(run)
        print("peaks", rehearsed, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())

    with patch.object(train_grpo, "train", measured):
        return without_saving(arguments)


@check(120)
def rehearsed_peak(bench: Bench) -> Found:
    """the memory rehearsal at start needs at least as much as two real steps"""
    bench.need_gpu()
    text = start(bench, "rehearsed", *large_run(bench), main=measured_peaks).complete()
    rehearsed, real, reserved = (int(n) / 2**30 for n in re.search(r"^peaks (\d+) (\d+) (\d+)", text, re.M).groups())
    expect(rehearsed >= real, f"rehearsed {rehearsed:.2f} GiB, real {real:.2f} GiB")
    return {"rehearsed GiB": rehearsed, "real GiB": real, "reserved GiB": reserved}


@check(150)
def too_large_microbatch(bench: Bench) -> Found:
    """a micro-batch too large for (a part of) the memory is refused before the first step, with a value that fits, and does"""
    bench.need_gpu()

    def with_little_memory(arguments: list[str]) -> int:
        torch.cuda.set_per_process_memory_fraction(1e-4 if bench.is_small else 0.35)
        return without_saving(arguments)

    settings = large_run(
        bench, "algorithm.beta=0.0", "optim.max_steps=1", f"rollout.prompts_per_step={4 if bench.is_small else 32}"
    )
    asked = 2**16
    code, text = start(
        bench, "refused", *settings, f"optim.tokens_per_microbatch={asked}", main=with_little_memory
    ).end()
    told = re.search(r"tokens_per_microbatch=65536 is too much .*; (\d+) fits", text)
    expect(code == 2 and told is not None, f"exit code {code}: {' / '.join(text.splitlines()[-3:])}")
    fits = int(told[1])
    expect(0 < fits < asked, f"{fits} is said to fit")
    start(bench, "fits", *settings, f"optim.tokens_per_microbatch={fits}", main=with_little_memory).complete()
    return {"refused": asked, "fits": fits}
