"""One reward function in its worker process: the arguments of a call, its values, what it logs.

Imports no torch.
"""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.rewards.functions import (
    ENVIRONMENTS_ARGUMENT,
    FunctionInfo,
    check_arguments,
    load_reward,
    source_files,
)
from grpo.system import UserError
from grpo.workers import convert_result

MAX_REWARD = 3.4028234663852886e38
"""The largest number in fp32, in which the trainer stores rewards."""


class RewardContractError(UserError):
    """A reward returned something else than one float or ``None`` per completion, or logged
    something else than ``log_metric`` and ``log_extra`` take.
    """


@dataclass(frozen=True)
class TrainerState:
    """Position of the run, under the names of ``transformers.TrainerState``.

    Outside training all fields are 0.
    """

    global_step: int = 0
    """Steps that are complete: 0 in the first step."""
    epoch: float = 0.0
    max_steps: int = 0


OUTSIDE_TRAINING = TrainerState()
ENVIRONMENT_KEY = "environment"
"""Key of the environments in their worker processes (:class:`grpo.workers.Request`)."""


class RewardLog:
    """Metrics and columns that a reward reports in one call with ``num_rows`` completions."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.metrics = []
        """``(name, value)``. Each counts once per completion of the call."""
        self.extra = {}
        """Column -> one value per completion."""

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number for this batch. NaN is left out."""
        number = _as_float(value)
        if math.isinf(number):
            raise RewardContractError(
                f"called log_metric({name!r}, {value!r:.100}): expected a finite number"
            )
        if not math.isnan(number):
            self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Sequence) -> None:
        """Report a column for the completions that the run keeps.

        Values other than numbers and ``None`` are kept as their text.
        """
        values = [_as_builtin_type(value) for value in _as_list(values)]
        if len(values) != self.num_rows:
            raise RewardContractError(
                f"called log_extra({column!r}, ...) with {len(values)} values for "
                f"{self.num_rows} completions: expected one per completion"
            )
        self.extra[str(column)] = values


def _as_list(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values  # numpy, torch


def _as_builtin_type(value: Any) -> str | int | float | None:
    """Return a number or None as it is, anything else as text.

    The trainer cannot import the classes of the reward's module.
    """
    if hasattr(value, "item"):  # numpy, torch
        value = value.item()
    return value if value is None or type(value) in (bool, float, int) else str(value)


def _as_float(value: Any) -> float:
    """Return ``value`` as a float; infinity, which callers refuse, if it is no number."""
    # float() alone would read text, such as "1.0", which is a mistake of the reward.
    return float(value) if hasattr(value, "__float__") else math.inf


def call_reward(
    function: Callable,
    args: Mapping[str, Any],
    inputs: Mapping[str, Any],
    log: RewardLog,
    trainer_state: TrainerState = OUTSIDE_TRAINING,
) -> Any:
    """Call a reward by keyword, as TRL does, with ``args`` and the inputs that it takes."""
    # The last three replace columns of these names.
    inputs = {
        **inputs,
        "trainer_state": trainer_state,
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
    }
    arguments = FunctionInfo(function, args).call_arguments(inputs, args)
    return function(**arguments)


def check_values(values: Any, num_rows: int) -> list[float | None]:
    """Return the values of a reward (list, tuple, array, tensor) as one float or ``None`` per row.

    NaN becomes ``None``.

    Raises:
        RewardContractError: if there is another number of values, or one is no finite number.
    """
    values = _as_list(values)
    expected = f"expected a list of {num_rows} values, each a float or None, one per completion"
    # Text and generators can be iterated over, but are surely a mistake of the reward.
    if not isinstance(values, list | tuple):
        kind = type(values).__name__
        raise RewardContractError(f"returned a {kind}: {values!r:.100}; {expected}")
    if len(values) != num_rows:
        numbers = f"{len(values)} values for {num_rows} completions"
        raise RewardContractError(f"returned {numbers}: {values!r:.100}; {expected}")

    rewards = []
    for row, value in enumerate(values):
        number = math.nan if value is None else _as_float(value)
        # The fp32 tensor of rewards would hold infinity, and the advantages of the group NaN.
        if abs(number) > MAX_REWARD:
            wrong = f"{value!r:.100} of type {type(value).__name__}"
            raise RewardContractError(f"returned {wrong} for completion {row}; {expected}")
        rewards.append(None if math.isnan(number) else number)
    return rewards


class LoadedReward:
    """A reward function that a worker process has loaded, and the ``args`` of its configuration.

    Args:
        objects: see :class:`grpo.workers.protocol.Factory`.
        function: the function that the user passed as an object. Default: loaded by ``spec``.
    """

    def __init__(
        self,
        objects: Mapping,
        spec: str,
        args: dict[str, Any],
        function: Callable | None,
    ):
        if function is None:
            function = load_reward(spec)
        check_arguments(spec, function, args)
        self._objects = objects
        self._function = function
        self._args = args
        self._info = FunctionInfo(function, args)
        self._info.source_files = source_files(spec, function)
        # A built-in checks its arguments before any row, so a call without rows checks them. A run
        # does not start with a pattern that is no regular expression, for example.
        if self._info.is_builtin:
            no_rows = {"prompts": [], "completions": [], "completion_ids": []}
            call_reward(function, args, no_rows, RewardLog(0))

    def describe(self) -> FunctionInfo:
        """Return the facts that the trainer needs (:meth:`grpo.workers.Pool.load`)."""
        return self._info

    def score(self, pickled: bytes) -> Any:
        """Return the values of some rows and the :class:`RewardLog` of the call.

        Args:
            pickled: inputs and :class:`TrainerState`. Each call unpickles a copy, so that no
                function can change the inputs of another.
        """
        inputs, trainer_state = pickle.loads(pickled)
        # Counted before the call, which may empty the lists.
        num_rows = len(inputs["completions"])
        log = RewardLog(num_rows)
        # Environments cannot be sent, so the trainer sends the rows of the rollout in their place.
        if ENVIRONMENTS_ARGUMENT in inputs and ENVIRONMENTS_ARGUMENT in self._info.parameter_names:
            environments = [self._environment(row) for row in inputs[ENVIRONMENTS_ARGUMENT]]
            inputs[ENVIRONMENTS_ARGUMENT] = environments
        values = call_reward(self._function, self._args, inputs, log, trainer_state)
        return convert_result(values, lambda values: (check_values(values, num_rows), log))

    def _environment(self, row: int) -> Any:
        try:
            return self._objects[ENVIRONMENT_KEY].slots[row]
        except KeyError:
            # This process has taken the place of one that was killed.
            raise RuntimeError("its environment was in a worker process that was killed") from None
