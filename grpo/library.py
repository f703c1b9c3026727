"""``grpo.train``: ``train_grpo.py`` as a function (docs/library.md). Importing this module imports
no torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config import Config, ConfigError, keys_of, make_config, unknown_key
from grpo.config.aliases import OTHER_NAMES
from grpo.rewards.functions import BUILTIN, OBJECT_PREFIX
from grpo.run.user_objects import UserObjects

PAGE = Path(__file__).resolve().parents[1] / "train_grpo.py"
"""The training loop, beside this package: the module ``train_grpo``, and the user's command."""
RUNNING = threading.Lock()
"""Held while a run trains in this process."""
TRL_ARGUMENTS = {"reward_funcs": "reward_functions", "train_dataset": "dataset"}


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """The results of a run, read from its folder."""

    output_dir: Path
    checkpoint: Path | None
    """The newest checkpoint, a Hugging Face folder; None after a debug run, which saves none."""
    steps: int
    """Steps that are complete."""
    before: dict[str, float]
    """The metrics ``eval/...`` before training that were computed; empty without such an
    evaluation."""
    after: dict[str, float]
    """The same of the newest evaluation of the run."""
    metrics: list[dict[str, Any]]
    """The lines of ``metrics.jsonl``, one dictionary per step, with None for a metric that was not
    computed; ``pandas.DataFrame(result.metrics)`` is a table."""

    @classmethod
    def load(cls, output_dir: str | os.PathLike[str]) -> TrainingResult:
        """Read a run's folder, also that of a run that was stopped."""
        from grpo.checkpoint.format import list_checkpoints
        from grpo.telemetry.records import read_lines

        folder = Path(output_dir)
        metrics = read_lines(folder / "metrics.jsonl")
        if not metrics:
            raise ValueError(f"{folder} is not a run: metrics.jsonl has no step")

        before = {}
        after = {}
        for line in metrics:
            evaluation = {}
            for name, value in line.items():
                if name.startswith("eval/") and value is not None:
                    evaluation[name] = value
            if line["step"] == 0:
                before = evaluation
            elif evaluation:
                after = evaluation
        checkpoints = list_checkpoints(folder)
        return cls(
            output_dir=folder,
            checkpoint=checkpoints[0][1] if checkpoints else None,
            steps=metrics[-1]["step"],
            before=before,
            after=after,
            metrics=metrics,
        )

    def __repr__(self) -> str:
        from grpo.telemetry.console import evaluation_table

        lines = [f"TrainingResult: {self.steps} steps in {self.output_dir}"]
        rewards = [line["reward"] for line in self.metrics if line.get("reward") is not None]
        if rewards:
            lines.append(
                f"reward of the first and of the last step: {rewards[0]:.3f}, {rewards[-1]:.3f}",
            )
        if self.after:
            lines.append(evaluation_table(self.before, self.after))
        if self.checkpoint:
            lines.append(
                f"AutoModelForCausalLM.from_pretrained({str(self.checkpoint)!r}) loads the model",
            )
        return "\n".join(lines)


def train(
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
    *,
    reward_functions: Any = None,
    tools: Any = None,
    environment_factory: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    **settings: Any,
) -> TrainingResult:
    """Train with GRPO, and return when the run is complete.

    The same call continues a run that was stopped.

    Args:
        config: settings as in ``configs/*.yaml``: a YAML file, a mapping (nested, or dotted keys),
            or a ``Config``.
        reward_functions: in place of ``reward.functions``: a function, a name, ``(function,
            weight)``, ``{name, weight, args}``, or a list of these. A function ``fn(prompts,
            completions, **columns) -> list[float | None]`` runs in a worker process, or in this
            process if it cannot be sent there.
        tools: in place of ``tools``: a list of functions and names.
        environment_factory: in place of ``environment``: a class.
        dataset: in place of ``data.dataset``: a list of dictionaries, a ``datasets.Dataset``, a
            DataFrame, or a name.
        eval_dataset: the same in place of ``data.eval_dataset``.
        settings: sections and keys that win over ``config``: ``optim={"max_steps": 5}, seed=1``.

    Raises:
        ValueError: for a mistake in the settings, the data or the rewards, in words that say what
            would work.
        KeyboardInterrupt: after Ctrl-C, when the newest complete step is saved; ``SystemExit``
            after SIGTERM and SIGHUP. Any other exception is what made a step fail; steps before it
            are saved.
    """
    turns = {
        "tools": tools,
        "environment": environment_factory,
    }
    tables = {"dataset": dataset, "eval_dataset": eval_dataset}
    checked, objects = _read_arguments(config, settings, reward_functions, turns, tables)
    run_steps = _load_page()
    from grpo.distributed import start_world
    from grpo.run.ending import run_to_completion
    from grpo.run.prepare import prepare

    with _process_as_it_was():
        world = start_world(checked.runtime)
        try:
            run = prepare(checked, world, objects)
            code = 0
            if run is not None:
                code = run_to_completion(run, run_steps, ends_process=False)
            del run  # the model's memory
            if code == 128 + signal.SIGINT:
                raise KeyboardInterrupt(
                    "the newest complete step is saved; the same call continues from there",
                )
            if code:
                raise SystemExit(code)
            result = TrainingResult.load(checked.output_dir) if world.is_main else None
            return world.from_main(result)
        finally:
            world.shutdown()


def _load_page() -> Callable[[Any], None]:
    """The function ``train`` of :data:`PAGE`.

    Python imports the first ``train_grpo`` that it finds, and folders of the user come before this
    package. A file of that name there may be the program that calls :func:`train`, or another
    version of the page, so it is refused before it runs.
    """
    found = importlib.util.find_spec("train_grpo")
    if found and Path(found.origin or "").resolve() != PAGE:  # a folder has no origin
        other = found.origin or found.name
        raise ValueError(f"{other} hides {PAGE}, which grpo.train() runs: rename it")
    if not found:
        raise ValueError(
            f"Python finds no train_grpo, which is {PAGE}: pip install -e {PAGE.parent}"
        )
    # Run anew in each call: a person may have edited the page since the last one.
    page = importlib.util.module_from_spec(found)
    found.loader.exec_module(page)
    return page.train


