"""``grpo.train``: ``train_grpo.py`` as a function (docs/library.md). Importing this module imports no torch."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config import Config, ConfigError, keys_of, make_config, unknown_key
from grpo.config.aliases import OTHER_NAMES
from grpo.rewards.functions import BUILTIN, FILE_MODULE_PREFIX, OBJECT_PREFIX
from grpo.run.objects import Objects

SCRIPT = Path(__file__).resolve().parents[2] / "train_grpo.py"
RUNNING = threading.Lock()
"""Held while a run trains in this process."""
OBJECTS = ("reward_functions", "tools", "environment_factory", "rollout_func", "dataset", "eval_dataset")
TRL_ARGUMENTS = {"reward_funcs": "reward_functions", "train_dataset": "dataset"}
FORMS = "a function, a name, (function, weight) or {name, weight, args}"


@dataclass(frozen=True, repr=False)
class TrainingResult:
    """The results of a run, read from its folder."""

    output_dir: Path
    checkpoint: Path | None
    """The newest checkpoint, a Hugging Face folder; None after a debug run, which saves none."""
    steps: int
    """Steps that are complete."""
    before: dict[str, float]
    """The metrics ``eval/...`` before training that were computed; empty without such an evaluation."""
    after: dict[str, float]
    """The same of the newest evaluation of the run."""
    metrics: list[dict[str, Any]]
    """The lines of ``metrics.jsonl``, one dictionary per step, with None for a metric that was not computed;
    ``pandas.DataFrame(result.metrics)`` is a table."""

    @classmethod
    def load(cls, output_dir: str | os.PathLike[str]) -> TrainingResult:
        """Read a run's folder, also that of a run that was stopped."""
        from grpo.checkpoint.format import list_checkpoints

        folder = Path(output_dir)
        metrics = []
        with open(folder / "metrics.jsonl", encoding="utf-8") as file:
            for text in file:
                if text.endswith("\n"):  # the last may be half written
                    metrics.append(json.loads(text))

        before = {}
        after = {}
        for line in metrics:
            found = {}
            for name, value in line.items():
                if name.startswith("eval/") and value is not None:
                    found[name] = value
            if line["step"] == 0:
                before = found
            elif found:
                after = found
        checkpoints = list_checkpoints(folder)
        return cls(
            output_dir=folder,
            checkpoint=next((path for _, path in checkpoints), None),
            steps=max((line["step"] for line in metrics), default=0),
            before=before,
            after=after,
            metrics=metrics,
        )

    def __repr__(self) -> str:
        from grpo.telemetry.console import evaluation_table

        lines = [f"TrainingResult: {self.steps} steps in {self.output_dir}"]
        rewards = [line["reward"] for line in self.metrics if line.get("reward") is not None]
        if rewards:
            lines.append(f"reward of the first and of the last step: {rewards[0]:.3f}, {rewards[-1]:.3f}")
        if self.after:
            lines.append(evaluation_table(self.before, self.after))
        if self.checkpoint:
            lines.append(f"AutoModelForCausalLM.from_pretrained({str(self.checkpoint)!r}) loads the model")
        return "\n".join(lines)


def train(
    config: Mapping[str, Any] | str | os.PathLike[str] | Config | None = None,
    *,
    reward_functions: Any = None,
    tools: Any = None,
    environment_factory: Any = None,
    rollout_func: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    **settings: Any,
) -> TrainingResult:
    """Train with GRPO, and return when the run is complete. The same call continues a run that was stopped.

    Args:
        config: settings as in ``configs/*.yaml``: a YAML file, a mapping (nested, or dotted keys), or a ``Config``.
        reward_functions: in place of ``reward.functions``: a function, a name, ``(function, weight)``,
            ``{name, weight, args}``, or a list of these. A function ``fn(prompts, completions, **columns) ->
            list[float | None]`` runs in a worker process, or in this process if it cannot be sent there.
        tools: in place of ``tools``: a list of functions and names.
        environment_factory: in place of ``environment``: a class, or a mapping from names to classes.
        rollout_func: in place of ``rollout.function``: ``fn(prompts, generate)``.
        dataset: in place of ``data.dataset``: a list of dictionaries, a ``datasets.Dataset``, a DataFrame, or a name.
        eval_dataset: the same in place of ``data.eval_dataset``.
        settings: sections and keys that win over ``config``: ``optim={"max_steps": 5}, seed=1``.

    Raises:
        ValueError: for a mistake in the settings, the data or the rewards, in words that say what would work.
        KeyboardInterrupt: after Ctrl-C, when the newest complete step is saved; ``SystemExit`` after SIGTERM and
            SIGHUP. Any other exception is what made a step fail; steps before it are saved.
    """
    turns = dict(tools=tools, environment_factory=environment_factory, rollout_func=rollout_func)
    checked, objects = _inputs(config, reward_functions, dataset, eval_dataset, turns, settings)
    from grpo.distributed import start_world
    from grpo.run.ending import run_to_completion
    from grpo.run.prepare import prepare

    with _process_as_it_was():
        world = start_world(checked.runtime)
        try:
            run, code = prepare(checked, world, objects), 0
            if run is not None:
                # By path: the program itself may be a file of the name train_grpo.py.
                code = run_to_completion(run, runpy.run_path(str(SCRIPT))["train"], ends_process=False)
            del run  # the model's memory
            if code == 128 + signal.SIGINT:
                raise KeyboardInterrupt("the newest complete step is saved; the same call continues from there")
            if code:
                raise SystemExit(code)
            return world.from_main(TrainingResult.load(checked.output_dir) if world.is_main else None)
        finally:
            world.shutdown()


