"""Score completions with several reward functions. No function can hang or kill the training process.

``B`` rows (completions), ``F`` functions. Each function is called once with the whole batch. If that call raises, hangs or kills its
worker, the function is called once per row, so that one bad row costs one reward. The time per function and step is bounded:
``timeout_s`` for the batch, then ``timeout_s`` per row. After ``result.MAX_LOST_WORKERS`` rows that hung or killed a worker, the
remaining rows are skipped (``None``, counted as timeouts). This module does not communicate between ranks: the
training loop makes all ranks agree on a failure.
"""

import logging
import os
import queue
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from grpo.rewards.arguments import check_columns
from grpo.rewards.here import FunctionsHere
from grpo.rewards.logged import OUTSIDE_TRAINING, TrainerState
from grpo.rewards.objects import digest, pickled
from grpo.rewards.process import LOAD_SECONDS, WorkerProcess
from grpo.rewards.registry import CLASSIFIER_PREFIX, display_name
from grpo.rewards.result import FunctionResult, RewardContractError, RewardResult, RewardSpec, join_columns, sum_metrics
from grpo.rewards.sandbox import Limits
from grpo.rewards.worker import FunctionInfo, RewardInputs
from grpo.system import printable
from grpo.system.masking import with_environment

GATHER_GRACE_SECONDS = 1.0
"""The worker cancels coroutines after ``timeout_s``. A worker that has not answered this many seconds later is blocked and is killed."""

logger = logging.getLogger(__name__)


