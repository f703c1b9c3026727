"""Dashboards: wandb, trackio and TensorBoard.

Each class has ``log(step, metrics, completions)``, where a completion is a row of
:func:`table_row`, and ``finish()``. Packages are imported when a dashboard starts: they are
optional."""

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
"""Longest time that wandb waits for its server at the start, and for the upload at the end.
torchrun kills a process 30 seconds after it has asked it to stop."""


def table_row(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a completion as a row of a table, without the values of single tokens."""
    row = {}
    for name, value in record.items():
        # "sampled" has a value for each token, or is None if the model wrote them all. All rows of
        # a table need the same columns.
        if not isinstance(value, list | dict) and name != "sampled":
            row[name] = value
    for name, value in record["rewards"].items():
        row[f"rewards/{name}"] = value
    return json_safe(row)


class Service:
    """The part of wandb and trackio that is the same: a run of either package logs alike."""

    def log(
        self,
        step: int,
        metrics: dict[str, Any],
        completions: list[dict[str, Any]],
    ) -> None:
        """Send the metrics of a step; if there are completions, with a table of them."""
        values = dict(metrics)
        if completions:
            values["completions"] = self._package.Table(
                columns=list(completions[0]),
                data=[list(row.values()) for row in completions],
            )
        self._run.log(values, step=step)

    def finish(self) -> None:
        """End the run, after what was logged has been sent."""
        self._run.finish()


class Wandb(Service):
    """A run in wandb: online, or in a folder for ``wandb sync``.

    Args:
        run_id: wandb's id of the run. With the same id a resumed run continues there.
        print_line: prints a line on the console.
    """

    def __init__(
        self,
        config: Config,
        run_id: str | None,
        print_line: Callable[[str], None],
    ):
        # Before each table training waits for an answer of the server: this bounds the wait.
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
            config=config.masked_values(),
            settings=wandb.Settings(
                silent=True,
                init_timeout=TIMEOUT_S,
                finish_timeout=TIMEOUT_S,
            ),
        )
        mode = config.logging.wandb
        # wandb's own switch; the argument of init would win over it.
        if os.environ.get("WANDB_MODE") == "offline":
            mode = "offline"
        try:
            # Without a key init would ask on the terminal, while the other ranks wait. A wandb run
            # that the calling program has started goes on, and needs no key.
            needs_login = mode == "online" and wandb.run is None
            if needs_login and not wandb.login(prompt=False, verify=False):
                raise wandb.errors.UsageError("no API key: run `wandb login`")
            run = start(mode=mode)
        except Exception as error:
            # There is no server, or it refuses the key.
            print_line(f"warning: wandb {mode} failed ({first_line(error)}); going on offline")
            # Otherwise the failed attempt keeps the run's id in use.
            wandb.teardown()
            run = start(mode="offline")
        # Charts are over steps, not over wandb's counter of calls.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run = run

        how_to_send = (
            f"offline; send this run with: wandb sync {folder}/wandb/offline-run-*-{run_id}"
        )
        print_line(f"wandb     {run.url or how_to_send}")

    def log(
        self,
        step: int,
        metrics: dict[str, Any],
        completions: list[dict[str, Any]],
    ) -> None:
        """See :meth:`Service.log`."""
        # wandb's counter of calls is the step, too: so the server ignores the steps that a resumed
        # run sends again.
        super().log(step, metrics | {"step": step}, completions)

    def finish(self) -> None:
        """End the run, as failed if an exception is being handled."""
        has_failed = sys.exc_info()[0] is not None
        self._run.finish(exit_code=int(has_failed))


class Trackio(Service):
    """A run in trackio: in its folder on this machine, or where its environment variables say (a
    Space, a server).

    A resumed run continues the newest run of its name, in which the steps after the checkpoint are
    then there twice.
    """

    def __init__(self, config: Config, is_resumed: bool):
        import trackio

        self._package = trackio
        self._run = trackio.init(
            project=config.logging.project,
            # The whole path, since trackio finds the run to continue by its name.
            name=config.logging.run_name or config.output_dir,
            # No dashboard inside of a notebook.
            embed=False,
            resume="allow" if is_resumed else "never",
            config=config.masked_values(),
        )


class TensorBoard:
    """The event file of one start of a run, in ``output_dir/tensorboard``.

    Args:
        first_step: the first step that this start logs. TensorBoard hides what an interrupted run
            has logged from this step on.
    """

    def __init__(self, config: Config, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        folder = f"{config.output_dir}/tensorboard"
        self._writer = SummaryWriter(folder, purge_step=first_step)

    def log(
        self,
        step: int,
        metrics: dict[str, Any],
        completions: list[dict[str, Any]],
    ) -> None:
        """Write the metrics of a step. The event file has no place for completions."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # TensorBoard shows the step now, and an error of the disk is raised here.
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()
