"""Score completions with several reward functions, none of which can hang, kill or silence the training process.

``B`` rows (completions), ``F`` functions. Each function gets the whole batch in one call. Only where that call raises, hangs or
kills its worker are the rows tried one by one, so that one bad row costs one reward. The bound on time, per function and step:
``timeout_s`` for the batch; then ``timeout_s`` per row, and after ``result.MAX_LOST_WORKERS`` rows that hung or killed a worker the
rows left are given up (``None``, counted as timeouts). A function that always hangs therefore costs ``(1 + 8) * timeout_s``, shared by
``num_workers``.

Nothing here knows of ranks: what must stop a run is reported (``failed_everywhere``) or raised (:class:`RewardContractError`), and
the training loop votes on it.
"""

import logging
import os
import queue
import traceback
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from grpo.rewards.process import LOAD_SECONDS, WorkerProcess
from grpo.rewards.registry import CLASSIFIER, check_arguments, display_name, load_reward, missing_columns
from grpo.rewards.result import RewardContractError, RewardResult, RewardSpec, Tally
from grpo.rewards.worker import FunctionInfo, Payload, call_reward, check_values

GATHER_GRACE_SECONDS = 1.0
"""Coroutines time themselves out inside the worker; this much later the worker itself is held to be stuck."""

logger = logging.getLogger(__name__)


