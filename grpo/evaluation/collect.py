"""Sample and grade all problems, and gather the results of all ranks: no metric depends on their number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo.algorithm.batch import Group, Problem
from grpo.config import Config
from grpo.distributed import World
from grpo.evaluation.estimate import CompletionResult, Estimate, estimates
from grpo.model import check_context
from grpo.rollout import Engine, SamplingParams

Grade = Callable[[Sequence[Group]], list[list[CompletionResult]]]


@dataclass(frozen=True)
class ProblemResult:
    """The evaluation results of one problem."""

    problem: Problem
    greedy: CompletionResult
    samples: list[CompletionResult]
    """Empty with greedy decoding only."""


@dataclass(frozen=True)
class Evaluation:
    """The results of all problems, in their order and the same on every rank, and the metrics computed from them."""

    problems: list[ProblemResult]
    estimates: dict[str, Estimate]

    @property
    def metrics(self) -> dict[str, float]:
        """``eval/...``: rates, lengths in tokens, rewards without their weights."""
        return {f"eval/{name}": estimate.value for name, estimate in self.estimates.items()}

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% interval ``(low, high)`` of each of :attr:`metrics`."""
        return {f"eval/{name}": (estimate.low, estimate.high) for name, estimate in self.estimates.items()}

    @property
    def completions(self) -> list[CompletionResult]:
        """The results of all completions, greedy ones and samples."""
        return [result for p in self.problems for result in (p.greedy, *p.samples)]

    @property
    def num_unscored(self) -> int:
        """Completions that the correctness reward could not score. They count as wrong."""
        return sum(not result.scored for result in self.completions)


def eval_sampling(config: Config) -> SamplingParams:
    """The settings of the sampled completions of an evaluation; at temperature 0 there is only the greedy one."""
    e, r = config.eval, config.rollout
    longest = e.max_completion_length or r.max_completion_length
    filters = e.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
    return SamplingParams(e.num_samples, longest, **filters, stop=tuple(r.stop), tokens_in_flight=r.tokens_in_flight)


def check_eval_context(config: Config, path: str, problems: Sequence[Problem]) -> None:
    """``ValueError``, before weights are loaded, if a prompt and its completion exceed the model's context."""
    key = "rollout.max_completion_length" if config.eval.max_completion_length is None else "eval.max_completion_length"
    longest, trust = eval_sampling(config).max_completion_length, config.model.trust_remote_code
    check_context(path, problems, longest, key=key, trust_remote_code=trust)


def evaluate(
    engine: Engine, problems: Sequence[Problem], grade: Grade, world: World, sampling: SamplingParams, *,
    seed: int, step: int = 0, keep_texts: bool = False, on_problems: Callable[[int], None] | None = None,
) -> Evaluation:  # fmt: skip
    """Evaluate a greedy completion of every problem and, if the temperature of ``sampling`` is above 0, its samples.

    Rank r evaluates problems r, r + size, ... . Ranks exchange the results of single completions, not averages, so the
    metrics are exact for any number of ranks. An error of ``grade`` on any rank is raised on all ranks.
    ``on_problems`` is called with a number of problems after each sampler call.
    """
    own_indices = range(world.rank, len(problems), world.size)
    by_length = sorted(own_indices, key=lambda index: len(problems[index].prompt_ids))  # less padding

    def results_of(name: str, sampling: SamplingParams) -> dict[int, list[CompletionResult]]:
        results: dict[int, list[CompletionResult]] = {}
        num_problems = max(engine.rows_per_call // sampling.num_generations, 1)
        for start in range(0, len(by_length), num_problems):
            part = by_length[start : start + num_problems]
            groups = engine.generate([problems[p] for p in part], sampling, seed_key=(seed, f"evaluation/{name}", step))
            for index, row in zip(part, grade(groups), strict=True):
                results[index] = row if keep_texts else [replace(result, text=None) for result in row]
            if on_problems is not None:
                on_problems(len(part))
        return results

    with world.fail_together(), world.interruptible():
        unfiltered = replace(sampling, num_generations=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        greedy = results_of("greedy", unfiltered)
        samples = {} if sampling.is_greedy else results_of("samples", sampling)
    own = {index: (greedy[index][0], samples.get(index, [])) for index in own_indices}
    gathered = dict(item for share in world.gather_objects(own) for item in share.items())
    results = [ProblemResult(problem, *gathered[index]) for index, problem in enumerate(problems)]
    metrics = estimates([r.greedy for r in results], [] if sampling.is_greedy else [r.samples for r in results])
    return Evaluation(results, metrics)
