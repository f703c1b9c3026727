"""What a run reports: accumulated as (sum, count), reduced over ranks once a step, written to console, JSONL and wandb."""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from grpo.distributed import World

WANDB_SECONDS = {"login_timeout": 30, "init_timeout": 20, "finish_timeout": 60}
"""Longest waits for a key typed in, for the server at the start, and for the upload at the end: wandb's own have no end."""


class Accumulator:
    """Means, minima and maxima over rows, micro-batches and ranks, without unweighted means of means."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._extremes: dict[str, float] = {}

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float = 1.0) -> None:
        """Add a sum and the number of things summed; the metric is the ratio of the totals over all ranks."""
        pair = torch.stack([torch.as_tensor(total, dtype=torch.float64), torch.as_tensor(count, dtype=torch.float64)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def add_values(self, name: str, values: torch.Tensor) -> None:
        """Add the mean of finite values; NaN ones are left out."""
        finite = values[torch.isfinite(values)].double()
        self.add(name, finite.sum(), float(finite.numel()))

    def add_all(self, stats: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        for name, (total, count) in stats.items():
            self.add(name, total, count)

    def maximum(self, name: str, value: float) -> None:
        self._extremes[name] = max(value, self._extremes.get(name, -float("inf")))

    def minimum(self, name: str, value: float) -> None:
        self._extremes[name] = -max(-value, -self._extremes.get(name, float("inf")))

    def reduce(self, world: World, minima: tuple[str, ...] = (), totals: tuple[str, ...] = ()) -> dict[str, float]:
        """One sum and one maximum over ranks; the names must be the same on all of them.

        Args:
            minima: extremes that are minima; totals: sums that are reported as they are, not as means.
        """
        names = sorted(self._sums)
        metrics: dict[str, float] = {}
        if names:
            pairs = world.sum(torch.stack([self._sums[name].cpu() for name in names])).tolist()
            for name, (total, count) in zip(names, pairs, strict=True):
                metrics[name] = total if name in totals else total / count if count else 0.0
        names = sorted(self._extremes)
        if names:
            signs = torch.tensor([-1.0 if name in minima else 1.0 for name in names], dtype=torch.float64)
            values = torch.tensor([self._extremes[name] for name in names], dtype=torch.float64)
            values = world.max(values * signs) * signs
            metrics |= dict(zip(names, values.tolist(), strict=True))
        return metrics


class Reporter:
    """Console, ``metrics.jsonl``, ``completions/`` and wandb, on the main rank; on the others it does nothing."""

    def __init__(
        self,
        output_dir: str | Path,
        *,
        is_main: bool,
        first_step: int,
        max_steps: int,
        every: int = 1,
        wandb_mode: str = "disabled",
        project: str = "grpo",
        run_name: str | None = None,
        wandb_run_id: str | None = None,
        config: dict[str, Any] | None = None,
    ):
        self.output_dir, self.is_main, self.every, self.max_steps = Path(output_dir), is_main, every, max_steps
        self.wandb_run_id = wandb_run_id
        self._wandb = None
        if not is_main:
            return
        (self.output_dir / "completions").mkdir(parents=True, exist_ok=True)
        self._jsonl_path = self.output_dir / "metrics.jsonl"
        self._drop_steps_from(first_step)
        self._jsonl = open(self._jsonl_path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=max_steps, initial=first_step, desc="steps", unit="step", disable=not terminal, dynamic_ncols=True
        )
        if wandb_mode != "disabled":
            self._wandb = self._start_wandb(wandb_mode, project, run_name or self.output_dir.name, config or {})

    def say(self, text: str) -> None:
        """A line on the console, above the bars."""
        if self.is_main:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def bar(self, description: str, total: int, unit: str = "tok"):
        """A short-lived bar for a phase; its ``update`` takes what has been done since the last call."""
        shown = self.is_main and sys.stderr.isatty()
        return tqdm(total=total, desc=description, unit=unit, leave=False, disable=not shown, dynamic_ncols=True)

    def step(self, metrics: dict[str, Any]) -> None:
        """Write one step (1-based ``step``) to JSONL, and every N steps to the console and wandb."""
        if not self.is_main:
            return
        self._jsonl.write(json.dumps(json_safe(metrics)) + "\n")
        self._jsonl.flush()
        self._bar.update(metrics["step"] - self._bar.n)
        if metrics["step"] % self.every == 0 or metrics["step"] == self.max_steps or "eval/greedy_accuracy" in metrics:
            if "reward" in metrics:
                self.say(console_line(metrics, self.max_steps))
            if "eval/greedy_accuracy" in metrics:
                self.say(evaluation_line(metrics, self.max_steps))
            if self._wandb is not None:
                self._log_to_wandb(metrics)

    def completions(self, step: int, records: list[dict[str, Any]]) -> None:
        """A few completions of a step, one JSON object a line, to ``completions/step_<step>.jsonl``."""
        if not self.is_main or not records:
            return
        with open(self.output_dir / "completions" / f"step_{step:06d}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(json_safe(record), ensure_ascii=False) + "\n" for record in records)

    def close(self) -> None:
        if not self.is_main:
            return
        self._bar.close()
        self._jsonl.close()
        if self._wandb is not None:
            try:
                self._wandb.finish(exit_code=0 if sys.exc_info()[0] is None else 1)  # closed by a failure: a failed run
            except Exception as error:  # the service may have gone away
                print(
                    f"warning: wandb could not finish ({_first_line(error)}); metrics.jsonl has everything", flush=True
                )

    def _drop_steps_from(self, first_step: int) -> None:
        """Forget lines of steps that a resumed run will do again, and a last line that a kill cut short."""
        if not self._jsonl_path.exists():
            return
        kept = []
        for line in self._jsonl_path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["step"] <= first_step and line.endswith("\n") and first_step > 0:
                kept.append(line)
        temporary = self._jsonl_path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, self._jsonl_path)

    def _start_wandb(self, mode: str, project: str, name: str, config: dict[str, Any]):
        """A wandb run, or None with a warning: a missing package, key or server never stops training."""
        try:
            import wandb

            self.wandb_run_id = self.wandb_run_id or secrets.token_hex(4)
            settings = wandb.Settings(silent=True, **WANDB_SECONDS)
            options = dict(project=project, name=name, id=self.wandb_run_id, config=config, dir=str(self.output_dir))
            try:
                run = wandb.init(mode=mode, resume="allow" if mode == "online" else None, settings=settings, **options)
            except Exception as error:  # the service may be away, or refuse us
                if mode == "offline":
                    raise
                self.say(f"warning: wandb online failed ({_first_line(error)}); going on offline")
                wandb.teardown()  # what is left of the attempt still holds the run's id
                run = wandb.init(mode="offline", settings=settings, **options)
            # Our own axis: wandb drops points whose step is not above the last one, which a resumed run's are not.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:
            self.say(f"warning: no wandb ({_first_line(error)}); metrics.jsonl has everything")
            return None

    def _log_to_wandb(self, metrics: dict[str, Any]) -> None:
        try:
            self._wandb.log(metrics)
        except Exception as error:  # the service may have gone away
            self.say(f"warning: wandb stopped ({_first_line(error)}); metrics.jsonl has everything")
            self._wandb = None


def console_line(metrics: dict[str, Any], max_steps: int) -> str:
    """One line a step, led by the reward."""
    parts = [f"step {metrics['step']:>{len(str(max_steps))}}/{max_steps}", f"reward {metrics['reward']:.3f}"]
    parts += [
        f"{name.split('/')[1]} {metrics[name]:.3f}"
        for name in metrics
        if name.startswith("rewards/") and name.endswith("/mean")
    ]
    shown = (("kl", "kl", ".4f"), ("entropy", "entropy", ".3f"), ("completions/mean_length", "len", ".1f"),
             ("frac_reward_zero_std", "equal", ".2f"), ("grad_norm", "grad", ".3f"), ("learning_rate", "lr", ".1e"),
             ("tokens_per_second", "tok/s", ".0f"), ("step_time", "s", ".2f"))  # fmt: skip
    return "  ".join(parts + [f"{label} {metrics[name]:{form}}" for name, label, form in shown if name in metrics])


def evaluation_line(metrics: dict[str, Any], max_steps: int) -> str:
    """One line for an evaluation between the first and the last."""
    parts = [f"eval {metrics['step']:>{len(str(max_steps))}}/{max_steps}"]
    return "  ".join(parts + [f"{_spoken(n)} {evaluation_form(n).format(metrics[n])}" for n in _shown(metrics)])


def evaluation_table(before: dict[str, float] | None, after: dict[str, float]) -> str:
    """Evaluations side by side, one metric a line."""
    rows = [f"{'':28}{'before':>10}{'after':>10}"]
    for name in _shown(after):
        form = evaluation_form(name)
        old = form.format(before[name]) if before and name in before else "-"
        rows.append(f"{_spoken(name):28}{old:>10}{form.format(after[name]):>10}")
    return "\n".join(rows)


def evaluation_form(name: str) -> str:
    """How a metric of an evaluation is written: rates as percentages, lengths and rewards as they are."""
    if name.startswith("eval/rewards/"):
        return "{:.4f}"
    return "{:.2f}" if name.endswith("mean_length") else "{:.1%}"


def _shown(metrics: dict[str, Any]) -> list[str]:
    """What the console shows of an evaluation: of pass@k the powers of two and the last, of greedy decoding the accuracy."""
    ks = [int(name.removeprefix("eval/pass@")) for name in metrics if name.startswith("eval/pass@")]
    hidden = {f"eval/pass@{k}" for k in ks if k & (k - 1) and k != max(ks)}
    hidden |= {name for name in metrics if name.startswith("eval/greedy_") and name != "eval/greedy_accuracy"}
    return [name for name in metrics if name.startswith("eval/") and name not in hidden]


def _spoken(name: str) -> str:
    return name.removeprefix("eval/").replace("_", " ")


def json_safe(value: Any) -> Any:
    """NaN and infinity have no JSON; null stands for them."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
