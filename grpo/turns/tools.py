"""The tools and the environment of a run, loaded in worker processes that may be killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from grpo.config import Config
from grpo.config.config import ENVIRONMENT_ROWS
from grpo.rewards import RewardSpec
from grpo.rewards.calls import ENVIRONMENT_KEY
from grpo.rewards.functions import ENVIRONMENT_PREFIX
from grpo.turns.sessions import Description, LoadedEnvironment, LoadedTool
from grpo.workers import Pool, Request, Worker

DEFAULT_NUM_WORKERS = 8
"""Number of worker processes per rank, if ``reward.num_workers`` is not set.

The number exceeds the cores of many machines, since most tools wait for a server or a program.
"""


class Tools:
    """The tools and the environment of a run, which may have neither, and the worker processes
    that run them.

    Each row of a rollout belongs to one worker, so that the calls of a row run in order, and the
    environment of the row lives in that worker. Rows of different workers run at the same time.

    Args:
        objects: Python objects that a program passed, by the names that stand for the objects in
            the configuration. Default: no objects.
    """

    def __init__(self, config: Config, objects: Mapping[str, Any] | None = None):
        self.config = config
        self._objects = objects or {}
        self.environment_makes_prompts = config.data.dataset == ENVIRONMENT_ROWS
        """True if there is no dataset, and the environment's ``reset`` makes the prompts."""
        self.pool = Pool(config.reward.num_workers or DEFAULT_NUM_WORKERS)
        self.environment: Description | None = None
        self.is_stepped = False
        """True for a reset/step environment, where a whole turn of the model is an action."""
        self.key_of_tool: dict[str, str] = {}
        """Name of a tool -> key of the object in the worker processes that runs the tool."""
        self.schemas: list[dict[str, Any]] | None = [] if config.uses_turns else None
        """The JSON schemas of all tools, as chat templates take them. None if the run has neither
        tools nor an environment."""
        self.source_files: dict[str, str] = {}
        """Name in messages -> path of each file that defines a tool or the environment."""
        self._rows_per_worker = 1
        """Number of neighbouring rows of a rollout that belong to the same worker."""

    def load(self) -> Tools:
        """Load all tools and the environment in one worker, so that mistakes show at the start.

        Returns this object.

        Raises:
            ValueError: if a tool or the environment cannot be loaded, or if the environment cannot
                be combined with tools.
        """
        for tool in self.config.tools:
            key = f"tool {tool.name!r}"
            self._load(key, key, LoadedTool, tool.name, tool.args)
        if self.config.environment:
            name = self.config.environment
            self.environment = self._load(
                f"environment {name!r}",
                ENVIRONMENT_KEY,
                LoadedEnvironment,
                name,
            )
            self.is_stepped = self.environment.is_stepped
            if self.is_stepped and self.config.tools:
                raise ValueError(
                    "a reset/step environment takes whole turns as actions, so it cannot stand "
                    "beside tools"
                )
        # The first worker has imported transformers for the schemas. No call needs transformers,
        # which would take memory for the whole run.
        self.close()
        return self

    def _load(
        self,
        label: str,
        key: str,
        make: type,
        spec: str,
        *arguments: Any,
    ) -> Description:
        description = self.pool.load(
            label,
            key,
            make,
            spec,
            *arguments,
            user_object=self._objects.get(spec),
        )
        self.source_files |= description.source_files
        for name, schema in description.tools.items():
            # The model calls tools by name alone, so a name must mean one tool.
            if name in self.key_of_tool:
                raise ValueError(f"two tools have the name {name!r}")
            self.key_of_tool[name] = key
            self.schemas.append(schema)
        return description

    def reward_specs(self, functions: Sequence[Any]) -> list[Any]:
        """Return the reward functions of a run, with the environment's reward if there is one.

        Raises:
            ValueError: if there is no reward at all.
        """
        specs = list(functions)
        # The environment's reward has weight 1, unless the user has listed it with another weight.
        is_listed = any(spec.name.startswith(ENVIRONMENT_PREFIX) for spec in specs)
        if self.environment and self.environment.has_reward and not is_listed:
            specs.append(RewardSpec(ENVIRONMENT_PREFIX + self.environment.name))
        if not specs:
            raise ValueError(
                "nothing gives a reward: set reward.functions, or give the environment a "
                "get_reward()"
            )
        return specs

    def keep_groups_together(self) -> None:
        """Give all rows of a group the same worker.

        A reward function that takes ``environments`` can then compare the environments of a group.
        """
        # The groups of an evaluation may have another size. A worker gets a multiple of both sizes,
        # so that no group is split between two workers.
        rollout = self.config.rollout
        self._rows_per_worker = math.lcm(rollout.num_generations, self.config.eval.num_samples)

    def worker_of(self, row: int) -> Worker:
        """Return the worker that makes the calls of a row of the rollout."""
        workers = self.pool.workers
        # Neighbouring rows go to different workers, so that a few rows keep all workers busy.
        return workers[row // self._rows_per_worker % len(workers)]

    def submit(self, row: int, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job, which may call tools, in the thread of the row's worker."""
        return self.worker_of(row).submit(job, *arguments)

    def close(self) -> None:
        """Close the environments and kill the workers. A later tool call starts new workers."""
        self.pool.close(Request(ENVIRONMENT_KEY, "close"))
