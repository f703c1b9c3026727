"""The interface of an engine, as the loop, the evaluation and the chat call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

from grpo.algorithm.batch import Completion, Group, Problem
from grpo.distributed import World
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams
from grpo.rollout.stops import Stops

Replies = Callable[[int, Sequence[int]], "Future[Sequence[int] | None]"]
"""A function that answers a turn. Its arguments are the row's number and the tokens of the turn.

Completion g of problem p is row ``p * num_generations + g``. The result is the tokens of the
answer, which leave room for at least one more token, or None: the completion ends with this turn.
"""

ROWS_PER_CALL = 256
"""Most completions of one call in an evaluation, in most engines."""


class Engine(Protocol):
    """Samples completions with the weights of a policy."""

    policy: Policy
    uses_collectives: bool
    """True if :meth:`weights` uses collectives, and so raises an error of one rank on all."""
    rows_per_call: int
    """Most completions that an evaluation asks for in one call of :meth:`generate`."""

    def weights(self) -> AbstractContextManager[None]:
        """Inside the block, :meth:`generate` samples from the weights at its start.

        All ranks enter the block together.
        """

    def generate(
        self,
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed_key: tuple[int, str, int],
        on_tokens: Callable[[int], None] | None = None,
        replies: Replies | None = None,
    ) -> list[Group]:
        """Sample ``num_generations`` completions of each problem; one group per problem, in order.

        Args:
            problems: this rank's problems; of each, ``prompt_ids`` is read, and ``index`` as a part
                of its seeds.
            seed_key: ``(seed, purpose, step)``. Completion g of a problem has the random seed
                ``derive_seed(seed, purpose, step, problem.index, g)``. In the built-in engine, seed
                and weights determine the completion.
            on_tokens: called with the number of tokens drawn since the last call, for progress
                bars.
            replies: answers each turn of a completion. None: a completion is one turn.
        """

    def dry_run(self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> None:
        """Allocate as much memory as sampling one completion per prompt takes at most.

        An engine that samples in other processes does nothing.
        """

    def close(self) -> None:
        """Release what the engine holds outside this process."""


@contextmanager
def engine_with_weights(
    engine: Engine,
    world: World,
    seconds: dict[str, float] | None = None,
) -> Iterator[None]:
    """:meth:`Engine.weights` on all ranks, which raise together if one fails.

    With ``seconds``, the time to copy or gather the weights is added to that of the rollout.
    """
    timed = world.timed("rollout", seconds) if seconds is not None else nullcontext()
    # An engine with collectives raises on all ranks by itself. Another may fail on one rank alone,
    # for which the other ranks would wait in their next collective.
    together = nullcontext() if engine.uses_collectives else world.fail_together()
    with ExitStack() as stack:
        # Only the beginning of the block is timed and watched, so its end is left to the stack.
        with timed, together:
            stack.enter_context(engine.weights())
        yield


def grouped(
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    stops: Stops,
) -> list[Group]:
    """Return the groups of the problems, which have equally many completions, with texts."""
    G = len(completions) // max(len(problems), 1)
    with_texts = [replace(c, text=stops.text(c.ids)) for c in completions]
    groups = []
    for p, problem in enumerate(problems):
        first = p * G
        group = with_texts[first : first + G]
        groups.append(Group(problem, tuple(group)))
    return groups