def _read_arguments(
    config: Any,
    settings: dict[str, Any],
    reward_functions: Any,
    turns: dict[str, Any],
    tables: dict[str, Any],
) -> tuple[Config, UserObjects]:
    """The checked configuration, in which names stand for Python objects, and the objects.

    Args:
        turns: tools and an environment, by the key of the configuration.
        tables: rows or the name of a dataset, by the key of the section ``data``.
    """
    from grpo.data import PYTHON_ROWS, rows_of

    names = {}
    rewards = {}
    if reward_functions is not None:
        names["reward.functions"] = _reward_entries(reward_functions, rewards)
    others = {}
    for key, value in turns.items():
        if isinstance(value, list | tuple):
            names[key] = [_name_of(item, others) for item in value]
        elif value is not None:
            names[key] = _name_of(value, others)
    for key, table in tables.items():
        if isinstance(table, str | os.PathLike):
            names[f"data.{key}"] = table
        elif table is not None:
            names[f"data.{key}"] = PYTHON_ROWS
    if names.get("data.eval_dataset") == PYTHON_ROWS:
        names["data.eval_split"] = "auto"
    checked = _read_settings(config, settings, names)

    data = checked.data
    train_rows = None
    eval_rows = None
    if names.get("data.dataset") == PYTHON_ROWS:
        train_rows = rows_of(tables["dataset"], "dataset", data.max_train_samples)
    if names.get("data.eval_dataset") == PYTHON_ROWS:
        eval_rows = rows_of(tables["eval_dataset"], "eval_dataset", data.max_eval_samples)

    # The code of objects is not compared with that of earlier steps, so the run in a folder that a
    # file names, or none, may have had other rewards.
    set_keys = settings if isinstance(config, str | os.PathLike) else checked.model_fields_set
    is_chosen = "output_dir" in set_keys or "resume" in checked.checkpoint.model_fields_set
    if (rewards or others) and not is_chosen:
        checked = make_config(checked, {"checkpoint.resume": "never"})
    return checked, UserObjects(rewards, others, train_rows, eval_rows)


def _read_settings(config: Any, settings: dict[str, Any], names: dict[str, Any]) -> Config:
    """The checked configuration; ConfigError with all mistakes, one per line."""
    known_names = [*train.__kwdefaults__, *keys_of(Config)]
    known = {}
    mistakes = []
    for name, value in settings.items():
        if name.split(".")[0] in Config.model_fields:
            known[name] = value
        else:
            mistake = unknown_key(name, known_names, OTHER_NAMES | TRL_ARGUMENTS)
            mistakes.append(f"train(): {mistake}")
    try:
        checked = make_config(config, known, names)
    except ConfigError as error:
        mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return checked


def _reward_entries(functions: Any, objects: dict[str, Any]) -> list[dict[str, Any]]:
    """The value of ``reward.functions``; adds what its names stand for to ``objects``."""
    if not isinstance(functions, list):
        functions = [functions]
    entries = []
    for item in functions:
        entry = {"name": item}
        if isinstance(item, tuple):
            function, weight = item
            entry = {"name": function, "weight": weight}
        elif isinstance(item, Mapping):
            entry = dict(item)
        try:
            json.dumps(entry.get("args"))
        except TypeError as error:
            reason = f"reward_functions: config.yaml cannot hold its args: {error}"
            raise ConfigError(f"{reason}; functools.partial can") from None
        if "name" in entry:
            entry["name"] = _name_of(entry["name"], objects)
        entries.append(entry)
    return entries


def _name_of(value: Any, objects: dict[str, Any]) -> Any:
    """The name of a function, class or callable object in the configuration.

    An object that no worker can import is added to ``objects`` by that name. A name, and a mapping
    with one, stay as they are.
    """
    if isinstance(value, str | Mapping):
        return value
    if not callable(value):
        raise ValueError(f"{value!r:.80} is no function or class, and no name of one")
    imported = importable_name(value)
    if imported is not None:
        return imported

    function = value
    while isinstance(function, functools.partial):
        function = function.func
    display_name = getattr(function, "__name__", type(function).__name__)
    first_name = OBJECT_PREFIX + display_name.strip("<>")  # <lambda>
    name = first_name
    number = 1
    while objects.get(name, value) is not value:
        number += 1
        name = f"{first_name}_{number}"
    objects[name] = value
    return name


def importable_name(function: Any) -> str | None:
    """The name by which a worker can import a function, as a configuration would write it; None if
    it has none.

    A function of a script or a notebook (``__main__``) has none: to import it, the worker would run
    the script again.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    loaded = sys.modules.get(module)
    if module == "__main__" or getattr(loaded, "__spec__", None) is None:
        return None
    if vars(loaded).get(name) is not function:
        return None
    if BUILTIN.get(name) == module:
        return name
    return f"{module}:{name}"


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restore, at the end, what training sets for the process: threads, determinism, random
    generators."""
    import torch

    if not RUNNING.acquire(blocking=False):  # a second run would share all of these
        raise ValueError("grpo.train is running in this process: start the second in another one")
    threads = torch.get_num_threads()
    determinism = torch.get_deterministic_debug_mode()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        RUNNING.release()
        torch.set_num_threads(threads)
        # Modes 0, 1 and 2: off, warnings, errors.
        torch.use_deterministic_algorithms(determinism > 0, warn_only=determinism == 1)
