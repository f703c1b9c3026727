"""Sample and grade completions of all problems, and gather the results of all ranks.

Ranks exchange results of single completions, not averages, so the metrics are the same for any
number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tqdm import tqdm

from grpo.algorithm.batch import Problem
from grpo.config import Config
from grpo.distributed import World
from grpo.evaluation.estimate import CompletionResult, Estimate, estimate_metrics
from grpo.evaluation.grading import Grader
from grpo.model import check_context
from grpo.rollout import Engine, SamplingParams
from grpo.system import UserError, signs_of_life


@dataclass(frozen=True)
class ProblemResult:
    """The evaluation results of one problem."""

    problem: Problem
    greedy: CompletionResult
    samples: list[CompletionResult]
    """Results of the sampled completions. Empty if the evaluation has greedy decoding only."""


@dataclass(frozen=True)
class Evaluation:
    """The results of all problems, in the order of the dataset, and the metrics computed from these
    results.

    Every rank has the same evaluation.
    """

    problems: list[ProblemResult]
    estimates: dict[str, Estimate]

    @property
    def metrics(self) -> dict[str, float]:
        """Value of each metric by name (``eval/...``): a rate, a length in tokens, or the mean of a
        reward without its weight."""
        return {name: estimate.value for name, estimate in self.estimates.items()}

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95% interval ``(low, high)`` of each metric in :attr:`metrics`."""
        return {name: (estimate.low, estimate.high) for name, estimate in self.estimates.items()}

    @property
    def completions(self) -> list[CompletionResult]:
        """The results of all completions, both greedy and sampled."""
        return [
            result for problem in self.problems for result in (problem.greedy, *problem.samples)
        ]

    @property
    def num_unscored(self) -> int:
        """Number of completions that the correctness reward could not score. An unscored completion
        counts as wrong."""
        return sum(not result.scored for result in self.completions)


def eval_sampling(config: Config) -> SamplingParams:
    """Return the sampling settings of an evaluation. At temperature 0 the evaluation has only
    greedy completions."""
    settings = config.eval
    rollout = config.rollout
    # The filters (top_p, top_k, min_p) come from the section `eval`. If they came from `rollout`,
    # runs with different filters of the rollout would have metrics that cannot be compared.
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
    """Raise ``ValueError`` if a prompt and its completion exceed the context of the model at
    ``path``.

    The check reads only the model's configuration, so it runs before any weights are loaded.
    """
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
    grade: Grader,
    world: World,
    sampling: SamplingParams,
    *,
    seed: int,
) -> Evaluation:
    """Generate and grade a greedy completion of every problem and, if the temperature of
    ``sampling`` is above 0, also sampled completions.

    Rank r evaluates problems r, r + size, and so on. An error of ``grade`` on one rank is raised on
    all ranks.

    Args:
        problems: all problems, the same on every rank.
        grade: returns the results of the completions of each group.

    Raises:
        UserError: on all ranks, before the first step or outside of training, if the reward that
            decides what is correct scored no completion.
    """
    rounds = {"greedy": replace(sampling, num_generations=1, temperature=0.0)}
    if not sampling.is_greedy:
        rounds["samples"] = sampling

    # Prompts of similar length in one call of the sampler need less padding.
    indices = range(world.rank, len(problems), world.size)
    by_length = sorted(indices, key=lambda index: len(problems[index].prompt_ids))

    # Rewards run the user's code and may fail on one rank alone. All ranks then stop here, so that
    # no rank waits in gather_objects below. The block may take minutes, so a stop signal ends it at
    # once.
    results_of_rank = {index: [] for index in indices}
    num_done = 0
    total = len(rounds) * len(indices)
    lines = signs_of_life(
        "evaluation",
        lambda: f", {num_done / total:.0%} done",
        is_shown=world.is_main,
    )
    bar = tqdm(
        desc="evaluation",
        total=total,
        leave=False,
        disable=None if world.is_main else True,  # None: shown if stderr is a terminal
    )
    with lines, bar, world.fail_together(), world.interruptible():
        for name, settings in rounds.items():
            # A call has at least one problem, even if its samples alone exceed the limit of a call.
            num_problems = max(engine.rows_per_call // settings.num_generations, 1)
            for start in range(0, len(by_length), num_problems):
                batch = by_length[start : start + num_problems]
                # The seed of every evaluation has step 0. All evaluations of a run then use the
                # same random numbers, and their metrics differ only by the weights.
                groups = engine.generate(
                    [problems[index] for index in batch],
                    settings,
                    seed_key=(seed, f"evaluation/{name}", 0),
                )
                for index, results in zip(batch, grade(groups), strict=True):
                    results_of_rank[index] += results
                bar.update(len(batch))
                num_done += len(batch)

    results_by_index = {}
    for results in world.gather_objects(results_of_rank):
        results_by_index |= results

    # The greedy round came first, so the first result of each problem is the greedy one.
    problem_results = []
    for index, problem in enumerate(problems):
        greedy, *samples = results_by_index[index]
        problem_results.append(ProblemResult(problem, greedy, samples))
    all_greedy = [result.greedy for result in problem_results]
    all_samples = [result.samples for result in problem_results]
    evaluation = Evaluation(problem_results, estimate_metrics(all_greedy, all_samples))
    # A completion without a score counts as wrong. If no completion has a score, the reward is
    # broken, and an accuracy of 0 would be taken for a result of the model. Once steps were made,
    # the reward has worked: a run goes on, with a warning.
    is_unscored = evaluation.num_unscored == len(evaluation.completions)
    if is_unscored and not grade.trainer_state.global_step:
        raise UserError(
            f"{grade.correctness}, which decides what is correct, has no value for any of "
            f"{evaluation.num_unscored} completions of an evaluation. Errors: "
            f"{grade.errors or 'none, so it returned None'}. "
            "Mend it, or let eval.correctness name another reward"
        )
    return evaluation
