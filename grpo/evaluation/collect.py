"""Sample and grade all problems, and gather the results of all ranks: no metric depends on their
number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo.algorithm.batch import Group, Problem
from grpo.config import Config
from grpo.distributed import World
from grpo.evaluation.estimate import CompletionResult, Estimate, estimates
from grpo.model import check_context
from grpo.rollout import Engine, SamplingParams


@dataclass(frozen=True)
class ProblemResult:
    """The evaluation results of one problem."""

    problem: Problem
    greedy: CompletionResult
    samples: list[CompletionResult]
    """Empty with greedy decoding only."""


@dataclass(frozen=True)
class Evaluation:
    """The results of all problems, in their order and the same on every rank, and the metrics
    computed from them."""

    problems: list[ProblemResult]
    estimates: dict[str, Estimate]

    @property
    def metrics(self) -> dict[str, float]:
        """``eval/...``: rates, lengths in tokens, rewards without their weights."""
        return {name: estimate.value for name, estimate in self.estimates.items()}

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% interval ``(low, high)`` of each of :attr:`metrics`."""
        return {name: (estimate.low, estimate.high) for name, estimate in self.estimates.items()}

    @property
    def completions(self) -> list[CompletionResult]:
        """The results of all completions, greedy ones and samples."""
        results = []
        for problem in self.problems:
            results += [problem.greedy, *problem.samples]
        return results

    @property
    def num_unscored(self) -> int:
        """Completions that the correctness reward could not score. They count as wrong."""
        return sum(not result.scored for result in self.completions)


def eval_sampling(config: Config) -> SamplingParams:
    """The settings of the sampled completions of an evaluation; at temperature 0 there is only the
    greedy one."""
    settings = config.eval
    rollout = config.rollout
    return SamplingParams(
        num_generations=settings.num_samples,
        max_completion_length=settings.max_completion_length or rollout.max_completion_length,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=tuple(rollout.stop),
        tokens_in_flight=rollout.tokens_in_flight,
    )


def check_eval_context(config: Config, path: str, problems: Sequence[Problem]) -> None:
    """``ValueError``, before weights are loaded, if a prompt and its completion exceed the model's
    context."""
    check_context(
        path,
        problems,
        eval_sampling(config).max_completion_length,
        key="eval.max_completion_length",
        trust_remote_code=config.model.trust_remote_code,
    )


def evaluate(
    engine: Engine,
    problems: Sequence[Problem],
    grade: Callable[[Sequence[Group]], list[list[CompletionResult]]],
    world: World,
    sampling: SamplingParams,
    *,
    seed: int,
    on_problems: Callable[[int], object] = lambda count: None,
) -> Evaluation:
    """Evaluate a greedy completion of every problem and, if the temperature of ``sampling`` is
    above 0, its samples.

    Rank r evaluates problems r, r + size, ... . Ranks exchange the results of single completions,
    not averages, so the metrics are exact for any number of ranks. An error of ``grade`` on any
    rank is raised on all ranks. ``on_problems`` is called with a number of problems after each
    sampler call."""
    own_indices = range(world.rank, len(problems), world.size)
    # Problems of about the same length together have less padding.
    by_length = sorted(own_indices, key=lambda index: len(problems[index].prompt_ids))
    rounds = {
        "greedy": replace(
            sampling,
            num_generations=1,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
        )
    }
    if not sampling.is_greedy:
        rounds["samples"] = sampling

    local_rows = {index: [] for index in own_indices}
    with world.fail_together(), world.interruptible():
        for name, settings in rounds.items():
            num_problems = max(engine.rows_per_call // settings.num_generations, 1)
            for start in range(0, len(by_length), num_problems):
                part = by_length[start : start + num_problems]
                chosen = [problems[index] for index in part]
                groups = engine.generate(chosen, settings, seed_key=(seed, f"evaluation/{name}", 0))
                for index, row in zip(part, grade(groups), strict=True):
                    local_rows[index] += row
                on_problems(len(part))

    gathered = {}
    for of_rank in world.gather_objects(local_rows):
        gathered |= of_rank
    results = []
    for index, problem in enumerate(problems):
        greedy, *samples = gathered[index]
        results.append(ProblemResult(problem, greedy, samples))
    all_greedy = [result.greedy for result in results]
    all_samples = [result.samples for result in results]
    return Evaluation(results, estimates(all_greedy, all_samples))