def _inputs(
    config: Any, reward_functions: Any, dataset: Any, eval_dataset: Any, turns: dict[str, Any], settings: dict[str, Any]
) -> tuple[Config, Objects]:
    """The checked configuration, in which names stand for Python objects, and the objects."""
    from grpo.data import PYTHON_ROWS, rows_of

    if config is not None and not isinstance(config, str | os.PathLike | Mapping | Config):
        raise ConfigError(f"train() takes a file or a mapping, not a {type(config).__name__}: {OTHER_NAMES['args']}")
    _check_names(config, settings)
    names, functions, rows = {}, {}, {}
    if reward_functions is not None:
        names["reward.functions"], functions = _named(reward_functions)
    turn_names, turn_objects = _named_turns(**turns)
    names |= turn_names
    for key, value in (("dataset", dataset), ("eval_dataset", eval_dataset)):
        if isinstance(value, str | os.PathLike):
            names[f"data.{key}"] = os.fspath(value)
        elif value is not None:
            names[f"data.{key}"] = PYTHON_ROWS
    if names.get("data.eval_dataset") == PYTHON_ROWS:
        names["data.eval_split"] = "auto"
    checked = make_config(config, settings, names)
    if names.get("data.dataset") == PYTHON_ROWS:
        rows["dataset"] = rows_of(dataset, "dataset", checked.data.max_train_samples)
    if names.get("data.eval_dataset") == PYTHON_ROWS:
        rows["eval_dataset"] = rows_of(eval_dataset, "eval_dataset", checked.data.max_eval_samples)
    set_keys = settings if isinstance(config, str | os.PathLike) else checked.model_fields_set
    if (
        (functions or turn_objects)
        and "output_dir" not in set_keys
        and "resume" not in checked.checkpoint.model_fields_set
    ):
        # What objects do is not compared, so the run in a folder that a file names, or none, may have had others.
        checked = make_config(checked, {"checkpoint.resume": "never"})
    if "dataset" in rows and checked.data.eval_dataset is None and checked.data.eval_split not in (None, "auto"):
        split = f"data.eval_split={checked.data.eval_split} names a split of data.dataset"
        raise ConfigError(f"{split}, and `dataset` has none: give `eval_dataset`, or data.eval_split=None")
    return checked, Objects(functions, turn_objects, rows.get("dataset"), rows.get("eval_dataset"))


def _check_names(config: Any, settings: dict[str, Any]) -> None:
    """ConfigError if there are unknown settings, with the mistakes in all others.

    The values of unknown settings are not read: an argument of TRL may be an object that no configuration holds.
    """
    known = [*OBJECTS, *keys_of(Config)]
    others = OTHER_NAMES | TRL_ARGUMENTS
    mistakes = []
    rest = {}
    for name, value in settings.items():
        if name.split(".")[0] in Config.model_fields:
            rest[name] = value
        else:
            mistakes.append(f"train(): {unknown_key(name, known, others)}")
    if mistakes:
        try:
            make_config(config, rest)
        except ConfigError as error:
            mistakes.append(str(error))
        raise ConfigError("\n".join(mistakes))