class RewardRunner:
    """Runs the configured rewards; start it once per rank and :meth:`close` it (or use it as a context manager).

    Args:
        functions: ``RewardSpec``s or objects with ``name``, ``weight`` and ``args``.
        timeout_s: limit of one call, in seconds.
        num_workers: worker processes, 1 by default. More help where several functions, or rows of a slow one, take long.
        device: where ``classifier:`` rewards run, in this process.

    Raises:
        ValueError: if a setting makes no sense. :meth:`check` looks at the functions themselves.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        *,
        timeout_s: float = 10.0,
        num_workers: int | None = None,
        device: Any = "cpu",
    ):
        if not functions:
            raise ValueError("reward.functions is empty: name at least one reward, such as {name: accuracy}")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s must be positive, got {timeout_s}")
        if num_workers is not None and num_workers < 1:
            raise ValueError(f"reward.num_workers must be at least 1, got {num_workers}")
        self.specs = [RewardSpec(str(f.name).strip(), float(f.weight), dict(f.args or {})) for f in functions]
        self.names = _unique_names([spec.name for spec in self.specs])
        self.weights = [spec.weight for spec in self.specs]
        self.timeout_s, self.device = float(timeout_s), device
        self._num_workers = num_workers or 1
        self._functions = [(spec.name, spec.args) for spec in self.specs]
        self._directory = os.getcwd()
        self._infos: list[FunctionInfo] | None = None
        self._classifiers: dict[int, Any] = {}
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
        """End the workers. Scoring again would start new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.kill()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        for worker in self._workers:  # a thread may have restarted one in between
            worker.kill()
        self._pool, self._workers, self._idle = None, [], queue.SimpleQueue()

    def check(self, columns: Collection[str] | None = None) -> None:
        """Load every function now, so that a mistake in a configuration shows before any model is sampled.

        Args:
            columns: names of the rows' columns, where they are known.

        Raises:
            ValueError: in one line: an unknown name, a file that does not load, wrong arguments, a column that is missing.
        """
        if self._infos is None:
            infos = []
            for key, spec in enumerate(self.specs):
                if spec.name.startswith(CLASSIFIER):
                    infos.append(self._load_classifier(key, spec))
                    continue
                kind, value = self._submit(lambda worker, key=key: worker.load(key)).result()
                if kind != "ok":
                    reason = {"timeout": f"loading it took more than {LOAD_SECONDS:g} s"}.get(kind, value)
                    raise ValueError(value if kind == "invalid" else f"reward {spec.name!r} cannot be loaded: {reason}")
                infos.append(value)
                if value.row_by_row:
                    self._row_by_row.add(key)
            self._infos = infos
        if columns is not None:
            for name, info in zip(self.names, self._infos, strict=True):
                if problem := missing_columns(name, info.needed, columns):
                    raise ValueError(problem)

    def _load_classifier(self, key: int, spec: RewardSpec) -> FunctionInfo:
        reward = load_reward(spec.name)
        check_arguments(spec.name, reward, spec.args)
        try:
            reward([], [], **spec.args)  # it looks at its arguments before any row
        except ValueError as error:
            raise ValueError(f"reward {spec.name!r}: {error}") from None
        self._classifiers[key] = reward.to(self.device)
        return FunctionInfo(is_async=False, row_by_row=False, needed=frozenset())

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: dict[str, Sequence[Any]],
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> RewardResult:
        """Score ``B`` completions.

        Args:
            prompts, completions: ``[B]``, strings or lists of messages.
            columns: the rows' other columns, ``[B]`` each.
            completion_ids: ``[B]`` token lists, for rewards that count tokens.

        Raises:
            ValueError: if lengths differ or a column that a function needs is missing.
            RewardContractError: if a function returns something that is not a reward.
        """
        rows = len(completions)
        for name, values in {"prompts": prompts, "completion_ids": completion_ids, **columns}.items():
            if values is not None and len(values) != rows:
                raise ValueError(f"expected one value per completion ({rows}), got {len(values)} for {name}")
        self.check(columns)
        tallies = [Tally(name, rows) for name in self.names]
        if rows:
            for worker in self._workers:
                worker.new_step()
            try:
                self._score(Payload(prompts, completions, dict(columns), completion_ids), tallies)
            except BaseException:  # Ctrl-C: do not leave threads waiting for workers that nobody waits for
                self.close()
                raise
        for tally in tallies:
            if tally.contract is not None:
                raise RewardContractError(f"reward {tally.name!r} {tally.contract}")
            if tally.traceback and tally.name not in self._logged:
                self._logged.add(tally.name)
                logger.warning(
                    "reward %r failed on %d of %d completions (said once per run); the first:\n%s",
                    *(tally.name, tally.errors + tally.timeouts, rows, tally.traceback),
                )
        return RewardResult(
            values=[list(row) for row in zip(*(tally.values for tally in tallies), strict=True)],
            errors=[tally.errors for tally in tallies],
            timeouts=[tally.timeouts for tally in tallies],
            first_traceback={tally.name: tally.traceback for tally in tallies if tally.traceback},
            failed_everywhere=[tally.name for tally in tallies if tally.failed()],
        )

    def _score(self, payload: Payload, tallies: list[Tally]) -> None:
        """Whole batches first, all functions at once; then the rows of those that failed."""
        assert self._infos is not None
        coroutines = [k for k, info in enumerate(self._infos) if info.is_async and k not in self._row_by_row]
        elsewhere = self._classifiers.keys() | self._row_by_row | set(coroutines)
        plain = [k for k in range(len(self._infos)) if k not in elsewhere]
        batches: dict[int, Future] = {k: self._submit_call(k, payload) for k in plain}
        together = self._submit_gather([(k, payload) for k in coroutines]) if coroutines else None
        for key, reward in self._classifiers.items():  # in this process, while the workers work
            tallies[key].record(self._classify(reward, key, payload), range(len(payload)))
        outcomes = {k: future.result() for k, future in batches.items()}
        stuck = False
        if together is not None:
            kind, value = together.result()
            stuck = kind != "ok"  # one of them blocked or killed the worker, and it is not known which
            outcomes.update(zip(coroutines, value if kind == "ok" else [(kind, value)] * len(coroutines), strict=True))

        isolate = sorted(self._row_by_row)
        for key, outcome in outcomes.items():
            if outcome[0] in ("ok", "contract") or (len(payload) == 1 and not (stuck and key in coroutines)):
                tallies[key].record(outcome, range(len(payload)))
            else:
                isolate.append(key)
        rows = [payload.row(row) for row in range(len(payload))] if isolate else []
        pending = {k: self._isolate(k, rows, tallies[k], awaited=k in coroutines) for k in isolate}
        for key, futures in pending.items():
            for future in futures:
                future.result()
            if outcomes.get(key, ("",))[0] == "timeout" and not tallies[key].timeouts and key not in coroutines:
                self._row_by_row.add(key)
                logger.warning(
                    "reward %r needs more than reward.timeout_s = %g s for a batch of %d, though no single row does: it is "
                    "called row by row from now on (a larger timeout_s avoids that)",
                    *(self.names[key], self.timeout_s, len(payload)),
                )

    def _isolate(self, key: int, rows: list[Payload], tally: Tally, awaited: bool) -> list[Future]:
        """Score each row by itself."""
        if awaited:
            kind, value = self._submit_gather([(key, row) for row in rows]).result()
            if kind == "ok":
                for index, outcome in enumerate(value):
                    tally.record(outcome, [index])
                return []
            # A coroutine blocked the loop itself: fall through to one at a time, where the culprit can be told.

        def score_row(worker: WorkerProcess, index: int) -> None:
            if tally.gives_up():
                tally.record(("timeout", None), [index])
            else:
                tally.record(worker.call([key], ("call", key, rows[index]), self.timeout_s), [index])

        return [self._submit(lambda worker, i=i: score_row(worker, i)) for i in range(len(rows))]

    def _classify(self, reward: Any, key: int, payload: Payload) -> tuple[str, Any]:
        try:
            return check_values(call_reward(reward, self.specs[key].args, payload), len(payload))
        except Exception:
            return "error", traceback.format_exc()

    def _submit_call(self, key: int, payload: Payload) -> Future:
        return self._submit(lambda worker: worker.call([key], ("call", key, payload), self.timeout_s))

    def _submit_gather(self, jobs: list[tuple[int, Payload]]) -> Future:
        keys = sorted({key for key, _ in jobs})
        seconds = self.timeout_s + GATHER_GRACE_SECONDS
        return self._submit(lambda worker: worker.call(keys, ("gather", jobs, self.timeout_s), seconds))

    def _submit(self, job: Any) -> Future:
        """Run ``job(worker)`` on the next idle worker.

        The threads live as long as the runner: a worker is told to die with the thread that started it (PR_SET_PDEATHSIG).
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="reward")
            self._workers = [WorkerProcess(self._functions, self._directory) for _ in range(self._num_workers)]
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
    names: list[str] = []
    for spec in specs:
        base = display_name(spec)
        name, number = base, 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names
