"""Accuracy on held-out problems: greedy, mean@k, pass@k, format, length, with exact counts over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from grpo.batch import Group, Problem
from grpo.distributed import Interrupted, World
from grpo.rewards.extract import answers_equal, extract_answer, has_format
from grpo.rollout import Sampling, generate

ROWS_PER_WAVE = 256
"""Completions decoded at once in an evaluation."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples is correct, estimated without bias from ``num_samples`` of them.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., 2021, eq. 1), with exact integers.

    Raises:
        ValueError: unless ``0 <= num_correct <= num_samples`` and ``1 <= k <= num_samples``.
    """
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct} must lie in [0, num_samples={num_samples}]")
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k} must lie in [1, num_samples={num_samples}]")
    total = math.comb(num_samples, k)
    return (total - math.comb(num_samples - num_correct, k)) / total


@dataclass(frozen=True)
class Verdict:
    """What became of one completion."""

    correct: bool
    """The correctness reward (`Judge`) gave more than 0."""
    formatted: bool
    lenient: bool
    """The last number in the text equals the answer, tags or not."""
    length: int
    """Tokens."""
    truncated: bool


Judge = Callable[[Sequence[Group]], list[list[Verdict]]]


def make_judge(
    score: Callable[[Sequence[Group]], list[dict[str, float | None]]], correctness: str, format_name: str | None
) -> Judge:
    """A judge from the run's own rewards.

    Args:
        score: groups -> one ``{reward name: value}`` per completion, group by group.
        correctness: the reward that decides whether a completion is correct: its value is above 0.
        format_name: the reward that decides on the format; None: ``<think>..</think> <answer>..</answer>``.
    """

    def judge(groups: Sequence[Group]) -> list[list[Verdict]]:
        values = iter(score(groups))
        verdicts = []
        for group in groups:
            row = []
            for completion in group.completions:
                value = next(values)
                answer = group.problem.columns.get("answer")
                last = extract_answer(completion.text, mode="lenient")
                row.append(
                    Verdict(
                        correct=(value[correctness] or 0.0) > 0,
                        formatted=(value[format_name] or 0.0) > 0 if format_name else has_format(completion.text),
                        lenient=answer is not None and last is not None and answers_equal(last, str(answer)),
                        length=len(completion.ids),
                        truncated=not completion.finished,
                    )
                )
            verdicts.append(row)
        return verdicts

    return judge


def metric_names(num_samples: int) -> list[str]:
    """What :func:`evaluate` gives with so many samples."""
    sampled = [f"mean@{num_samples}", *(f"pass@{k}" for k in _ks(num_samples))] if num_samples > 1 else []
    return [
        f"eval/{n}" for n in ["greedy_accuracy", *sampled, "format", "lenient_accuracy", "mean_length", "truncated"]
    ]


def _ks(num_samples: int) -> list[int]:
    """Powers of two, and all samples."""
    return [k for k in range(1, num_samples + 1) if k == num_samples or k & (k - 1) == 0]


def evaluate(
    policy,
    problems: Sequence[Problem],
    judge: Judge,
    world: World,
    *,
    num_samples: int,
    temperature: float,
    max_completion_length: int,
    stop: tuple[str, ...] = (),
    tokens_in_flight: int | None = None,
    seed: int,
    step: int = 0,
    on_problems: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Greedy accuracy, and mean@k and pass@k from ``num_samples`` samples, over all problems and all ranks.

    Rank r takes problems r, r + size, ...; every problem is counted exactly once, whatever the world size. Sums, not
    averages, travel between ranks.

    Returns:
        ``eval/...`` metrics; rates in [0, 1], lengths in tokens. Format, lenient accuracy, length and truncation are over the
        samples if there are any, else over the greedy completions.

    Raises:
        Exception: what the judge raises, on all ranks together.
    """
    mine = problems[world.rank :: world.size]
    greedy = Sampling(1, max_completion_length, temperature=0.0, stop=stop, tokens_in_flight=tokens_in_flight)
    sampled = Sampling(
        num_samples, max_completion_length, temperature=temperature, stop=stop, tokens_in_flight=tokens_in_flight
    )
    passes = [("greedy", greedy)] + [("samples", sampled)] * (num_samples > 1)
    counts = torch.zeros(num_samples + 6, dtype=torch.long)
    error: BaseException | None = None
    try:
        with world.local_work():
            for name, sampling in passes:
                n = max(ROWS_PER_WAVE // sampling.num_generations, 1)
                # Problems of like prompt length share a wave; the order of counting does not matter.
                ordered = sorted(mine, key=lambda problem: len(problem.prompt_ids))
                for start in range(0, len(ordered), n):
                    part = ordered[start : start + n]
                    groups = generate(policy, part, sampling, address=(seed, f"evaluation/{name}", step))
                    counts += _count(judge(groups), name, num_samples)
                    if on_problems is not None:
                        on_problems(len(part))
    except (Exception, Interrupted) as caught:  # on one rank only perhaps: voted on, then raised on all
        error = caught
    world.raise_together(error)
    greedy_correct, *by_correct, formatted, lenient, length, truncated = world.sum(counts).tolist()
    N = len(problems)
    completions = N * num_samples
    metrics = {"eval/greedy_accuracy": greedy_correct / N}
    if num_samples > 1:
        metrics[f"eval/mean@{num_samples}"] = sum(c * n for c, n in enumerate(by_correct)) / completions
        for k in _ks(num_samples):
            passed = sum(n * pass_at_k(num_samples, c, k) for c, n in enumerate(by_correct))
            metrics[f"eval/pass@{k}"] = passed / N
    return metrics | {
        "eval/format": formatted / completions,
        "eval/lenient_accuracy": lenient / completions,
        "eval/mean_length": length / completions,
        "eval/truncated": truncated / completions,
    }


def _count(verdicts: list[list[Verdict]], name: str, num_samples: int) -> torch.Tensor:
    """Integers, so that any order of adding up gives the same: greedy correct; problems with 0, 1, ..., ``num_samples`` correct
    samples; completions with right format, leniently correct, their tokens, truncated."""
    counts = torch.zeros(num_samples + 6, dtype=torch.long)
    for row in verdicts:
        correct = sum(verdict.correct for verdict in row)
        counts[0 if name == "greedy" else 1 + correct] += correct if name == "greedy" else 1
        if name == "samples" or num_samples == 1:
            for place, what in enumerate(("formatted", "lenient", "length", "truncated"), start=num_samples + 2):
                counts[place] += sum(getattr(verdict, what) for verdict in row)
    return counts
