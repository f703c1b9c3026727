"""The function ``grpo.train``, which runs ``train_grpo.py`` from Python (``docs/library.md``).

Importing this module does not import torch, which takes seconds: ``import grpo`` is for scripts and
notebooks that may do something else first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config import Config, ConfigError, make_config
from grpo.rewards.functions import BUILTIN_REWARDS, OBJECT_PREFIX
from grpo.run.user_objects import UserObjects

PAGE = Path(__file__).resolve().parents[1] / "train_grpo.py"
"""Path of the training loop, beside this package. Users run this file as a command, and
:func:`train` runs it as a module."""
RUN_LOCK = threading.Lock()
"""Lock that is held while a run trains in this process."""


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """The results of a run, read from its folder."""

    output_dir: Path
    checkpoint: Path | None
    """The newest checkpoint, a Hugging Face folder. None if there is no checkpoint, as after a
    debug run."""
    steps: int
    """Number of complete steps."""
    before: dict[str, float]
    """Metrics ``eval/...`` of the evaluation before training; empty without such an evaluation."""
    after: dict[str, float]
    """Metrics ``eval/...`` of the newest evaluation after a step; empty if no step was
    evaluated."""
    metrics: list[dict[str, Any]]
    """Lines of ``metrics.jsonl``, one dictionary per step, with None for a metric that was not
    computed. ``pandas.DataFrame(result.metrics)`` turns them into a table."""

    @classmethod
    def load(cls, output_dir: str | os.PathLike[str]) -> TrainingResult:
        """Read the results of a run, complete or stopped, from its folder.

        Raises:
            ValueError: if ``metrics.jsonl`` in the folder has no step.
        """
        from grpo.checkpoint.format import list_checkpoints
        from grpo.telemetry.records import read_lines

        folder = Path(output_dir)
        metrics = read_lines(folder / "metrics.jsonl")
        if not metrics:
            raise ValueError(f"{folder} is not a run: metrics.jsonl has no step")

        before = {}
        after = {}
        for line in metrics:
            # None means not computed, like the lenient accuracy of problems without answers.
            evaluation = {
                name: value
                for name, value in line.items()
                if name.startswith("eval/") and value is not None
            }
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
        lines = [f"TrainingResult: {self.steps} steps in {self.output_dir}"]
        rewards = [line["reward"] for line in self.metrics if line.get("reward") is not None]
        if rewards:
            lines.append(
                f"reward of the first and of the last step: {rewards[0]:.3f}, {rewards[-1]:.3f}",
            )
        if self.checkpoint:
            lines.append(
                f"AutoModelForCausalLM.from_pretrained({str(self.checkpoint)!r}) loads the model",
            )
        return "\n".join(lines)


def train(
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
    *more: Any,
    reward_functions: Any = None,
    tools: Any = None,
    environment_factory: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    **settings: Any,
) -> TrainingResult:
    """Train with GRPO, and return when the run is complete.

    The same call continues a run that was stopped. Under torchrun all ranks make the same call, and
    get the same result.

    Args:
        config: settings as in ``configs/*.yaml``, given as a YAML file, a mapping (nested, or with
            dotted keys) or a ``Config``. Default: the default of every key.
        reward_functions: replaces ``reward.functions``. It is a function, a name, ``(function,
            weight)``, ``{name, weight, args}``, or a list of these four. A function ``fn(prompts,
            completions, **columns) -> list[float | None]`` runs in a worker process. If it cannot
            be sent to a worker, it runs in this process.
        tools: replaces ``tools``: a list of functions and names.
        environment_factory: replaces ``environment``: a class, or the name of a class.
        dataset: replaces ``data.dataset``: a list of dictionaries, a ``datasets.Dataset``, a
            DataFrame, or a name.
        eval_dataset: replaces ``data.eval_dataset``, with the same types.
        settings: sections and keys that win over ``config``, such as ``optim={"max_steps": 5},
            seed=1``.
        more: must be empty: all other arguments are given by name.

    Returns:
        The results, read from the run's folder.

    Raises:
        ValueError: if the settings, the data or the rewards have a mistake. The message says what
            would work.
        KeyboardInterrupt: after Ctrl-C, once the newest complete step is saved.
        SystemExit: after SIGTERM or SIGHUP, once the newest complete step is saved.
        Exception: the error of a step that failed. The newest complete step is saved first, unless
            the error came during an update.
    """
    if more:
        raise ConfigError(
            "train() takes the configuration alone by position. By name: the model is "
            "model={'name_or_path': ...}, rewards are reward_functions, rows are dataset"
        )
    turns = {
        "tools": tools,
        "environment": environment_factory,
    }
    tables = {"dataset": dataset, "eval_dataset": eval_dataset}
    checked, user_objects = _read_arguments(config, settings, reward_functions, turns, tables)
    # These imports come after the settings are checked, because loading them takes seconds.
    run_steps = _load_page()
    from grpo.distributed import start_world
    from grpo.run.ending import run_to_completion
    from grpo.run.prepare import prepare

    with _process_restored():
        world = start_world(checked.runtime)
        try:
            run = prepare(checked, world, user_objects)
            code = 0
            if run is not None:
                code = run_to_completion(run, run_steps, ends_process=False)
            del run  # frees the model's memory before the caller goes on
            if code == 128 + signal.SIGINT:
                raise KeyboardInterrupt(
                    "the newest complete step is saved; the same call continues from there",
                )
            if code:
                raise SystemExit(code)
            # One rank reads, so that all ranks return the same result.
            result = TrainingResult.load(checked.output_dir) if world.is_main else None
            return world.broadcast_from_main(result)
        finally:
            world.shutdown()


def _load_page() -> Callable[[Any], None]:
    """Return the function ``train`` of :data:`PAGE`.

    Python imports the first ``train_grpo`` on its path, and folders of the user come before this
    package there. A user's file of that name may be the program that calls :func:`train`, or
    another version of the training loop. So this file is refused before it runs.
    """
    spec = importlib.util.find_spec("train_grpo")
    # A folder that Python takes for a package has no origin.
    location = getattr(spec, "origin", None) or "no file train_grpo.py"
    if Path(location).resolve() != PAGE:
        raise ValueError(
            f"Python finds {location} in place of {PAGE}, which grpo.train() runs: rename it, or "
            f"pip install -e {PAGE.parent}"
        )
    # The file is run anew in each call, since a person may have edited it meanwhile.
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page.train


def _read_arguments(
    config: Any,
    settings: dict[str, Any],
    reward_functions: Any,
    turns: dict[str, Any],
    tables: dict[str, Any],
) -> tuple[Config, UserObjects]:
    """Return the checked configuration, in which names stand for Python objects, and the objects.

    Args:
        turns: the arguments ``tools`` and ``environment_factory`` of :func:`train`, by their keys
            in the configuration.
        tables: the arguments ``dataset`` and ``eval_dataset``, by their keys in the section
            ``data``.
    """
    from grpo.data import PYTHON_ROWS, rows_from_table

    # The value of each key that an argument replaces.
    values = {}
    rewards = {}
    if reward_functions is not None:
        values["reward.functions"] = _reward_entries(reward_functions, rewards)
    turn_objects = {}
    for key, value in turns.items():
        if isinstance(value, list | tuple):
            values[key] = [_name_of(item, turn_objects) for item in value]
        elif value is not None:
            values[key] = _name_of(value, turn_objects)
    for key, table in tables.items():
        if isinstance(table, str | os.PathLike):
            values[f"data.{key}"] = table
        elif table is not None:
            values[f"data.{key}"] = PYTHON_ROWS
    # The model is evaluated on rows that the caller passes, even if the configuration sets no
    # split.
    if values.get("data.eval_dataset") == PYTHON_ROWS:
        values["data.eval_split"] = "auto"
    checked = make_config(config, settings, values)

    # Rows are read only now, because the configuration limits their number.
    data = checked.data
    train_rows = None
    eval_rows = None
    if values.get("data.dataset") == PYTHON_ROWS:
        train_rows = rows_from_table(tables["dataset"], "dataset", data.max_train_samples)
    if values.get("data.eval_dataset") == PYTHON_ROWS:
        eval_rows = rows_from_table(tables["eval_dataset"], "eval_dataset", data.max_eval_samples)

    # Of rewards and tools that are objects, only the source is compared when a run continues, and
    # not what it refers to. An earlier run in the default folder may have had other rewards, so it
    # is continued only if the caller has named the folder.
    set_keys = settings if isinstance(config, str | os.PathLike) else checked.model_fields_set
    names_run = "output_dir" in set_keys or "resume" in checked.checkpoint.model_fields_set
    if (rewards or turn_objects) and not names_run:
        checked = make_config(checked, {"checkpoint.resume": "never"})
    return checked, UserObjects(rewards, turn_objects, train_rows, eval_rows)


def _reward_entries(functions: Any, objects: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the value of ``reward.functions``. Functions that no worker can import by name are
    added to ``objects``."""
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
        if "name" in entry:
            entry["name"] = _name_of(entry["name"], objects)
        entries.append(entry)
    return entries


def _name_of(value: Any, objects: dict[str, Any]) -> Any:
    """Return the name of a function, class or callable object in the configuration.

    An object that no worker can import is added to ``objects`` under this name. A string or a
    mapping is returned as it is.
    """
    if isinstance(value, str | Mapping):
        return value
    if not callable(value):
        raise ValueError(f"{value!r:.80} is no function or class, and no name of one")
    imported = importable_name(value)
    if imported is not None:
        return imported

    # A partial has no name, so metrics get the name of its function.
    function = value
    while isinstance(function, functools.partial):
        function = function.func
    display_name = getattr(function, "__name__", type(function).__name__)
    first_name = OBJECT_PREFIX + display_name.strip("<>")  # <lambda>
    name = first_name
    number = 1
    # Two lambdas get two names. An object that is passed twice keeps its name.
    while objects.get(name, value) is not value:
        number += 1
        name = f"{first_name}_{number}"
    objects[name] = value
    return name


def importable_name(function: Any) -> str | None:
    """Return the name by which a worker can import a function, as in a configuration; None if there
    is no such name.

    A function of a script or a notebook (``__main__``) has no such name: to import it, the worker
    would have to run the script again.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    loaded = sys.modules.get(module)
    if module == "__main__" or getattr(loaded, "__spec__", None) is None:
        return None
    # A closure, a lambda or a decorated function is not what its module has under that name.
    if vars(loaded).get(name) is not function:
        return None
    if BUILTIN_REWARDS.get(name) == module:
        return name
    return f"{module}:{name}"


@contextlib.contextmanager
def _process_restored() -> Iterator[None]:
    """Restore the process's number of threads, determinism and random generators after a block.

    Raises:
        ValueError: if another run trains in this process.
    """
    import torch

    # A second run would change this state, and get other results than a run alone.
    if not RUN_LOCK.acquire(blocking=False):
        raise ValueError("grpo.train is running in this process: start the second in another one")
    threads = torch.get_num_threads()
    determinism = torch.get_deterministic_debug_mode()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        # The caller may be inside of torch.no_grad().
        with torch.random.fork_rng(devices=gpus), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        RUN_LOCK.release()
        torch.set_num_threads(threads)
        # Modes 0, 1 and 2: off, warnings, errors.
        torch.use_deterministic_algorithms(determinism > 0, warn_only=determinism == 1)
