"""wandb, trackio and TensorBoard: metrics, histograms and some completions of a run. Imported only if switched on."""

import os
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from grpo.config import Config
from grpo.system import first_line
from grpo.telemetry.records import LOGGED_PREFIX, json_safe

TIMEOUTS = {"init_timeout": 20, "finish_timeout": 20}
"""Seconds that wandb waits for the server at the start, and for the upload at the end: torchrun kills a process 30
seconds after it asked the process to stop."""
NOT_SHOWN = (
    "token_ids", "tokens", "logprobs", "updated_logprobs", "ref_logprobs", "rewards", "logged", "sampled", "messages",
)  # fmt: skip
"""Fields of a completion's record that are no column of wandb's table."""


class Wandb:
    """A run in wandb, online or in a folder that ``wandb sync`` sends.

    Args:
        run_id: wandb's id of the interrupted run that goes on; None for a new run.
        environment: facts about this start, stored in wandb beside the configuration.
        print_line: prints a line on the console.
    """

    def __init__(
        self, config: Config, run_id: str | None, environment: dict[str, Any], print_line: Callable[[str], None]
    ):
        os.environ.setdefault("WANDB_HTTP_TIMEOUT", "8")  # before each table, training waits for the server's answer
        import wandb

        self._wandb, logging = wandb, config.logging
        options = dict(
            project=logging.project, name=logging.run_name or Path(config.output_dir).name, id=run_id,
            dir=config.output_dir,
            config=config.for_writing() | {"environment": environment},
            settings=wandb.Settings(silent=True, **TIMEOUTS),
        )  # fmt: skip
        mode = "offline" if os.environ.get("WANDB_MODE") == "offline" else logging.wandb
        try:
            # Without a key init asks on a terminal, and the ranks wait. A program's own run, if it has one, goes on.
            if mode == "online" and wandb.run is None and not wandb.login(prompt=False, verify=False):
                raise wandb.errors.UsageError("no API key: run `wandb login`")
            self._run = wandb.init(mode=mode, resume="allow" if mode == "online" else None, **options)
        except Exception as error:  # no server, or the server refuses the key
            if mode == "offline":
                raise
            print_line(f"warning: wandb online failed ({first_line(error)}); going on offline")
            wandb.teardown()  # otherwise the failed attempt keeps the run's id in use
            self._run = wandb.init(mode="offline", **options)
        self.run_id = self._run.id
        """Continues this run in wandb when it is given to a later start."""
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for name in ("reward", "eval/greedy_accuracy"):  # the list of runs shows the best value too
            self._run.define_metric(name, step_metric="step", summary="last,max")
        if self._run.offline:
            parts = f"{shlex.quote(str(Path(config.output_dir) / 'wandb'))}/offline-run-*-{self.run_id}"
            print_line(f"wandb     offline; send this run with: wandb sync {parts}")
        else:
            print_line(f"wandb     {self._run.url}")

    def log(self, step: int, metrics: dict[str, Any], histograms: dict[str, Tensor], completions: list[dict]) -> None:
        shown = {"step": step} | metrics | _rich_values(self._wandb, histograms, completions)
        # wandb's own counter is the step too: the server then ignores the steps that a resumed run sends again.
        self._run.log(shown, step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run in trackio's folder on this machine, or where its environment variables say (a Space, a server).

    A resumed run goes on where the newest run of its name ended: steps after its checkpoint are there twice.
    """

    def __init__(self, config: Config, is_resumed: bool, environment: dict[str, Any]):
        import trackio

        self._trackio, logging = trackio, config.logging
        self._run = trackio.init(
            project=logging.project, name=logging.run_name or config.output_dir, embed=False,
            resume="allow" if is_resumed else "never", config=config.for_writing() | {"environment": environment},
        )  # fmt: skip

    def log(self, step: int, metrics: dict[str, Any], histograms: dict[str, Tensor], completions: list[dict]) -> None:
        self._run.log(metrics | _rich_values(self._trackio, histograms, completions), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish()


def _rich_values(package: Any, histograms: dict[str, Tensor], completions: list[dict]) -> dict[str, Any]:
    """Histograms and the table of completions, in the classes of wandb or trackio."""
    shown: dict[str, Any] = {name: package.Histogram(values.tolist()) for name, values in histograms.items()}
    if completions:
        rows = [_row(record) for record in json_safe(completions)]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(name) for name in columns] for row in rows]
        shown["completions"] = package.Table(columns=columns, data=data)
    return shown


def _row(record: dict[str, Any]) -> dict[str, Any]:
    """A completion as a row of the table."""
    rewards = {f"rewards/{name}": value for name, value in record["rewards"].items()}
    # A column has one type.
    logged = {LOGGED_PREFIX + name: str(value) for name, value in record.get("logged", {}).items()}
    row = {name: value for name, value in record.items() if name not in NOT_SHOWN}
    return row | {"prompt": str(record["prompt"])} | rewards | logged


class TensorBoard:
    """The event file of one start of a run, in ``output_dir/tensorboard``.

    Args:
        first_step: the first step that this start logs. TensorBoard hides later steps of an interrupted run.
        print_line: prints a line on the console.
    """

    def __init__(self, config: Config, first_step: int, print_line: Callable[[str], None]):
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(config.output_dir) / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=first_step)
        settings = yaml.safe_dump(config.for_writing(), sort_keys=False, allow_unicode=True)
        self._writer.add_text("config", _verbatim(settings), first_step)
        print_line(f"dashboard tensorboard --logdir {shlex.quote(str(folder))}")

    def log(self, step: int, metrics: dict[str, Any], histograms: dict[str, Tensor], completions: list[dict]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            self._writer.add_histogram(name, values, step)
        if completions:
            self._writer.add_text("completions", "\n\n---\n\n".join(map(_completion_text, completions)), step)
        self._writer.flush()  # the file has the step, and an error of the disk shows here

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


def _completion_text(record: dict[str, Any]) -> str:
    """A completion as Markdown."""
    rewards = "".join(f", {name} {value:g}" for name, value in record["rewards"].items())
    title = f"**reward {record['reward']:g}**{rewards}, advantage {record['advantage']:.3g}, {record['length']} tokens"
    parts = [title, "prompt", _verbatim(str(record["prompt"])), "completion", _verbatim(record["completion"])]
    if record.get("answer") is not None:
        parts += ["reference answer", _verbatim(record["answer"])]
    return "\n\n".join(parts)


def _verbatim(text: str) -> str:
    """Markdown that shows a text as it is, with ``?`` for broken Unicode, which an event file cannot hold."""
    return textwrap.indent(text.encode("utf-8", "replace").decode("utf-8"), "    ", lambda line: True)
