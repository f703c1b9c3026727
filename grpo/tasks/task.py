"""What every embedded task shares: rows drawn from a seed, and a split that no seed can blur."""

import hashlib
import random
from abc import ABC, abstractmethod

from grpo.seeding import derive_seed

EVAL_SHARE = 8  # one problem in eight is held out


class Task(ABC):
    """A family of problems that is computed, not downloaded.

    Attributes:
        name: the name :func:`grpo.tasks.load_task` knows it by.
        instructions: the system prompt that says what response is wanted, for any model but the tiny one, which was
            warm-started without it.
        num_rows: rows per split, unless ``rows`` is asked for another count.
    """

    name: str
    instructions: str
    num_rows = {"train": 4096, "eval": 512}

    @abstractmethod
    def draw(self, rng: random.Random) -> dict:
        """Draw one problem: a row with ``prompt``, ``answer`` and whatever else the rewards of this task need."""

    @abstractmethod
    def canonical(self, row: dict) -> str:
        """The identity of a row's problem: equal for two rows that ask the same (``3+5``, ``5+3``)."""

    @abstractmethod
    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str:
        """One response (text, without EOS) as an inattentive author would write it: see the task's table of noise.

        With ``noisy=False``, as the same author writes it at his best.
        """

    def side(self, row: dict) -> str:
        """``"train"`` or ``"eval"``, by a hash of the problem alone: no seed, count or order moves a problem."""
        digest = hashlib.blake2b(f"{self.name}:{self.canonical(row)}".encode(), digest_size=8).digest()
        return "eval" if int.from_bytes(digest, "big") % EVAL_SHARE == 0 else "train"

    def rows(self, split: str, seed: int, count: int | None = None) -> list[dict]:
        """Draw ``count`` different problems of one split (``num_rows[split]`` by default), the same for the same seed.

        Raises:
            ValueError: if the split is unknown, or if the task has fewer different problems than asked for.
        """
        if split not in self.num_rows:
            raise ValueError(f"unknown split {split!r} of task {self.name!r}: it has {', '.join(self.num_rows)}")
        count = self.num_rows[split] if count is None else count
        rng = random.Random(derive_seed(seed, f"tasks/{self.name}/{split}"))
        rows: dict[str, dict] = {}
        fruitless = 0
        while len(rows) < count:
            row = self.draw(rng)
            key = self.canonical(row)
            if self.side(row) == split and key not in rows:
                rows[key] = row
                fruitless = 0
            else:
                fruitless += 1
            if fruitless > 20_000:
                raise ValueError(f"task {self.name!r} has about {len(rows)} problems in {split!r}, not {count}")
        return list(rows.values())
