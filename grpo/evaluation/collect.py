"""Sample, judge, and bring together what the ranks found, so that no number depends on how many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo.batch import Problem
from grpo.distributed import Interrupted, World
from grpo.evaluation.estimate import Estimate, estimates
from grpo.evaluation.verdict import Judge, Verdict
from grpo.rollout import BuiltinEngine, SamplingParams

ROWS_PER_WAVE = 256
"""Completions decoded at once in an evaluation."""


@dataclass
class Answers:
    """What one problem was answered with."""

    problem: Problem
    greedy: list[Verdict]
    """One."""
    samples: list[Verdict]
    """``num_samples``, or none if that is 1."""
    greedy_texts: list[str]
    """Empty unless the texts were asked for."""
    sample_texts: list[str]


@dataclass(frozen=True)
class Evaluation:
    """All problems in order, the same on every rank, and the numbers that follow from them."""

    answers: list[Answers]
    estimates: dict[str, Estimate]

    @property
    def metrics(self) -> dict[str, float]:
        """``eval/...``; rates in [0, 1], lengths in tokens, rewards as they were given."""
        return {f"eval/{name}": estimate.value for name, estimate in self.estimates.items()}

    @property
    def num_unscored(self) -> int:
        """Completions that the correctness reward could not score; they count as wrong."""
        return sum(not verdict.scored for a in self.answers for verdict in (*a.greedy, *a.samples))


def evaluate(
    engine: BuiltinEngine,
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
    keep_texts: bool = False,
    on_problems: Callable[[int], None] | None = None,
) -> Evaluation:
    """Answer every problem greedily, and with ``num_samples`` samples if that is more than 1.

    Rank r takes problems r, r + size, ...; every problem is counted exactly once, whatever the world size. Verdicts travel
    between ranks, not averages.

    Raises:
        Exception: what the judge raises, on all ranks together.
    """
    places = list(range(len(problems)))[world.rank :: world.size]
    mine = {place: Answers(problems[place], [], [], [], []) for place in places}
    options = dict(stop=stop, tokens_in_flight=tokens_in_flight)
    passes = [("greedy", SamplingParams(1, max_completion_length, temperature=0.0, **options))]
    if num_samples > 1:
        passes.append(
            ("samples", SamplingParams(num_samples, max_completion_length, temperature=temperature, **options))
        )
    error: BaseException | None = None
    try:
        with world.local_work():
            for name, sampling in passes:
                n = max(ROWS_PER_WAVE // sampling.num_generations, 1)
                # Problems of like prompt length share a wave; the order of counting does not matter.
                ordered = sorted(places, key=lambda place: len(problems[place].prompt_ids))
                for start in range(0, len(ordered), n):
                    part = ordered[start : start + n]
                    groups = engine.generate(
                        [problems[p] for p in part], sampling, address=(seed, f"evaluation/{name}", step)
                    )
                    for place, group, verdicts in zip(part, groups, judge(groups), strict=True):
                        texts = [completion.text for completion in group.completions] if keep_texts else []
                        if name == "greedy":
                            mine[place].greedy, mine[place].greedy_texts = verdicts, texts
                        else:
                            mine[place].samples, mine[place].sample_texts = verdicts, texts
                    if on_problems is not None:
                        on_problems(len(part))
    except (Exception, Interrupted) as caught:  # on one rank only perhaps: voted on, then raised on all
        error = caught
    world.raise_together(error)
    found = [(p, a.greedy, a.samples, a.greedy_texts, a.sample_texts) for p, a in mine.items()]
    everything = {place: rest for share in world.gather_objects(found) for place, *rest in share}
    answers = [Answers(problem, *everything[place]) for place, problem in enumerate(problems)]
    greedy = [a.greedy[0] for a in answers]
    return Evaluation(answers, estimates(greedy, [a.samples for a in answers] if num_samples > 1 else []))
