"""Call a reward function in its worker process: pass arguments, check values, store logged values.

This module imports no torch.
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
"""Largest finite number in fp32. The trainer stores rewards in fp32."""


class RewardContractError(UserError):
    """Error of a reward function that breaks its contract.

    A reward returns one float or ``None`` per completion, and logs only values that ``log_metric``
    and ``log_extra`` accept.
    """


@dataclass(frozen=True)
class TrainerState:
    """Progress of the training run, in fields named as in ``transformers.TrainerState``.

    Outside training all fields are 0.
    """

    global_step: int = 0
    """Number of complete steps, which is 0 during the first step."""
    epoch: float = 0.0
    max_steps: int = 0


OUTSIDE_TRAINING = TrainerState()
ENVIRONMENT_KEY = "environment"
"""Key under which a worker process keeps its environments (:class:`grpo.workers.Request`)."""


class RewardLog:
    """Metrics and columns that a reward reports in one call with ``num_rows`` completions."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.metrics = []
        """List of ``(name, value)``. In means over calls, ``num_rows`` is the weight of a value."""
        self.extra = {}
        """Name of a column -> one value per completion."""

    def log_metric(self, name: str, value: Any) -> None:
        """Report a number about the completions of this call. NaN is ignored."""
        number = _as_float(value)
        if math.isinf(number):
            raise RewardContractError(
                f"called log_metric({name!r}, {value!r:.100}): expected a finite number"
            )
        if not math.isnan(number):
            self.metrics.append((str(name), number))

    def log_extra(self, column: str, values: Sequence) -> None:
        """Report one value per completion, as a column that the run saves with its completions.

        Values other than numbers and ``None`` are saved as text.
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
    """Return a number or None as it is, and anything else as text.

    The trainer could not unpickle an object whose class is defined in the reward's module.
    """
    if hasattr(value, "item"):  # numpy, torch
        value = value.item()
    return value if value is None or type(value) in (bool, float, int) else str(value)


def _as_float(value: Any) -> float:
    """Return ``value`` as a float, or infinity if it is no number. Callers refuse infinity."""
    # float() alone would read text, such as "1.0", which is a mistake of the reward.
    return float(value) if hasattr(value, "__float__") else math.inf


def call_reward(
    function: Callable,
    args: Mapping[str, Any],
    inputs: Mapping[str, Any],
    log: RewardLog,
    trainer_state: TrainerState = OUTSIDE_TRAINING,
) -> Any:
    """Call a reward with ``args`` and the inputs that it takes, as keyword arguments.

    TRL calls rewards in the same way.
    """
    # The last three entries replace columns of the same names.
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
        RewardContractError: if there are not ``num_rows`` values, or if a value is no number, or
            larger than ``MAX_REWARD``.
    """
    values = _as_list(values)
    expected = f"expected a list of {num_rows} values, each a float or None, one per completion"
    # Text and generators can be iterated over, but are surely a mistake of the reward.
    if not isinstance(values, list | tuple):
        raise RewardContractError(
            f"returned a {type(values).__name__}: {values!r:.100}; {expected}"
        )
    if len(values) != num_rows:
        raise RewardContractError(
            f"returned {len(values)} values for {num_rows} completions: {values!r:.40}; {expected}"
        )

    rewards = []
    for row, value in enumerate(values):
        number = math.nan if value is None else _as_float(value)
        # A larger number becomes infinity in fp32, and the advantages of its group become NaN.
        if abs(number) > MAX_REWARD:
            raise RewardContractError(
                f"returned {value!r:.100} of type {type(value).__name__} for completion {row}; "
                f"{expected}"
            )
        rewards.append(None if math.isnan(number) else number)
    return rewards


class LoadedReward:
    """A reward function that a worker process has loaded, and the ``args`` of its configuration.

    Args:
        objects: key -> object, for all objects of the worker process.
        spec: the name of the function in the configuration.
        function: the function that the user passed as an object. Default: the function that
            ``spec`` names.
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
        # A built-in reward checks its settings before it reads any row, so a call without rows
        # checks them. A pattern that is no regular expression, for example, stops the run here.
        if self._info.is_builtin:
            no_rows = {"prompts": [], "completions": [], "completion_ids": []}
            call_reward(function, args, no_rows, RewardLog(0))

    def describe(self) -> FunctionInfo:
        """Return the facts about the function, for :meth:`grpo.workers.pool.Pool.load`."""
        return self._info

    def score(self, pickled: bytes) -> Any:
        """Call the function with some rows. Returns its values and the :class:`RewardLog`.

        The result is an awaitable if the function is async.

        Args:
            pickled: the inputs and the :class:`TrainerState`, pickled. Each call unpickles a copy,
                so that no function can change the inputs of another function.
        """
        inputs, trainer_state = pickle.loads(pickled)
        # The rows are counted before the call, since the function may empty the lists.
        num_rows = len(inputs["completions"])
        log = RewardLog(num_rows)
        # Environments cannot be pickled. The trainer sends the index of each environment's row.
        if ENVIRONMENTS_ARGUMENT in inputs and ENVIRONMENTS_ARGUMENT in self._info.parameter_names:
            environments = [self._environment(row) for row in inputs[ENVIRONMENTS_ARGUMENT]]
            inputs[ENVIRONMENTS_ARGUMENT] = environments
        values = call_reward(self._function, self._args, inputs, log, trainer_state)
        return convert_result(values, lambda values: (check_values(values, num_rows), log))

    def _environment(self, row: int) -> Any:
        try:
            return self._objects[ENVIRONMENT_KEY].slots[row]
        except KeyError:
            # The process that had the environment was killed, and this process is a new one.
            raise RuntimeError(
                "its environment was in a worker process that was killed, as a method took longer "
                "than reward.timeout_s or ended it: a warning names it"
            ) from None
