"""The section ``logging``: the console, wandb and TensorBoard."""

from typing import Literal

from pydantic import Field

from grpo.config.schema import Section


class LoggingConfig(Section):
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode; metrics.jsonl is always written."""
    project: str = "grpo"
    """wandb project."""
    run_name: str | None = None
    """wandb run name; none: the name of output_dir."""
    group: str | None = None
    """wandb group, under which wandb collects several runs."""
    tags: list[str] = []
    """wandb tags of the run."""
    wandb_prefix: str = ""
    """Text before each name in wandb and TensorBoard, except evaluations; train/ gives TRL's names and x axis."""
    tensorboard: bool = False
    """Write TensorBoard's event files to output_dir/tensorboard; needs the extra "tensorboard"."""
    log_completions: int = Field(4, ge=0)
    """Completions to write to completions/ (Parquet, with the log-probs of each token) every N = `every` steps; 0: none."""
    every: int = Field(1, ge=1)
    """Console line, point in wandb and TensorBoard, and completions every N steps (metrics.jsonl has every step)."""

    @property
    def has_dashboards(self) -> bool:
        """True if the run is shown in wandb or TensorBoard."""
        return self.wandb != "disabled" or self.tensorboard
