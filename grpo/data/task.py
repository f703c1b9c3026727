"""The base class of the built-in tasks: rows drawn from a seed, and a split into training and evaluation that no seed changes."""

import hashlib
import random
from abc import ABC, abstractmethod

from grpo.algorithm.seeding import derive_seed

EVAL_SHARE = 8  # one problem in eight is for evaluation


def split_of_problem(task: str, problem: str) -> str:
    """``"train"`` or ``"eval"``, from a hash of the task's name and the problem. Seed, count and order of rows have no effect."""
    digest = hashlib.blake2b(f"{task}:{problem}".encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_SHARE == 0 else "train"


def choose_missing_tag(shares: dict[str, float], rng: random.Random) -> str:
    """Draw which tag a noisy demonstration leaves out: a key of ``shares`` with that probability, otherwise ``"none"``."""
    return rng.choices([*shares, "none"], [*shares.values(), 1 - sum(shares.values())])[0]


class Task(ABC):
    """A family of problems that are computed, so that nothing is downloaded."""

    name: str
    instructions: str
    """The system prompt for every model except the tiny one, which is trained without it."""
    num_rows = {"train": 4096, "eval": 512}
    """The default number of rows per split."""

    @abstractmethod
    def draw(self, rng: random.Random) -> dict:
        """Draw one problem: a row with ``prompt``, ``answer`` and the other columns that rewards of this task need."""

    @abstractmethod
    def problem_key(self, row: dict) -> str:
        """A text that is equal for rows with the same problem (``3+5`` and ``5+3``)."""

    @abstractmethod
    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str:
        """One response (text, without EOS), with the mistakes in the task's table or, with ``noisy=False``, without any."""

    def split_of(self, row: dict) -> str:
        """The split that a row belongs to, ``"train"`` or ``"eval"``."""
        return split_of_problem(self.name, self.problem_key(row))

    def rows(self, split: str, seed: int, count: int | None = None) -> list[dict]:
        """Draw ``count`` different problems of one split (``num_rows[split]`` by default). The same seed gives the same rows.

        Raises:
            ValueError: if the split is unknown, or the task has fewer than ``count`` different problems.
        """
        if split not in self.num_rows:
            raise ValueError(f"unknown split {split!r} of task {self.name!r}: it has {', '.join(self.num_rows)}")
        count = self.num_rows[split] if count is None else count
        rng = random.Random(derive_seed(seed, f"tasks/{self.name}/{split}"))
        rows: dict[str, dict] = {}
        draws_without_new_row = 0
        while len(rows) < count:
            row = self.draw(rng)
            key = self.problem_key(row)
            is_new = self.split_of(row) == split and key not in rows
            draws_without_new_row = 0 if is_new else draws_without_new_row + 1
            if is_new:
                rows[key] = row
            if draws_without_new_row > 20_000:
                raise ValueError(f"task {self.name!r} has about {len(rows)} problems in {split!r}, not {count}")
        return list(rows.values())
