"""wandb, trackio and TensorBoard: metrics of a run, in the first two some completions too. Imported
when needed.

All three have ``log(step, metrics, completions)``, where a completion is a row of a table, and
``finish()``."""

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from grpo.config import Config
from grpo.system import first_line
from grpo.telemetry.records import json_safe

TIMEOUT_S = 20
"""Seconds that wandb waits for the server at the start, and for the upload at the end: torchrun
kills a process 30 seconds after it asked the process to stop."""


def table_row(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a completion as a row of a table: without what each of its tokens has."""
    row = {}
    for name, value in record.items():
        # It is None where the model wrote every token.
        if not isinstance(value, list | dict) and name != "sampled":
            row[name] = value
    for name, value in record["rewards"].items():
        row[f"rewards/{name}"] = value
    return json_safe(row)


class Service:
    """wandb or trackio, whose packages have the same functions for a run."""

    def log(self, step: int, metrics: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        shown = dict(metrics)
        if completions:
            shown["completions"] = self._package.Table(
                columns=list(completions[0]),
                data=[list(row.values()) for row in completions],
            )
        self._run.log(shown, step=step)

    def finish(self) -> None:
        self._run.finish()


class Wandb(Service):
    """A run in wandb, online or in a folder that ``wandb sync`` sends.

    Args:
        run_id: wandb's id of the run, the same at each start.
        print_line: prints a line on the console.
    """

    def __init__(
        self,
        config: Config,
        run_id: str | None,
        print_line: Callable[[str], None],
    ):
        # Before each table, training waits for the server's answer.
        os.environ.setdefault("WANDB_HTTP_TIMEOUT", "8")
        import wandb

        self._package = wandb
        folder = Path(config.output_dir)
        start = partial(
            wandb.init,
            project=config.logging.project,
            name=config.logging.run_name or folder.name,
            id=run_id,
            resume="allow",
            dir=folder,
            config=config.for_writing(),
            settings=wandb.Settings(
                silent=True,
                init_timeout=TIMEOUT_S,
                finish_timeout=TIMEOUT_S,
            ),
        )
        mode = config.logging.wandb
        if os.environ.get("WANDB_MODE") == "offline":
            mode = "offline"
        try:
            # Without a key init asks on a terminal, and the ranks wait. A program's own run, if it
            # has one, goes on.
            if (
                mode == "online"
                and wandb.run is None
                and not wandb.login(prompt=False, verify=False)
            ):
                raise wandb.errors.UsageError("no API key: run `wandb login`")
            run = start(mode=mode)
        except Exception as error:  # no server, or the server refuses the key
            print_line(f"warning: wandb {mode} failed ({first_line(error)}); going on offline")
            wandb.teardown()  # otherwise the failed attempt keeps the run's id in use
            run = start(mode="offline")
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run

        send = f"offline; send this run with: wandb sync {folder}/wandb/offline-run-*-{run_id}"
        print_line(f"wandb     {run.url or send}")

    def log(self, step: int, metrics: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        # wandb's own counter is the step too: the server then ignores the steps that a resumed run
        # sends again.
        super().log(step, metrics | {"step": step}, completions)

    def finish(self) -> None:
        failed = sys.exc_info()[0] is not None  # an exception is being handled
        self._run.finish(exit_code=int(failed))


class Trackio(Service):
    """A run in trackio's folder on this machine, or where its environment variables say (a Space, a
    server).

    A resumed run goes on where the newest run of its name ended: steps after its checkpoint are
    there twice."""

    def __init__(self, config: Config, is_resumed: bool):
        import trackio

        self._package = trackio
        self._run = trackio.init(
            project=config.logging.project,
            name=config.logging.run_name or config.output_dir,
            embed=False,
            resume="allow" if is_resumed else "never",
            config=config.for_writing(),
        )


class TensorBoard:
    """The event file of one start of a run, in ``output_dir/tensorboard``.

    Args: first_step: the first step that this start logs. TensorBoard hides later steps of an
        interrupted run.
    """

    def __init__(self, config: Config, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = f"{config.output_dir}/tensorboard"
        self._writer = SummaryWriter(folder, purge_step=first_step)

    def log(self, step: int, metrics: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # the file has the step, and an error of the disk shows here

    def finish(self) -> None:
        self._writer.close()
