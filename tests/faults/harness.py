"""Start runs, hurt them, and compare what they leave; used by the tests here and by ``soak.py``."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from conftest import ROOT, environment_of_runs, small_run
from outputs import lines, states
from processes import Forked

from grpo.telemetry.samples import read_samples

FAULTY = ROOT / "tests" / "faults" / "faulty.py"


class Started:
    """A run under way, whose output goes to a file beside the output folder.

    Args:
        fault: see ``faulty.py``.
        launcher: set a launcher's variables also for a single rank.
        torchrun: a new interpreter, under torchrun with these options if there are several ranks
            (``processes_of`` finds such a run's processes). Without it the ranks are forks (see
            ``processes.py``).
    """

    def __init__(
        self,
        output: Path,
        arguments,
        *,
        ranks=1,
        fault="",
        env=None,
        launcher=False,
        torchrun=None,
    ):
        self.output = Path(output)
        self.log = Path(f"{output}.log")
        environment = environment_of_runs(env)
        script = ROOT / "train_grpo.py"
        if fault or "GRPO_TRACE" in environment:
            script = FAULTY
            environment["GRPO_FAULT"] = fault
        arguments = [*map(str, arguments)]
        self.began = time.monotonic()
        self.start = self.log.stat().st_size if self.log.exists() else 0
        if torchrun is None:
            size = ranks if ranks > 1 or launcher else None
            self.process = Forked(
                script,
                arguments,
                ranks=size,
                env=environment,
                stdout=self.log,
                stderr=self.log,
            )
            return
        words = [sys.executable]
        if ranks > 1:
            words += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc_per_node={ranks}",
                *torchrun,
            ]
        words += [str(script), *arguments]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def text(self) -> str:
        """What the run has printed so far."""
        if not self.log.exists():
            return ""
        with open(self.log, "rb") as log:
            log.seek(self.start)
            return log.read().decode(errors="replace")

    def wait_for(self, text: str, *, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.text():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"no {text!r}:\n{self.text()[-3000:]}"
            time.sleep(0.02)

    def ranks(self) -> dict[int, int]:
        """Rank -> pid of the trainer's processes; the launcher is not among them."""
        if isinstance(self.process, Forked):
            return self.process.alive()
        return {rank: pid for pid, rank in processes_of(self.output).items() if rank is not None}

    def kill(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank, or to what was started: torchrun, all forks, or the single
        process."""
        if rank is None:
            self.process.send_signal(number)
        else:
            os.kill(self.ranks()[rank], number)

    def end(self, *, timeout: float = 180, patience: float = 20, alone: bool = True) -> int:
        """The exit code, when all of the run is gone: within ``patience`` seconds of what was
        started."""
        try:
            code = self.process.wait(timeout)
            deadline = time.monotonic() + patience
            while alone and processes_of(self.output):
                assert time.monotonic() < deadline, "ranks outlived the run"
                time.sleep(0.05)
            return code
        finally:
            self.process.kill()
            for pid in processes_of(self.output) if alone else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes_of(output: Path) -> dict[int, int | None]:
    """Processes that have ``output_dir=output`` on their command line: pid -> rank (None:
    torchrun)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if f"output_dir={output}".encode() in words:
                variables = dict(
                    v.split(b"=", 1)
                    for v in (folder / "environ").read_bytes().split(b"\0")
                    if b"=" in v
                )
                is_launcher = b"torch.distributed.run" in words
                found[int(folder.name)] = None if is_launcher else int(variables.get(b"RANK", b"0"))
    return found


def run(output: Path, arguments, *, timeout: float = 180, **how) -> Started:
    """To its end; asserts that it ended well."""
    started = Started(output, arguments, **how)
    code = started.end(timeout=timeout)
    assert code == 0, f"exit code {code}\n{started.text()[-4000:]}"
    return started


def tiny(model: Path, output: Path, *more: str, steps: int = 6, problems: int = 24) -> list[str]:
    """A run of 4 steps an epoch, in which everything that has a state has one."""
    return [
        *small_run(model, output),
        f"data.max_train_samples={problems}",
        f"optim.max_steps={steps}",
        "algorithm.beta=0.05",
        "optim.weight_decay=0.1",
        "optim.lr_scheduler_type=cosine",
        "optim.warmup_steps=2",
        "eval.every=3",
        *more,
    ]


def bits(output: Path, step: int) -> dict[str, str]:
    """SHA-256 of the file of weights, and of all tensors of the optimizer and of a reference that
    moves."""
    folder = output / f"checkpoint-{step}"
    tensors = hashlib.sha256()
    for name, tensor in sorted(states(folder).items()):
        tensors.update(name.encode() + tensor.numpy().tobytes())
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }
    return files | {"states": tensors.hexdigest()}


def mend_manifest(folder: Path) -> None:
    """Make the manifest of a checkpoint that was changed true again."""
    paths = [
        path for path in folder.rglob("*") if path.is_file() and path != folder / "manifest.json"
    ]
    data = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    files = {name: hashlib.sha256(text).hexdigest() for name, text in data.items()}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))


def assert_same_run(one: Path, other: Path, steps: int) -> None:
    """Tolerance 0: every metric of every step, the completions written, the final weights and
    optimizer."""
    assert lines(one) == lines(other)
    assert bits(one, steps) == bits(other, steps)
    names = sorted(path.name for path in (one / "completions").iterdir())
    assert names == sorted(path.name for path in (other / "completions").iterdir())
    for name in names:
        assert read_samples(one / "completions" / name) == read_samples(
            other / "completions" / name
        ), name
