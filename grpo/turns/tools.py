"""The tools and environments of a run, loaded in worker processes that may be killed.

An object of the user's program that no worker can load, such as a function that holds a connection
to a database, is loaded in this process instead.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy

from grpo.config import Config
from grpo.config.config import ENVIRONMENT_ROWS
from grpo.rewards import RewardSpec
from grpo.rewards.calls import Place
from grpo.rewards.functions import ENVIRONMENT_PREFIX, source_files
from grpo.turns.sessions import Info, LoadedEnvironment, LoadedTool, load_named
from grpo.workers import Here, Pool, Request, Worker

DEFAULT_NUM_WORKERS = 8
"""Worker processes per rank, if ``reward.num_workers`` is not set: most tools wait for others."""
MAX_MEMORY_BYTES = 8 * 1024**3
"""Most bytes of the data of one worker. A tool that asks for more gets Python's MemoryError."""
TOOL = "tool"
"""Begins the keys of tools in the workers."""
ENVIRONMENT = "environment"
"""Begins the keys of environments in the workers. Where there are several, the column of this name
chooses the environment of a row."""
NO_ENVIRONMENT = Info(name=None, tools={}, source_files={})


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
        self.pool = Pool(config.reward.num_workers or DEFAULT_NUM_WORKERS, MAX_MEMORY_BYTES)
        self.notes = self.pool.notes
        """Messages of :meth:`load` for the user, one line each."""
        self.tools: list[Info] = []
        """The tools of the configuration."""
        self.environments: dict[str | None, Info] = {}
        """The environments by the name that a row has for each; None: the only one, of all rows."""
        self.source_files: dict[str, str] = {}
        """Name for messages -> path of the files that define tools and environments."""
        self._rows_per_worker = 1

    def load(self) -> Tools:
        """Load everything in one worker, so that a mistake (``ValueError``) shows early."""
        if self.function:
            # It samples, so it runs in this process, and is not loaded in a worker.
            self.function_object = self._objects.get(self.function) or load_named(
                "rollout.function",
                self.function,
                {},
            )
            self.source_files |= source_files(self.function, self.function_object)
        for tool in self.config.tools:
            info = self._load((TOOL, tool.name), LoadedTool, tool.name, tool.args)
            # The model calls tools by name.
            if info.name in self.names:
                raise ValueError(f"two tools have the name {info.name!r}")
            self.tools.append(info)
        named = self.config.environment or {}
        if isinstance(named, str):
            named = {None: named}
        for row_name, name in named.items():
            info = self._load((ENVIRONMENT, row_name), LoadedEnvironment, name)
            self.environments[row_name] = info
        self.close()  # the first worker has imported transformers, which no call needs
        self._check()
        return self

    def _load(
        self,
        key: tuple[str, Any],
        make: type,
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
        self.source_files |= info.source_files
        return replace(info, key=key)

    def _check(self) -> None:
        """ValueError unless all fit together, and give the prompts if nothing else does."""
        # Tools are no reset/step environments, so this also finds one beside tools.
        if len({info.steps for info in self.infos}) > 1:
            reason = "a reset/step environment takes whole turns as actions"
            raise ValueError(f"{reason}, so it cannot stand beside tools")
        if not self.owns_prompts:
            return
        for row_name, info in self.environments.items():
            if row_name is not None:
                need = "several environments need data.dataset"
                raise ValueError(f"{need}, whose column `environment` chooses one")
            if not info.takes_seed:
                raise ValueError(
                    f"without data.dataset, reset() of {info.name} makes the prompt, "
                    "and needs an argument `seed`: "
                    "the completions of a group must get the same prompt"
                )

    @property
    def infos(self) -> list[Info]:
        return [*self.tools, *self.environments.values()]

    @property
    def names(self) -> list[str]:
        """The names of all tools."""
        # Methods of several environments may have one name, and count as one tool.
        tools = {}
        for info in self.infos:
            tools |= info.tools
        return list(tools)

    def reward_specs(self, functions: Sequence[Any]) -> list[Any]:
        """The reward functions, and those of the environments, of weight 1.

        ValueError if there is none.
        """
        specs = list(functions)
        for info in self.environments.values():
            name = ENVIRONMENT_PREFIX + info.name
            # The user may have named it, with a weight. Two environments of one name share it.
            names = [spec.name for spec in specs]
            if info.has_reward and name not in names:
                specs.append(RewardSpec(name))
        if not specs:
            remedy = "set reward.functions, or give the environment a get_reward()"
            raise ValueError(f"nothing gives a reward: {remedy}")
        return specs

    def infos_of(self, columns: Mapping[str, Any]) -> list[Info]:
        """The tools of a row, and its environment as the last: :data:`NO_ENVIRONMENT` without one.

        ValueError if the row names an unknown environment.
        """
        environment = NO_ENVIRONMENT
        if self.environments:
            name = columns.get(ENVIRONMENT)
            if None in self.environments:
                name = None
            if name not in self.environments:
                known = ", ".join(map(str, self.environments))
                raise ValueError(f"a row has environment={name!r}, which is none of {known}")
            environment = self.environments[name]
        return [*self.tools, environment]

    def schemas_of(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The schemas of the tools of a row."""
        schemas = []
        for info in self.infos_of(columns):
            schemas += info.tools.values()
        return schemas

    def keep_groups_together(self) -> None:
        """Give the rows of a group one worker.

        A reward that compares their environments has all of them there. Groups of evaluations may
        be of another size.
        """
        config = self.config
        self._rows_per_worker = math.lcm(config.rollout.num_generations, config.eval.num_samples)

    def worker_of(self, place: Place) -> Worker | Here:
        """The worker that has a tool or an environment for a row."""
        return self.pool.worker_of(place.key, place.slot // self._rows_per_worker)

    @property
    def live_in_workers(self) -> bool:
        """True if an environment lives in a worker process."""
        keys = {info.key for info in self.environments.values()}
        return not keys <= self.pool.keys_here

    def submit(self, row: int, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job, which may call tools, in the thread of a row's worker.

        A tool or environment that lives in this process may refuse other threads, as a connection
        of sqlite3 does. If there is one, all jobs run in this thread, one after the other.
        """
        if not self.pool.keys_here:
            worker = self.worker_of(Place(None, row))
            return worker.submit(job, *arguments)
        # The tools seed the global generators, which this process uses too.
        # They are restored, so that tools change nothing of a user's reward here.
        state = random.getstate()
        numpy_state = numpy.random.get_state()
        try:
            return self.pool.here.submit(job, *arguments)
        finally:
            random.setstate(state)
            numpy.random.set_state(numpy_state)

    def close(self) -> None:
        """Close the environments and kill the workers. A later call starts new ones."""
        infos = self.environments.values()
        self.pool.close([Request(info.key, "close") for info in infos])