class RewardRunner:
    """Runs the configured rewards. Each rank starts one runner and ends it with :meth:`close` or by leaving its context.

    Args:
        functions: ``RewardSpec``s, or objects with ``name``, ``weight`` and ``args``. :meth:`check` loads and checks them. A ``function``
            that cannot be sent to a worker runs in this process; :attr:`notes` says so.
        timeout_s: time limit of one call, in seconds.
        num_workers: worker processes, 1 by default. More workers help if several functions, or the rows of one, are slow.
        device: where ``classifier:`` rewards run, in this process.
    """

    def __init__(
        self, functions: Sequence[Any], *, timeout_s: float = 10.0, num_workers: int | None = None, device: Any = "cpu"
    ):
        if not functions:
            raise ValueError("reward.functions is empty: name at least one reward, such as {name: accuracy}")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s must be positive, got {timeout_s}")
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"reward.num_workers must be at least 1, got {num_workers}")
        specs = [str(f.name).strip() for f in functions]
        args = [with_environment(dict(f.args or {}), f"reward {s!r}") for s, f in zip(specs, functions, strict=True)]
        parts = zip(specs, functions, args, strict=True)
        self.specs = [RewardSpec(s, float(f.weight), a, getattr(f, "function", None)) for s, f, a in parts]
        self.names = _unique_names([spec.name for spec in self.specs])
        self.weights = [spec.weight for spec in self.specs]
        self.timeout_s = float(timeout_s)
        self._num_workers, self._directory = num_workers or 1, os.getcwd()
        self._infos: list[FunctionInfo] | None = None
        self.notes: list[str] = []
        """Messages of :meth:`check` for the user, one line each."""
        self._here = FunctionsHere(self.timeout_s, device)
        self._row_by_row: set[int] = set()
        self._logged: set[str] = set()
        self._workers: list[WorkerProcess] = []
        self._idle: queue.SimpleQueue[WorkerProcess] = queue.SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A later call of :meth:`score` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        for worker in self._workers:  # a thread may have restarted a worker in the meantime
            worker.kill()
        self._pool, self._workers, self._idle = None, [], queue.SimpleQueue()

    def check(self, columns: Collection[str] | None = None) -> None:
        """Load every function, so that a mistake shows early, and check that the rows have the columns that it needs.

        Raises:
            ValueError: in one line, for an unknown name, a file that cannot be imported, wrong arguments or a missing column.
        """
        if self._infos is None:
            self._infos = [self._load(key) for key in range(len(self.specs))]
        if columns is not None:
            for name, info in zip(self.names, self._infos, strict=True):
                check_columns(name, info.needed_columns, columns)

    @property
    def source_files(self) -> dict[str, str]:
        """Name -> path of the files of the user's functions, once :meth:`check` has loaded them."""
        return dict(file for info in self._infos or () for file in info.source_files)

    @property
    def classifier_models(self) -> list[str]:
        """The folders or Hub ids of ``classifier:`` rewards."""
        return [s.name.removeprefix(CLASSIFIER_PREFIX) for s in self.specs if s.name.startswith(CLASSIFIER_PREFIX)]

    @property
    def digests(self) -> dict[str, str]:
        """Name -> digest of the functions that were given as objects."""
        return {spec.name: digest(spec.function) for spec in self.specs if spec.function is not None}

    def _load(self, key: int) -> FunctionInfo:
        name = self.specs[key].name
        if name.startswith(CLASSIFIER_PREFIX):
            return self._here.load_classifier(key, self.specs[key])
        kind, value = self._submit(lambda worker: worker.load(key)).result()
        if kind == "not sent":
            lost = "runs in this process, where a call that hangs cannot be stopped"
            self.notes.append(f"note: reward {name!r} {lost}, because it cannot be sent to a worker process ({value})")
            return self._here.load_object(key, self.specs[key])
        if kind == "invalid":
            raise ValueError(value)
        if kind != "ok":
            late = f"loading it took more than {LOAD_SECONDS:g} s"
            reason = late if kind == "timeout" else f"its worker process {value}"
            raise ValueError(f"reward {name!r} cannot be loaded: {reason}")
        seconds = self.specs[key].args.get("total_seconds", Limits.total_seconds)
        if name == "python_tests" and seconds >= self.timeout_s:
            limit = f"reward.timeout_s = {self.timeout_s:g}"  # otherwise code that hangs scores None, not 0
            raise ValueError(f"reward 'python_tests': total_seconds = {seconds:g} must be less than {limit}")
        if value.row_by_row:
            self._row_by_row.add(key)
        return value

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
        trainer_state: TrainerState = OUTSIDE_TRAINING,
    ) -> RewardResult:
        """Score ``B`` completions. Every argument has ``B`` entries: strings or lists of messages, values per column, token lists.

        Raises:
            ValueError: if lengths differ or a column that a function needs is missing.
            RewardContractError: if a function returns something that is not a reward.
        """
        num_rows = len(completions)
        for name, values in {"prompts": prompts, "completion_ids": completion_ids, **columns}.items():
            if values is not None and len(values) != num_rows:
                raise ValueError(f"expected one value per completion ({num_rows}), got {len(values)} for {name}")
        self.check(columns)
        results = [FunctionResult(name, num_rows) for name in self.names]
        if num_rows:
            for worker in self._workers:
                worker.begin_step()
            try:
                inputs = RewardInputs(prompts, completions, dict(columns), completion_ids, trainer_state)
                self._score(inputs, results)
            except BaseException:  # after a Ctrl-C, threads would wait for workers whose result nobody reads
                self.close()
                raise
        for result in results:
            if result.contract_error is not None:
                raise RewardContractError(f"reward {result.name!r} {result.contract_error}")
            result.add_hint(completions)
            if result.first_traceback and result.name not in self._logged:
                self._logged.add(result.name)
                logger.warning(
                    "reward %r failed on %d of %d completions (logged once per run); the first failure:\n%s",
                    *(result.name, result.failures, num_rows, printable(result.first_traceback)),
                )
        return RewardResult(
            values=[list(row) for row in zip(*(result.values for result in results), strict=True)],
            errors=[result.errors for result in results],
            timeouts=[result.timeouts for result in results],
            first_traceback={result.name: result.first_traceback for result in results if result.first_traceback},
            failed_everywhere=[result.name for result in results if result.failures == num_rows > 0],
            metrics=sum_metrics(results),
            extra=join_columns(results),
        )

    def _score(self, inputs: RewardInputs, results: list[FunctionResult]) -> None:
        """Call every function with the whole batch, all at the same time; then call those that failed once per row."""
        assert self._infos is not None
        num_rows = len(inputs)
        elsewhere = self._here.functions.keys() | self._row_by_row
        in_workers = {key: info for key, info in enumerate(self._infos) if key not in elsewhere}
        async_keys = [key for key, info in in_workers.items() if info.is_async]
        batch_calls = {key: self._submit_call(key, inputs) for key, info in in_workers.items() if not info.is_async}
        async_call = self._submit_gather([(key, inputs) for key in async_keys]) if async_keys else None
        for key in self._here.functions:  # in this process, while the workers run the other functions
            self._here.score(key, inputs, results[key])
        outcomes = {key: future.result() for key, future in batch_calls.items()}
        unknown_culprits: set[int] = set()
        if async_call is not None:
            kind, value = async_call.result()
            if kind != "ok":  # one of the coroutines blocked or killed the worker; the answer does not say which
                unknown_culprits.update(async_keys)
                value = [(kind, value)] * len(async_keys)
            outcomes.update(zip(async_keys, value, strict=True))

        by_row = sorted(self._row_by_row)
        for key, outcome in outcomes.items():
            if outcome[0] in ("ok", "contract") or (num_rows == 1 and key not in unknown_culprits):
                results[key].record(outcome, range(num_rows))
            else:
                by_row.append(key)
        rows = [inputs.row(index) for index in range(num_rows)] if by_row else []
        row_calls = {key: self._score_by_row(key, rows, results[key], is_async=key in async_keys) for key in by_row}
        for key, futures in row_calls.items():
            for future in futures:
                future.result()
            if key in batch_calls and outcomes[key][0] == "timeout" and not results[key].timeouts:
                self._row_by_row.add(key)
                logger.warning(
                    "reward %r takes longer than reward.timeout_s = %g s for a batch of %d, but not for any single row: from now on "
                    "it is called row by row (a larger timeout_s avoids that)",
                    *(self.names[key], self.timeout_s, num_rows),
                )

    def _score_by_row(self, key: int, rows: list[RewardInputs], result: FunctionResult, is_async: bool) -> list[Future]:
        """Call a function once per row. ``result`` is complete when the returned futures are done."""
        if is_async:
            kind, value = self._submit_gather([(key, row) for row in rows]).result()
            if kind == "ok":
                for index, outcome in enumerate(value):
                    result.record(outcome, [index])
                return []
            # A row blocked the event loop. One call per row, as below, finds out which.

        def score_row(worker: WorkerProcess, index: int) -> None:
            if result.lost_too_many_workers():
                result.record(("timeout", None), [index])
            else:
                result.record(worker.call([key], ("call", key, rows[index]), self.timeout_s), [index])

        return [self._submit(lambda worker, i=i: score_row(worker, i)) for i in range(len(rows))]

    def _submit_call(self, key: int, inputs: RewardInputs) -> Future:
        return self._submit(lambda worker: worker.call([key], ("call", key, inputs), self.timeout_s))

    def _submit_gather(self, calls: list[tuple[int, RewardInputs]]) -> Future:
        keys = sorted({key for key, _ in calls})
        seconds = self.timeout_s + GATHER_GRACE_SECONDS
        return self._submit(lambda worker: worker.call(keys, ("gather", calls, self.timeout_s), seconds))

    def _submit(self, job: Callable[[WorkerProcess], Any]) -> Future:
        """Run ``job(worker)`` in a thread, on the next idle worker.

        The threads live as long as the runner: the kernel kills a worker when the thread that started it ends (PR_SET_PDEATHSIG).
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="reward")
            functions = [(spec.name, spec.args, pickled(spec.function)) for spec in self.specs]
            self._workers = [WorkerProcess(functions, self._directory) for _ in range(self._num_workers)]
            for worker in self._workers:
                self._idle.put(worker)
        idle = self._idle

        def run() -> Any:
            worker = idle.get()
            try:
                return job(worker)
            finally:
                idle.put(worker)

        return self._pool.submit(run)


def _unique_names(specs: Sequence[str]) -> list[str]:
    """The display names of rewards; the second of the same name gets ``_2``, and so on."""
    names: list[str] = []
    for spec in specs:
        name, base, number = display_name(spec), display_name(spec), 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names
