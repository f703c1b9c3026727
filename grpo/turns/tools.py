"""The tools and the environment of a run, loaded in worker processes that may be killed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from grpo.config import Config
from grpo.config.config import ENVIRONMENT_ROWS
from grpo.rewards import RewardSpec
from grpo.rewards.calls import ENVIRONMENT
from grpo.rewards.functions import ENVIRONMENT_PREFIX
from grpo.turns.sessions import Info, LoadedEnvironment, LoadedTool
from grpo.workers import Pool, Request, Worker

DEFAULT_NUM_WORKERS = 8
"""Worker processes per rank, if ``reward.num_workers`` is not set: most tools wait for others."""


class Tools:
    """The tools and the environment of a run, and the worker processes that run them.

    A row of a rollout has one worker, so that its calls run in order, and its environment lives
    there. Rows of other workers run at the same time.

    Args:
        objects: name in the configuration -> the Python object that a program passed in its place.
    """

    def __init__(self, config: Config, objects: Mapping[str, Any] | None = None):
        self.config = config
        self._objects = objects or {}
        self.owns_prompts = config.data.dataset == ENVIRONMENT_ROWS
        """True if the prompts are those of the environment's reset."""
        self.pool = Pool(config.reward.num_workers or DEFAULT_NUM_WORKERS)
        self.environment: Info | None = None
        self.steps = False
        """True for a reset/step environment."""
        self.key_of_tool: dict[str, str] = {}
        """Name of a tool -> the key of the object in the workers that has it."""
        self.schemas: list[dict[str, Any]] = []
        """The schemas of all tools."""
        self.source_files: dict[str, str] = {}
        """Name for messages -> path of the files that define tools and the environment."""
        self._rows_per_worker = 1

    def load(self) -> Tools:
        """Load everything in one worker, so that a mistake (``ValueError``) shows early."""
        for tool in self.config.tools:
            key = f"tool {tool.name!r}"
            self._load(key, key, LoadedTool, tool.name, tool.args)
        if self.config.environment:
            name = self.config.environment
            what = f"environment {name!r}"
            self.environment = self._load(what, ENVIRONMENT, LoadedEnvironment, name)
            self.steps = self.environment.steps
            if self.steps and self.config.tools:
                raise ValueError(
                    "a reset/step environment takes whole turns as actions, so it cannot stand beside tools"
                )
        self.close()  # the first worker has imported transformers, which no call needs
        return self

    def _load(
        self,
        what: str,
        key: str,
        make: type,
        spec: str,
        *arguments: Any,
    ) -> Info:
        info = self.pool.load(
            what,
            key,
            make,
            spec,
            *arguments,
            user_object=self._objects.get(spec),
        )
        self.source_files |= info.source_files
        for name, schema in info.tools.items():
            # The model calls tools by name.
            if name in self.key_of_tool:
                raise ValueError(f"two tools have the name {name!r}")
            self.key_of_tool[name] = key
            self.schemas.append(schema)
        return info

    def schemas_of(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The schemas of the tools that the prompt of a row shows: those of all rows."""
        return self.schemas

    def reward_specs(self, functions: Sequence[Any]) -> list[Any]:
        """The reward functions, and that of the environment, of weight 1.

        ValueError if there is none.
        """
        specs = list(functions)
        # The user may have named it, with a weight.
        is_named = any(spec.name.startswith(ENVIRONMENT_PREFIX) for spec in specs)
        if self.environment and self.environment.has_reward and not is_named:
            specs.append(RewardSpec(ENVIRONMENT_PREFIX + self.environment.name))
        if not specs:
            raise ValueError(
                "nothing gives a reward: set reward.functions, or give the environment a get_reward()"
            )
        return specs

    def keep_groups_together(self) -> None:
        """Give the rows of a group one worker.

        A reward that compares their environments has all of them there. Groups of evaluations may
        be of another size.
        """
        config = self.config
        self._rows_per_worker = math.lcm(config.rollout.num_generations, config.eval.num_samples)

    def worker_of(self, row: int) -> Worker:
        """The worker that makes the calls of a row of the rollout."""
        workers = self.pool.workers
        return workers[row // self._rows_per_worker % len(workers)]

    def submit(self, row: int, job: Callable[..., Any], *arguments: Any) -> Future:
        """Run a job, which may call tools, in the thread of a row's worker."""
        return self.worker_of(row).submit(job, *arguments)

    def close(self) -> None:
        """Close the environments and kill the workers. A later call starts new ones."""
        self.pool.close(Request(ENVIRONMENT, "close"))
