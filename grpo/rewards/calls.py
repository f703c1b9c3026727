"""One reward function in the process that calls it: its inputs, its values, and what it logs. Imports no torch."""

import math
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.rewards import functions
from grpo.system import UserError
from grpo.workers import then

MAX_REWARD = 3.4028234663852886e38
"""The largest number in fp32, in which the trainer stores rewards."""


class RewardContractError(UserError):
    """A reward did not return one float or ``None`` per completion, or misused ``log_metric`` or ``log_extra``."""


@dataclass(frozen=True)
class TrainerState:
    """The position of the run, under the names of ``transformers.TrainerState``. Outside training all are 0."""

    global_step: int = 0
    """Steps that are complete: 0 in the first step."""
    epoch: float = 0.0
    max_steps: int = 0


OUTSIDE_TRAINING = TrainerState()


@dataclass(frozen=True)
class Place:
    """The place where the environment of a completion lives."""

    key: Hashable
    """The key of its class in the pool of workers."""
    slot: int
    """The row of the rollout that it serves, which also chooses the worker."""


@dataclass
class Logged:
    """The metrics and columns that one call of a reward with ``num_rows`` completions reported."""

    num_rows: int
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name -> ``(sum, count)`` of its values. Each value counts once per completion of the call."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Column -> one value per completion."""

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number for this batch. NaN is left out."""
        number = _number(value)
        if math.isinf(number):
            raise RewardContractError(f"called log_metric({name!r}, {value!r:.100}): expected a finite number")
        if not math.isnan(number):
            total, count = self.metrics.get(name, (0.0, 0.0))
            self.metrics["".join(name)] = (total + number * self.num_rows, count + self.num_rows)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Report a column for the completions that the run keeps. What is no number or ``None`` is kept as its text."""
        values = list(_as_list(values))
        if len(values) != self.num_rows:
            number = f"{len(values)} values for {self.num_rows} completions"
            raise RewardContractError(f"called log_extra({column!r}, ...) with {number}: expected one per completion")
        self.extra["".join(column)] = [_plain(value) for value in values]


def _as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values  # numpy, torch


def _plain(value: Any) -> str | int | float | None:
    """Numbers and text as Python's own types: the trainer cannot import the classes of the reward's module."""
    if hasattr(value, "item"):  # numpy, torch
        value = value.item()
    is_exact = type(value) in (bool, float) or (type(value) is int and abs(value) <= 2**53)  # in a float
    if value is None or is_exact:
        return value
    return "".join(str(value))


def _number(value: Any) -> float:
    """``value`` as a float; infinity for what is no number: text, which ``float`` would read, a list, a mapping."""
    return float(value) if hasattr(value, "__float__") else math.inf


def call_reward(
    function: Callable[..., Any],
    args: Mapping[str, Any],
    inputs: Mapping[str, Any],
    logged: Logged,
    trainer_state: TrainerState = OUTSIDE_TRAINING,
) -> Any:
    """Call a reward by keyword, as TRL does, with the inputs that its signature takes, and with ``args``."""
    available = {
        **inputs,
        "trainer_state": trainer_state,
        "log_metric": logged.log_metric,
        "log_extra": logged.log_extra,
    }
    passed = {name: available[name] for name in functions.passed_names(function, available, args)}
    return function(**passed, **args)


def checked(values: Any, logged: Logged) -> list[float | None]:
    """The return value of a reward (list, tuple, array or tensor) as one float or ``None`` per row. NaN is ``None``."""
    values = _as_list(values)
    expected = f"expected a list of {logged.num_rows} values, each a float or None, one per completion"
    if not isinstance(values, list | tuple):
        raise RewardContractError(f"returned a {type(values).__name__}: {values!r:.100}; {expected}")
    if len(values) != logged.num_rows:
        found = f"{len(values)} values for {logged.num_rows} completions"
        raise RewardContractError(f"returned {found}: {values!r:.100}; {expected}")

    rewards = []
    for row, value in enumerate(values):
        number = math.nan if value is None else _number(value)
        if abs(number) > MAX_REWARD:
            wrong = f"{value!r:.100} of type {type(value).__name__}"
            raise RewardContractError(f"returned {wrong} for completion {row}; {expected}")
        rewards.append(None if math.isnan(number) else number)
    return rewards


class LoadedReward:
    """A reward function with the ``args`` of its configuration (:class:`grpo.workers.host.Source`)."""

    def __init__(
        self,
        objects: Mapping[Hashable, Any],
        spec: str,
        args: dict[str, Any],
        function: Callable[..., Any] | None,
    ):
        self._objects = objects
        self._spec = spec
        self._args = args
        self._function = functions.load_reward(spec) if function is None else function
        functions.check_arguments(spec, self._function, args)
        # A built-in checks its arguments before any row, so a call without rows checks them.
        if functions.is_builtin(self._function):
            no_rows = {"prompts": [], "completions": [], "completion_ids": []}
            call_reward(self._function, args, no_rows, Logged(0))

    def describe(self) -> functions.FunctionInfo:
        return functions.describe(self._spec, self._function, self._args)

    def to(self, device: Any) -> None:
        """Move the model of a classifier."""
        self._function.model.to(device)

    def score(self, pickled: bytes) -> Any:
        """Return the values of some rows, and what the function logged about them.

        ``pickled``: the inputs and the :class:`TrainerState`. Each call gets a copy of its own.
        """
        inputs, trainer_state = pickle.loads(pickled)
        logged = Logged(len(inputs["completions"]))  # counted before the call, which may empty the lists
        if functions.takes_environments(self._function) and "environments" in inputs:
            inputs["environments"] = [self._environment(place) for place in inputs["environments"]]
        values = call_reward(self._function, self._args, inputs, logged, trainer_state)
        return then(values, lambda values: (checked(values, logged), logged))

    def _environment(self, place: Place | None) -> Any:
        return None if place is None else self._objects[place.key].slots[place.slot]
