"""The metrics of a step with turns."""

from collections.abc import Sequence

from grpo.algorithm.batch import Group
from grpo.telemetry.accumulator import Accumulator

STOP_REASONS = ("stop", "length", "environment", "max_turns", "failed")


def add_turns(
    groups: Sequence[Group],
    metrics: Accumulator,
    tools: Sequence[str],
) -> None:
    """Add the calls, turns and endings of this rank's completions. ``tools``: those of the run, on every rank."""
    completions = [c for group in groups for c in group.completions]
    count = len(completions)
    num_tokens = sum(len(c.ids) for c in completions)
    metrics.add("completions/total_length", num_tokens, count)
    num_turns = sum(c.num_turns for c in completions)
    metrics.add("turns/mean", num_turns, count)
    # A rank without an ending of some kind adds it, too: all ranks must have the same names.
    for reason in STOP_REASONS:
        num_ended = sum(c.stop_reason == reason for c in completions)
        metrics.add(f"stop_reason/{reason}", num_ended, count)
    if not tools:
        return

    calls = [call for c in completions for call in c.calls]
    num_failed = sum(call.failed for call in calls)
    metrics.add("tools/call_frequency", len(calls), count)
    metrics.add("tools/failure_frequency", num_failed, len(calls))
    for name in tools:
        own = [call for call in calls if call.name == name]
        num_failed = sum(call.failed for call in own)
        seconds = sum(call.seconds for call in own)
        metrics.total(f"tools/{name}/calls", len(own))
        metrics.total(f"tools/{name}/errors", num_failed)
        metrics.add(f"tools/{name}/seconds", seconds, len(own))
