"""One reward function in the process that calls it: its inputs, its values, and what it logs.
Imports no torch.
"""

import math
import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.rewards.functions import (
    ENVIRONMENTS,
    FunctionInfo,
    check_arguments,
    load_reward,
    source_files,
)
from grpo.system import UserError
from grpo.workers import then

MAX_REWARD = 3.4028234663852886e38
"""The largest number in fp32, in which the trainer stores rewards."""


class RewardContractError(UserError):
    """A reward did not return one float or ``None`` per completion, or misused ``log_metric`` or
    ``log_extra``.
    """


@dataclass(frozen=True)
class TrainerState:
    """The position of the run, under the names of ``transformers.TrainerState``. Outside training
    all are 0.
    """

    global_step: int = 0
    """Steps that are complete: 0 in the first step."""
    epoch: float = 0.0
    max_steps: int = 0


OUTSIDE_TRAINING = TrainerState()
ENVIRONMENT = "environment"
"""The key of the environments in their workers."""


class Logged:
    """The metrics and columns that one call of a reward with ``num_rows`` completions reported."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.metrics = []
        """``(name, value)``. Each counts once per completion of the call."""
        self.extra = {}
        """Column -> one value per completion."""

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number for this batch. NaN is left out."""
        number = _number(value)
        if math.isinf(number):
            called = f"log_metric({name!r}, {value!r:.100})"
            raise RewardContractError(f"called {called}: expected a finite number")
        if not math.isnan(number):
            self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Report a column for the completions that the run keeps.

        Values other than numbers and ``None`` are kept as their text.
        """
        values = [_plain(value) for value in _as_list(values)]
        if len(values) != self.num_rows:
            raise RewardContractError(
                f"called log_extra({column!r}, ...) with {len(values)} values for "
                f"{self.num_rows} completions: expected one per completion"
            )
        self.extra[str(column)] = values


def _as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values  # numpy, torch


def _plain(value: Any) -> str | int | float | None:
    """Numbers and text as Python's own types: the trainer cannot import the classes of the
    reward's module.
    """
    if hasattr(value, "item"):  # numpy, torch
        value = value.item()
    return value if value is None or type(value) in (bool, float, int) else str(value)


def _number(value: Any) -> float:
    """``value`` as a float; infinity for what is no number: text, which ``float`` would read, a
    list, a mapping.
    """
    return float(value) if hasattr(value, "__float__") else math.inf


def call_reward(
    function: Callable[..., Any],
    args: Mapping[str, Any],
    inputs: Mapping[str, Any],
    logged: Logged,
    trainer_state: TrainerState = OUTSIDE_TRAINING,
) -> Any:
    """Call a reward by keyword, as TRL does, with the inputs that its signature takes, and with
    ``args``.
    """
    available = {
        **inputs,
        "trainer_state": trainer_state,
        "log_metric": logged.log_metric,
        "log_extra": logged.log_extra,
    }
    passed = FunctionInfo(function, args).passed(available, args)
    return function(**passed)


def checked(values: Any, logged: Logged) -> list[float | None]:
    """Return the values of a reward (list, tuple, array, tensor) as one float or ``None`` per row.

    NaN becomes ``None``.
    """
    values = _as_list(values)
    right = f"a list of {logged.num_rows} values, each a float or None, one per completion"
    # Strings and generators have no place here, although one could iterate over them.
    if not isinstance(values, list | tuple):
        kind = type(values).__name__
        raise RewardContractError(f"returned a {kind}: {values!r:.100}; expected {right}")
    if len(values) != logged.num_rows:
        numbers = f"{len(values)} values for {logged.num_rows} completions"
        raise RewardContractError(f"returned {numbers}: {values!r:.100}; expected {right}")

    rewards = []
    for row, value in enumerate(values):
        number = math.nan if value is None else _number(value)
        # Beyond that, and for infinity, the fp32 tensor of rewards would hold infinity.
        if abs(number) > MAX_REWARD:
            wrong = f"{value!r:.100} of type {type(value).__name__}"
            raise RewardContractError(f"returned {wrong} for completion {row}; expected {right}")
        rewards.append(None if math.isnan(number) else number)
    return rewards


class LoadedReward:
    """A reward function with the ``args`` of its configuration
    (:class:`grpo.workers.protocol.Factory`).
    """

    def __init__(
        self,
        objects: Mapping[Hashable, Any],
        spec: str,
        args: dict[str, Any],
        function: Callable[..., Any] | None,
    ):
        if function is None:
            function = load_reward(spec)
        check_arguments(spec, function, args)
        self._objects = objects
        self._function = function
        self._args = args
        self._info = FunctionInfo(function, args)
        self._info.source_files = source_files(spec, function)
        # A built-in checks its arguments before any row, so a call without rows checks them: the
        # run shall not start with a pattern that no regular expression can have.
        if self._info.is_builtin:
            no_rows = {"prompts": [], "completions": [], "completion_ids": []}
            call_reward(function, args, no_rows, Logged(0))

    def describe(self) -> FunctionInfo:
        return self._info

    def score(self, pickled: bytes) -> Any:
        """Return the values of some rows, and what the function logged about them.

        ``pickled``: the inputs and the :class:`TrainerState`. Each call gets a copy of its own.
        """
        inputs, trainer_state = pickle.loads(pickled)
        # Counted before the call, which may empty the lists.
        logged = Logged(len(inputs["completions"]))
        if ENVIRONMENTS in inputs and ENVIRONMENTS in self._info.named:
            inputs[ENVIRONMENTS] = [self._environment(slot) for slot in inputs[ENVIRONMENTS]]
        values = call_reward(self._function, self._args, inputs, logged, trainer_state)
        return then(values, lambda values: (checked(values, logged), logged))

    def _environment(self, slot: int) -> Any:
        try:
            return self._objects[ENVIRONMENT].slots[slot]
        except KeyError:
            # This process has taken the place of one that was killed.
            raise RuntimeError("its environment was in a worker process that was killed") from None
