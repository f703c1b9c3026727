"""Reward functions that run in this process: classifiers, on the policy's device, and objects that cannot be sent to a worker."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import threading
import traceback
from collections.abc import Callable
from typing import Any

from grpo.rewards.logged import Logged
from grpo.rewards.registry import check_arguments, load_reward
from grpo.rewards.result import FunctionResult, RewardSpec
from grpo.rewards.worker import FunctionInfo, RewardInputs, awaited, call_reward, check_values, describe


class FunctionsHere:
    """Functions by their index in ``reward.functions``. Only async ones are ended after ``timeout_s``."""

    def __init__(self, timeout_s: float, device: Any):
        self.timeout_s, self.device = timeout_s, device
        self.functions: dict[int, Callable[..., Any]] = {}
        self._args: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, str] = {}
        """"batch": the whole batch in one call; "row": one call per row; "either": the batch, then per row if that fails."""

    def load_classifier(self, key: int, spec: RewardSpec) -> FunctionInfo:
        reward = load_reward(spec.name)
        check_arguments(spec.name, reward, spec.args)
        try:
            reward([], [], **spec.args)  # a call without rows checks the arguments
        except ValueError as error:
            raise ValueError(f"reward {spec.name!r}: {error}") from None
        self.functions[key], self._args[key], self._calls[key] = reward.to(self.device), spec.args, "batch"
        return FunctionInfo(is_async=False, row_by_row=False, needed_columns=frozenset())

    def load_object(self, key: int, spec: RewardSpec) -> FunctionInfo:
        check_arguments(spec.name, spec.function, spec.args)
        info = describe(spec.name, spec.function, spec.args)
        self.functions[key], self._args[key] = spec.function, spec.args
        self._calls[key] = "row" if info.row_by_row else "either"
        return info

    def score(self, key: int, inputs: RewardInputs, result: FunctionResult) -> None:
        """Call one function and store its outcome."""
        outcome = ("error", None) if self._calls[key] == "row" else self._call(key, inputs)
        if self._calls[key] == "batch" or outcome[0] in ("ok", "contract"):
            result.record(outcome, range(len(inputs)))
            return
        for row in range(len(inputs)):
            result.record(self._call(key, inputs.row(row)), [row])

    def _call(self, key: int, inputs: RewardInputs) -> tuple[Any, ...]:
        """An outcome, as ``grpo.rewards.worker`` lists them."""
        if self._calls[key] != "batch":
            inputs = _copied(inputs)
        logged = Logged(len(inputs))
        try:
            values = call_reward(self.functions[key], self._args[key], inputs, logged)
            if inspect.isawaitable(values):
                # In another thread, because the cell of a notebook runs inside an event loop already.
                future = asyncio.run_coroutine_threadsafe(awaited(values), _event_loop())
                try:
                    values = future.result(self.timeout_s)
                except TimeoutError:
                    if future.done():  # the function itself has raised it
                        raise
                    future.cancel()
                    return "timeout", None
        except (Exception, SystemExit):
            return "error", traceback.format_exc()
        return logged.added_to(check_values(values, logged.num_rows))


def _copied(inputs: RewardInputs) -> RewardInputs:
    """A copy of the lists, as a worker process has: a function that sorts or empties them must not change those of the trainer."""
    prompts, completions = copy.deepcopy((inputs.prompts, inputs.completions))
    columns = {name: list(values) for name, values in inputs.columns.items()}
    ids = None if inputs.completion_ids is None else [list(ids) for ids in inputs.completion_ids]
    return RewardInputs(prompts, completions, columns, ids, inputs.trainer_state)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One event loop for all calls, because an HTTP client is bound to its loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async rewards").start()
    return loop
