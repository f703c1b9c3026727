"""The metrics of a step with turns."""

from collections.abc import Iterable, Sequence

from grpo.algorithm.batch import Group
from grpo.telemetry.accumulator import Accumulator

STOP_REASONS = ("stop", "length", "environment", "max_turns", "failed")


def add_turns(
    groups: Sequence[Group],
    metrics: Accumulator,
    tools: Iterable[str],
) -> None:
    """Add the calls, turns and endings of this rank's completions.

    ``tools``: the names of all tools of the run, the same on every rank.
    """
    completions = [c for group in groups for c in group.completions]
    count = len(completions)
    num_tokens = sum(len(c.ids) for c in completions)
    num_turns = sum(c.num_turns for c in completions)
    metrics.add("completions/total_length", num_tokens, count)
    metrics.add("turns/mean", num_turns, count)
    # All ranks must add the same names, also those of endings that none of their completions had.
    for reason in STOP_REASONS:
        num_ended = sum(c.stop_reason == reason for c in completions)
        metrics.add(f"stop_reason/{reason}", num_ended, count)
    if not tools:
        return

    calls = [call for c in completions for call in c.calls]
    metrics.add("tools/call_frequency", len(calls), count)
    metrics.add("tools/failure_frequency", sum(call.failed for call in calls), len(calls))
    for name in tools:
        have_failed = [call.failed for call in calls if call.name == name]
        metrics.total(f"tools/{name}/calls", len(have_failed))
        metrics.total(f"tools/{name}/errors", sum(have_failed))
