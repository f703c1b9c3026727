"""The tools and environments of a run, loaded in worker processes that may be killed.

An object of the user's program that no worker can load, such as a function that holds a connection to
a database, is loaded in this process instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy

from grpo.config import Config
from grpo.config.config import ENVIRONMENT_ROWS
from grpo.rewards.functions import ENVIRONMENT_PREFIX, source_files
from grpo.rewards.pool import LOAD_SECONDS, WorkerLost, WorkerPool
from grpo.rewards.runner import RewardSpec
from grpo.turns.worker import Description, EnvironmentInfo, Reply, Source, ToolWorker

MAX_WORKERS = 8
"""Worker processes per rank, if ``reward.num_workers`` is not set: most tools wait for something else."""
COLUMN = "environment"
"""The column that names the environment of a row, where there are several."""


class Tools:
    """The tools and environments of a run, and the worker processes that run them.

    A row of a rollout has one worker, so that its calls run in order, and an environment that cannot be pickled finds
    its way back. Rows of other workers run at the same time.

    Args:
        objects: name in the configuration -> the Python object that a program passed in its place.
    """

    def __init__(self, config: Config, objects: Mapping[str, Any] | None = None):
        self.objects = objects or {}
        self.format = config.tools_format
        self.max_turns = config.rollout.max_turns
        self.max_tool_tokens = config.rollout.max_tool_tokens
        self.timeout_s = config.reward.timeout_s
        self.function = config.rollout.function
        """The name of a rollout function; None without one."""
        self.function_object = self.objects.get(self.function)
        self.owns_prompts = config.data.dataset == ENVIRONMENT_ROWS
        """True if the prompts are those of the environment's reset."""
        named = config.environment
        self.several = isinstance(named, dict)
        """True if a column of the rows names the environment."""
        if named and not self.several:
            named = {None: named}
        self._tools = [Source("tool", tool.name, tool.args) for tool in config.tools]
        self.sources = {}
        """Sources of the environments' classes, by their names in rows."""
        for row_name, name in (named or {}).items():
            self.sources[row_name] = Source("environment", name, row_name=row_name)
        self.here = ToolWorker(is_process=False)
        """A worker in this process, for the tools and environments that no worker process can load."""
        self.notes: list[str] = []
        """Messages of :meth:`load` for the user, one line each."""
        num_workers = config.reward.num_workers or MAX_WORKERS
        self._pools = []
        for _ in range(num_workers):
            self._pools.append(WorkerPool(1, "grpo.turns.worker:ToolWorker"))
        self.description = Description([], {}, {})

    @property
    def steps(self) -> bool:
        """True with a reset/step environment: turns are actions, and there are no calls."""
        return any(info.steps for info in self.description.environments.values())

    @property
    def all_schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools of the configuration and of all environments."""
        return [*self.description.schemas, *(s for e in self.description.environments.values() for s in e.schemas)]

    @property
    def names(self) -> list[str]:
        """The names of all tools."""
        return list(dict.fromkeys(schema["function"]["name"] for schema in self.all_schemas))

    @property
    def summary(self) -> str:
        """One line about the tools and environments."""
        parts = []
        if self.names:
            parts.append("tools " + ", ".join(self.names))
        classes = [info.class_name for info in self.description.environments.values()]
        if classes:
            parts.append("environment " + ", ".join(classes))
        return "; ".join(parts) or f"rollout.function {self.function}"

    @property
    def source_files(self) -> dict[str, str]:
        """Name for messages -> path of the files that define tools and environments."""
        own = source_files(self.function, self.function_object) if self.function else {}
        return self.description.source_files | own

    def load(self) -> Tools:
        """Load everything in one worker, so that a mistake (``ValueError``) shows early."""
        if self.function and not self.function_object:
            self.function_object = Source("rollout.function", self.function).load()
        if not (self._tools or self.sources):
            return self
        first, *others = self._pools
        for key, source in enumerate((*self._tools, *self.sources.values())):
            own = self.objects.get(source.name)
            loaded = first.load_or_here(
                self.here,
                self.notes,
                f"{source.kind} {source.name!r}",
                key,
                source,
                own,
            )
            _raised(loaded)
        request = first.submit(first.request, first.functions, LOAD_SECONDS, "describe")
        there = _raised(request.result())
        first.close()  # it has imported transformers, which no call needs
        for pool in others:
            pool.functions = first.functions
        here = _raised(self.here.describe())
        found = self.description = Description(
            there.schemas + here.schemas,
            there.environments | here.environments,
            there.source_files | here.source_files,
        )

        kinds = {info.steps for info in found.environments.values()}
        if len(kinds) > 1 or (True in kinds and self._tools):
            raise ValueError("a reset/step environment takes whole turns as actions, so it cannot stand beside tools")
        if not self.owns_prompts:
            return self
        for info in found.environments.values():
            if self.several:
                raise ValueError("several environments need data.dataset, whose column `environment` chooses one")
            if not info.takes_seed:
                raise ValueError(
                    f"without data.dataset, reset() of {info.class_name} makes the prompt, and needs an argument "
                    "`seed`: the completions of a group must get the same prompt"
                )
        return self

    def reward_specs(self, functions: Sequence[Any]) -> list[Any]:
        """The reward functions, and those of the environments, of weight 1; or ValueError if there is none."""
        infos = self.description.environments.values()
        own = dict.fromkeys(ENVIRONMENT_PREFIX + info.class_name for info in infos if info.has_reward)
        specs = [*functions, *(RewardSpec(name) for name in own if name not in [f.name for f in functions])]
        if not specs:
            raise ValueError("nothing gives a reward: set reward.functions, or give the environment a get_reward()")
        return specs

    def environment_of(self, columns: Mapping[str, Any]) -> tuple[str | None, EnvironmentInfo | None]:
        """The environment of a row: its name and what is known of it; ValueError if its column names none."""
        if not self.description.environments:
            return None, None
        name = columns.get(COLUMN) if self.several else None
        if name not in self.description.environments:
            known = ", ".join(map(str, self.description.environments))
            raise ValueError(f"a row has environment={name!r}, which is none of {known}")
        return name, self.description.environments[name]

    def schemas_of(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The schemas of the tools of a row."""
        _, info = self.environment_of(columns)
        return self.description.schemas + (info.schemas if info else [])

    def submit(self, row: int, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job in the thread of a row's worker. Jobs call :meth:`request`.

        A tool or environment that lives in this process may refuse other threads, as a connection of
        sqlite3 does. If there is one, all jobs run in this thread, one after the other.
        """
        if not (self.here.tools or self.here.environments):
            pool = self._pools[row % len(self._pools)]
            return pool.submit(job, *arguments)
        done = Future()
        done.set_result(job(*arguments))
        return done

    def request(self, row: int, is_here: bool, method: str, *arguments: Any) -> Reply:
        """The reply of a row's worker, or of this process (:class:`grpo.turns.worker.ToolWorker`).

        A late or dead worker is a failure.
        """
        if is_here:
            # The request seeds the global generators, which this process uses too.
            state = random.getstate()
            numpy_state = numpy.random.get_state()
            try:
                return getattr(self.here, method)(*arguments)
            finally:
                random.setstate(state)
                numpy.random.set_state(numpy_state)
        pool = self._pools[row % len(self._pools)]
        try:
            return pool.request(pool.functions, self.timeout_s, method, *arguments)
        except WorkerLost as lost:
            if lost.kind == "timeout":
                return Reply(
                    None,
                    f"no result within {self.timeout_s:g} seconds",
                    failed=True,
                    seconds=self.timeout_s,
                )
            return Reply(None, "the tool has died", failed=True)

    def begin_rollout(self) -> None:
        for pool in self._pools:
            pool.begin_step()

    def close(self) -> None:
        """Kill the workers. A later call starts new ones."""
        for pool in self._pools:
            pool.close()


def _raised(found: Any) -> Any:
    """A worker's answer, unless it is a mistake of the user."""
    if isinstance(found, ValueError):
        raise found
    return found
