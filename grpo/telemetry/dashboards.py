"""Dashboards: wandb, trackio and TensorBoard.

Each class has the methods ``log(step, metrics, completions)`` and ``finish()``. A completion is a
row that :func:`table_row` returns. Packages are optional, so each is imported when its dashboard
starts.
"""

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
"""Limit on the seconds that wandb waits for its server at the start, and for the upload at the end.
The limit is below the 30 seconds after which torchrun kills a process that it has asked to stop."""


def table_row(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a completion as a row of a table, without per-token values."""
    # "sampled" is a list with a value per token, or None if the model sampled all tokens. It is
    # always left out, since all rows of a table need the same columns.
    row = {
        name: value
        for name, value in record.items()
        if not isinstance(value, list | dict) and name != "sampled"
    }
    for name, value in record["rewards"].items():
        row[f"rewards/{name}"] = value
    return json_safe(row)


class Service:
    """Base of :class:`Wandb` and :class:`Trackio`, whose packages log in the same way."""

    def log(
        self,
        step: int,
        metrics: dict[str, Any],
        completions: list[dict[str, Any]],
    ) -> None:
        """Send the metrics of a step, with a table of completions if there are any."""
        values = dict(metrics)
        if completions:
            values["completions"] = self._package.Table(
                columns=list(completions[0]),
                data=[list(row.values()) for row in completions],
            )
        self._run.log(values, step=step)

    def finish(self) -> None:
        """End the run, after all logged data has been sent."""
        self._run.finish()


class Wandb(Service):
    """A run in wandb, either online or in a folder for ``wandb sync``.

    Args:
        run_id: wandb's id of the run. A resumed run has the same id, and continues the run in
            wandb.
        print_line: function that prints a line on the console.
    """

    def __init__(
        self,
        config: Config,
        run_id: str | None,
        print_line: Callable[[str], None],
    ):
        # Before each table, training waits for an answer of wandb's server. This variable limits
        # the wait.
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
        # WANDB_MODE is wandb's switch, but the argument of init would win over it.
        if os.environ.get("WANDB_MODE") == "offline":
            mode = "offline"
        try:
            # Without a key wandb.init would ask on the terminal, while the other ranks wait. A
            # wandb run that the calling program has started goes on, and needs no key.
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
        """Send a step as :meth:`Service.log` does, and its number as the metric ``step``."""
        # wandb's counter of calls is set to the step, too. So the server ignores the steps that a
        # resumed run sends again.
        super().log(step, metrics | {"step": step}, completions)

    def finish(self) -> None:
        """End the run. If an exception is being handled, wandb shows the run as failed."""
        has_failed = sys.exc_info()[0] is not None
        self._run.finish(exit_code=int(has_failed))


class Trackio(Service):
    """A run in trackio. It is stored in trackio's folder on this machine, or in the Space or server
    that trackio's environment variables name.

    A resumed run continues the newest run of the same name. trackio then has the steps after the
    checkpoint twice.
    """

    def __init__(self, config: Config, is_resumed: bool):
        import trackio

        self._package = trackio
        self._run = trackio.init(
            project=config.logging.project,
            # The default name is the whole path, since trackio finds the run to continue by its
            # name.
            name=config.logging.run_name or config.output_dir,
            # By default a notebook would show the dashboard.
            embed=False,
            resume="allow" if is_resumed else "never",
            config=config.masked_values(),
        )


class TensorBoard:
    """Event file in ``output_dir/tensorboard`` for one start of a run.

    Args:
        first_step: first step that this start logs. From this step on, TensorBoard hides the steps
            that earlier starts have logged.
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
        """Write the metrics of a step. Completions are left out, as the event file has no place for
        them."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # TensorBoard shows the step now, and an error of the disk is raised here.
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()
