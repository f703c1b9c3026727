"""Metrics of a step whose completions have several turns."""

from collections.abc import Iterable, Sequence

from grpo.algorithm.batch import Group
from grpo.telemetry.accumulator import Accumulator

STOP_REASONS = ("stop", "length", "environment", "max_turns", "failed")
"""The values of :attr:`grpo.algorithm.batch.Completion.stop_reason`."""


def add_turns(
    groups: Sequence[Group],
    metrics: Accumulator,
    tools: Iterable[str],
) -> None:
    """Add the tool calls, turns and stop reasons of this rank's completions.

    Args:
        tools: the names of all tools of the run, the same on every rank.
    """
    count = 0
    num_tokens = 0
    num_turns = 0
    stop_reasons = []
    calls = []
    for group in groups:
        for completion in group.completions:
            count += 1
            num_tokens += len(completion.ids)
            num_turns += completion.num_turns
            stop_reasons.append(completion.stop_reason)
            calls += completion.calls
    # The total length includes the answers of tools and environments. completions/mean_length
    # counts the tokens that the model wrote.
    metrics.add("completions/total_length", num_tokens, count)
    metrics.add("turns/mean", num_turns, count)
    # The metrics are summed over the ranks, so each rank adds the same names: also those of stop
    # reasons and tools that its own completions do not have.
    for reason in STOP_REASONS:
        metrics.add(f"stop_reason/{reason}", stop_reasons.count(reason), count)
    if not tools:
        return

    called = [call.name for call in calls]
    failed = [call.name for call in calls if call.error]
    metrics.add("tools/call_frequency", len(called), count)
    metrics.add("tools/failure_frequency", len(failed), len(called))
    for name in tools:
        metrics.total(f"tools/{name}/calls", called.count(name))
        metrics.total(f"tools/{name}/errors", failed.count(name))
