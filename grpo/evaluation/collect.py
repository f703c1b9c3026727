"""Sample and grade all problems, and gather the results of all ranks, so that no metric depends on the number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo.algorithm.batch import Group, Problem
from grpo.config import Config
from grpo.distributed import World
from grpo.evaluation.estimate import CompletionResult, Estimate, estimates
from grpo.model import check_context
from grpo.rollout import Engine, SamplingParams

ROWS_PER_CALL = 256
"""Completions that one call of the sampler generates."""

Grade = Callable[[Sequence[Group]], list[list[CompletionResult]]]
"""Groups -> the results of each group's completions; see :class:`grpo.evaluation.grading.Grader`."""


@dataclass(frozen=True)
class ProblemResult:
    """The evaluation results of one problem."""

    problem: Problem
    greedy: CompletionResult
    samples: list[CompletionResult]
    """The results of the sampled completions; empty with greedy decoding only."""


@dataclass(frozen=True)
class Evaluation:
    """The results of all problems, in the order of the problems and the same on every rank, and the metrics computed from them."""

    problems: list[ProblemResult]
    estimates: dict[str, Estimate]

    @property
    def metrics(self) -> dict[str, float]:
        """``eval/...``: rates in [0, 1], lengths in tokens, rewards without their weights."""
        return {f"eval/{name}": estimate.value for name, estimate in self.estimates.items()}

    @property
    def completions(self) -> list[CompletionResult]:
        """The results of all completions, greedy ones and samples."""
        return [result for p in self.problems for result in (p.greedy, *p.samples)]

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% interval ``(low, high)`` of each of :attr:`metrics`."""
        return {f"eval/{name}": (estimate.low, estimate.high) for name, estimate in self.estimates.items()}

    @property
    def num_unscored(self) -> int:
        """Completions that the correctness reward could not score. They count as wrong."""
        return sum(not result.scored for result in self.completions)


def eval_sampling(config: Config) -> SamplingParams:
    """The settings of the sampled completions of an evaluation; at temperature 0 there is only the greedy one."""
    e, r = config.eval, config.rollout
    return SamplingParams(
        num_generations=e.num_samples,
        max_completion_length=e.max_completion_length or r.max_completion_length,
        temperature=e.temperature,
        top_p=e.top_p,
        top_k=e.top_k,
        min_p=e.min_p,
        stop=tuple(r.stop),
        tokens_in_flight=r.tokens_in_flight,
    )


def check_eval_context(config: Config, path: str, problems: Sequence[Problem]) -> None:
    """Raise a ``ValueError``, before weights are loaded, if a prompt and its completion in an evaluation exceed the model's context."""
    key = "rollout.max_completion_length" if config.eval.max_completion_length is None else "eval.max_completion_length"
    longest = eval_sampling(config).max_completion_length
    check_context(path, problems, longest, key=key, trust_remote_code=config.model.trust_remote_code)


def evaluate(
    engine: Engine, problems: Sequence[Problem], grade: Grade, world: World, sampling: SamplingParams, *,
    seed: int, step: int = 0, keep_texts: bool = False, on_problems: Callable[[int], None] | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluate one greedy completion of every problem and, if the temperature of ``sampling`` is above 0, its number of samples.

    Rank r evaluates problems r, r + size, ... . Ranks exchange the results of single completions, not averages, so the metrics are exact
    for any number of ranks.

    An error of ``grade`` on any rank is raised on all ranks. ``on_problems`` is called with a number of problems after each sampler call.
    """
    own_indices = range(world.rank, len(problems), world.size)
    # Problems of similar prompt length are sampled together. The order has no effect on the results.
    by_length = sorted(own_indices, key=lambda index: len(problems[index].prompt_ids))

    def results_of(name: str, sampling: SamplingParams) -> dict[int, list[CompletionResult]]:
        """Problem index -> the results of ``sampling.num_generations`` completions, for the problems of this rank."""
        results: dict[int, list[CompletionResult]] = {}
        num_problems = max(ROWS_PER_CALL // sampling.num_generations, 1)
        for start in range(0, len(by_length), num_problems):
            part = by_length[start : start + num_problems]
            groups = engine.generate([problems[p] for p in part], sampling, seed_key=(seed, f"evaluation/{name}", step))
            for index, row in zip(part, grade(groups), strict=True):
                results[index] = row if keep_texts else [replace(result, text=None) for result in row]
            if on_problems is not None:
                on_problems(len(part))
        return results

    greedy_sampling = replace(sampling, num_generations=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    samples: dict[int, list[CompletionResult]] = {}
    with world.fail_together(), world.interruptible():
        greedy = results_of("greedy", greedy_sampling)
        if not sampling.is_greedy:
            samples = results_of("samples", sampling)
    own = {index: (greedy[index][0], samples.get(index, [])) for index in own_indices}
    gathered = dict(item for share in world.gather_objects(own) for item in share.items())
    results = [ProblemResult(problem, *gathered[index]) for index, problem in enumerate(problems)]
    metrics = estimates([r.greedy for r in results], [] if sampling.is_greedy else [r.samples for r in results])
    return Evaluation(results, metrics)