def _named(functions: Any) -> tuple[list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    """The value of ``reward.functions``, and the functions whose name there begins with ``python:``."""
    is_pair = isinstance(functions, tuple) and len(functions) == 2 and isinstance(functions[1], int | float)
    if is_pair or not isinstance(functions, list | tuple):
        functions = [functions]
    entries, objects = [], {}
    for index, item in enumerate(functions):
        entry = {"name": item}
        if isinstance(item, tuple) and len(item) == 2:
            entry = {"name": item[0], "weight": item[1]}
        elif isinstance(item, Mapping):
            entry = dict(item)
        elif hasattr(item, "name") and hasattr(item, "weight"):
            entry = {"name": item.name, "weight": item.weight, "args": getattr(item, "args", {})}
        if "name" not in entry:
            raise ValueError(f"reward_functions has a mapping with the keys {', '.join(map(str, entry))}: give {FORMS}")
        try:
            json.dumps(entry.get("args"))
        except (TypeError, ValueError) as error:
            reason = f"reward_functions[{index}]: config.yaml cannot hold its args ({error})"
            raise ValueError(f"{reason}: give text, numbers, lists and mappings, or functools.partial") from None
        function = entry["name"]
        if not isinstance(function, str):
            _check_function(function, f"reward_functions[{index}]")
            entry["name"] = importable_name(function)
            if entry["name"] is None:
                name, number = OBJECT_PREFIX + _display_name(function), 1
                entry["name"] = name
                while entry["name"] in objects:
                    number += 1
                    entry["name"] = f"{name}_{number}"
                objects[entry["name"]] = function
        entries.append(entry)
    return entries, objects


def _named_turns(tools: Any, environment_factory: Any, rollout_func: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of ``tools``, ``environment`` and ``rollout.function``, and the objects that names there stand for."""
    names, objects = {}, {}

    def name_of(value: Any) -> Any:
        if isinstance(value, str | Mapping):
            return value
        if not callable(value):
            raise ValueError(f"{value!r:.80} is no function or class, which tools and environments must be")
        if (name := importable_name(value)) is None:
            name, number = OBJECT_PREFIX + _display_name(value), 1
            while objects.get(name, value) is not value:  # another object of that name
                number += 1
                name = f"{OBJECT_PREFIX}{_display_name(value)}_{number}"
            objects[name] = value
        return name

    if tools is not None:
        names["tools"] = [name_of(tool) for tool in (tools if isinstance(tools, list | tuple) else [tools])]
    if isinstance(environment_factory, Mapping):
        names["environment"] = {key: name_of(value) for key, value in environment_factory.items()}
    elif environment_factory is not None:
        names["environment"] = name_of(environment_factory)
    if rollout_func is not None:
        names["rollout.function"] = name_of(rollout_func)
    return names, objects


def _display_name(function: Any) -> str:
    """The own name of a function given as an object, that of its class, or ``lambda``."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def importable_name(function: Any) -> str | None:
    """The name by which a worker can import a function, as a configuration would write it; None if it has none.

    A function of a script or a notebook (``__main__``) has none: to import it, the worker would run the script again.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    loaded = sys.modules.get(module) if isinstance(module, str) and isinstance(name, str) else None
    if module == "__main__" or getattr(loaded, "__spec__", None) is None or vars(loaded).get(name) is not function:
        return None
    if BUILTIN.get(name) == module:
        return name
    return f"{loaded.__file__ if module.startswith(FILE_MODULE_PREFIX) else module}:{name}"


def _check_function(function: Any, name: str) -> None:
    if hasattr(function, "save_pretrained"):
        raise ValueError(f"{name} is a model: save it to a folder, and name the reward 'classifier:<folder>'")
    if isinstance(function, type):
        raise ValueError(f"{name} is the class {function.__name__}: give an instance of it")
    if not callable(function):
        raise ValueError(f"{name} is {function!r} of type {type(function).__name__}: give {FORMS}")


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restore, at the end, what training sets for the process: threads, kernels, generators, GPU, a signal handler."""
    import torch

    if not RUNNING.acquire(blocking=False):  # a second run would share all of these
        raise ValueError("grpo.train is running in this process: start the second run in another one")
    threads, workspace = torch.get_num_threads(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    in_main_thread = threading.current_thread() is threading.main_thread()
    save_handler = signal.getsignal(signal.SIGUSR1)
    try:
        with torch.random.fork_rng(devices=gpus), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        RUNNING.release()
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        for gpu in gpus:
            torch.cuda.set_device(gpu)
        if in_main_thread and save_handler is not None:
            signal.signal(signal.SIGUSR1, save_handler)
