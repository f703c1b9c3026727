"""The tools and environments of a run, loaded in worker processes that may be killed.

An object of the user's program that no worker can load, such as a function that holds a connection
to a database, is loaded in this process instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy

from grpo.config import Config
from grpo.config.config import ENVIRONMENT_ROWS
from grpo.rewards import RewardSpec
from grpo.rewards.calls import Place
from grpo.rewards.functions import ENVIRONMENT_PREFIX, source_files
from grpo.turns.sessions import Info, LoadedEnvironment, LoadedTool, load_named
from grpo.workers import Here, Pool, Request, Worker

MAX_WORKERS = 8
"""Worker processes per rank, if ``reward.num_workers`` is not set: most tools wait for others."""
MAX_MEMORY_BYTES = 8 * 1024**3
"""Of the data of one worker. A tool that asks for more gets Python's MemoryError."""
TOOL = "tool"
ENVIRONMENT = "environment"
"""The kinds of objects in the workers. The column of this name chooses the environment of a row,
where there are several."""


class Tools:
    """The tools and environments of a run, and the worker processes that run them.

    A row of a rollout has one worker, so that its calls run in order, and an environment lives
    there. Rows of other workers run at the same time.

    Args:
        objects: name in the configuration -> the Python object that a program passed in its place.
    """

    def __init__(self, config: Config, objects: Mapping[str, Any] | None = None):
        self.config = config
        self._objects = objects or {}
        self.function = config.rollout.function
        """The name of a rollout function; None without one."""
        self.function_object: Callable[..., Any] | None = None
        self.owns_prompts = config.data.dataset == ENVIRONMENT_ROWS
        """True if the prompts are those of the environment's reset."""
        self.several = isinstance(config.environment, dict)
        """True if a column of the rows names the environment."""
        self.pool = Pool(config.reward.num_workers or MAX_WORKERS, MAX_MEMORY_BYTES)
        self.notes = self.pool.notes
        """Messages of :meth:`load` for the user, one line each."""
        self.infos: dict[Hashable, Info] = {}
        """All tools and environments by their keys in the workers."""
        self.environments: dict[Hashable, Info] = {}
        self.source_files: dict[str, str] = {}
        """Name for messages -> path of the files that define tools and environments."""
        self._rows_per_worker = 1

    def load(self) -> Tools:
        """Load everything in one worker, so that a mistake (``ValueError``) shows early."""
        if self.function:
            given = self._objects.get(self.function)
            self.function_object = given or load_named("rollout.function", self.function, {})
            self.source_files |= source_files(self.function, self.function_object)
        for tool in self.config.tools:
            before = self.names
            info = self._load((TOOL, tool.name), LoadedTool, tool.name, tool.args)
            if info.name in before:
                raise ValueError(f"two tools have the name {info.name!r}")
        named = self.config.environment or {}
        if isinstance(named, str):
            named = {None: named}
        for row_name, name in named.items():
            key = (ENVIRONMENT, row_name)
            self.environments[key] = self._load(key, LoadedEnvironment, name)
        self.close()  # the first worker has imported transformers, which no call needs
        self._check()
        return self

    def _load(
        self,
        key: tuple[str, str | None],
        make: Callable[..., Any],
        spec: str,
        *arguments: Any,
    ) -> Info:
        info = self.pool.load(
            f"{key[0]} {spec!r}",
            key,
            make,
            spec,
            *arguments,
            user_object=self._objects.get(spec),
        )
        self.infos[key] = info
        self.source_files |= info.source_files
        return info

    def _check(self) -> None:
        """ValueError unless all fit together, and give the prompts if nothing else does."""
        if len({info.steps for info in self.infos.values()}) > 1:
            raise ValueError(
                "a reset/step environment takes whole turns as actions, "
                "so it cannot stand beside tools"
            )
        if not self.owns_prompts:
            return
        if self.several:
            raise ValueError(
                "several environments need data.dataset, "
                "whose column `environment` chooses one"
            )
        for info in self.environments.values():
            if not info.takes_seed:
                raise ValueError(
                    f"without data.dataset, reset() of {info.name} makes the prompt, "
                    "and needs an argument `seed`: "
                    "the completions of a group must get the same prompt"
                )

    @property
    def names(self) -> list[str]:
        """The names of all tools."""
        return list({name: None for info in self.infos.values() for name in info.tools})

    @property
    def summary(self) -> str:
        """One line about the tools and environments."""
        parts = []
        if self.names:
            parts.append("tools " + ", ".join(self.names))
        if self.environments:
            names = [info.name for info in self.environments.values()]
            parts.append("environment " + ", ".join(names))
        return "; ".join(parts) or f"rollout.function {self.function}"

    def reward_specs(self, functions: Sequence[Any]) -> list[Any]:
        """The reward functions, and those of the environments, of weight 1.

        ValueError if there is none.
        """
        specs = list(functions)
        for info in self.environments.values():
            name = ENVIRONMENT_PREFIX + info.name
            if info.has_reward and name not in [spec.name for spec in specs]:
                specs.append(RewardSpec(name))
        if not specs:
            raise ValueError(
                "nothing gives a reward: set reward.functions, "
                "or give the environment a get_reward()"
            )
        return specs

    def environment_of(self, columns: Mapping[str, Any]) -> Hashable | None:
        """The key of a row's environment, None without one; ValueError for an unknown name."""
        if not self.environments:
            return None
        key = (ENVIRONMENT, columns.get(ENVIRONMENT) if self.several else None)
        if key not in self.environments:
            known = ", ".join(str(name) for _, name in self.environments)
            raise ValueError(f"a row has environment={key[1]!r}, which is none of {known}")
        return key

    def infos_of(self, columns: Mapping[str, Any]) -> dict[Hashable, Info]:
        """The tools and the environment of a row."""
        own = self.environment_of(columns)
        others = self.environments.keys() - {own}
        return {key: info for key, info in self.infos.items() if key not in others}

    def schemas_of(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The schemas of the tools of a row."""
        infos = self.infos_of(columns).values()
        return [schema for info in infos for schema in info.tools.values()]

    def keep_groups_together(self) -> None:
        """Give the rows of a group one worker.

        A reward that compares their environments has all of them there.
        """
        self._rows_per_worker = self.config.rollout.num_generations

    def worker_of(self, place: Place) -> Worker | Here:
        """The worker where an environment lives."""
        return self.pool.place(place.key, place.slot // self._rows_per_worker)

    @property
    def live_in_workers(self) -> bool:
        """True if an environment lives in a worker process."""
        return not self.environments.keys() <= self.pool.keys_here

    def submit(self, row: int, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job, which may call tools, in the thread of a row's worker.

        A tool or environment that lives in this process may refuse other threads, as a connection
        of sqlite3 does. If there is one, all jobs run in this thread, one after the other.
        """
        if not self.pool.keys_here:
            return self.worker_of(Place(None, row)).submit(job, *arguments)
        # The tools seed the global generators, which this process uses too.
        state = random.getstate()
        numpy_state = numpy.random.get_state()
        done = self.pool.here.submit(job, *arguments)
        random.setstate(state)
        numpy.random.set_state(numpy_state)
        return done

    def close(self) -> None:
        """Close the environments and kill the workers. A later call starts new ones."""
        self.pool.close([Request(key, "close") for key in self.environments])
