"""The interface of engines, for the training loop, the evaluation and the chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol

from grpo.algorithm.batch import Group, Problem
from grpo.distributed import World
from grpo.model import Policy
from grpo.rollout.draw import SamplingParams

Replies = Callable[[int, Sequence[int]], "Future[Sequence[int] | None]"]
"""A function that answers a turn of the model, as a tool or an environment does.

The arguments are the row's number and the tokens of the turn. Completion g of problem p is row
``p * num_generations + g``. The result of the future is the tokens of the answer, which leave room
for at least one more token. The result is None if the completion ends with this turn.
"""

ROWS_PER_CALL = 256
"""Value of :attr:`Engine.rows_per_call` in most engines."""


class Engine(Protocol):
    """Samples completions with the weights of a policy."""

    policy: Policy
    uses_collectives: bool
    """True if :meth:`weights` uses collectives, and so raises on all ranks if one rank fails."""
    rows_per_call: int
    """Limit on the completions that an evaluation requests in one call of :meth:`generate`."""

    def weights(self) -> AbstractContextManager[None]:
        """Inside the block, :meth:`generate` samples from the weights at the start of the block.

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
        """Sample ``num_generations`` completions of each problem. Return a group for each problem.

        Args:
            problems: the problems of this rank. Only ``prompt_ids`` and ``index`` are read.
            seed_key: ``(seed, purpose, step)``. Completion g of a problem has the random seed
                ``derive_seed(seed, purpose, step, problem.index, g)``. In the built-in engine, this
                seed and the weights determine the completion.
            on_tokens: called with the number of tokens drawn since the last call, for progress
                bars.
            replies: answers each turn of a completion. Default: a completion is one turn.
        """

    def dry_run(self, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> None:
        """Allocate the peak memory of sampling one completion per prompt.

        An engine that samples in other processes allocates nothing.
        """

    def close(self) -> None:
        """Release the engine's resources outside this process, such as files and servers."""


@contextmanager
def engine_with_weights(
    engine: Engine,
    world: World,
    seconds: dict[str, float] | None = None,
) -> Iterator[None]:
    """Enter :meth:`Engine.weights` on all ranks. If one rank fails there, all ranks raise.

    With ``seconds``, the time to copy or gather the weights is added to ``seconds["rollout"]``.
    """
    timed = world.timed("rollout", seconds) if seconds is not None else nullcontext()
    # An engine with collectives raises on all ranks by itself. Other engines may fail on one rank
    # alone. Without fail_together(), the other ranks would then wait in their next collective.
    together = nullcontext() if engine.uses_collectives else world.fail_together()
    with ExitStack() as stack:
        # Only entering the engine's block is timed and watched. The stack leaves that block later.
        with timed, together:
            stack.enter_context(engine.weights())
        yield
