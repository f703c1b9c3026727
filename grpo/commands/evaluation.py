r"""Evaluate models with the configuration of a run, outside training.

    python -m grpo.evaluation --model runs/X/checkpoint-150
    python -m grpo.evaluation --model runs/X/checkpoint-150 rollout.engine=vllm
    python -m grpo.evaluation --model BEFORE --model runs/X/checkpoint-150 eval.num_samples=16
    torchrun --nproc_per_node=8 -m grpo.evaluation --config X.yaml --model FOLDER

Data, prompts, rewards, seed and the section `eval` come from the configuration. With the built-in
engine, the completions are the same as in the evaluations of the training loop. Without --config,
the configuration of the run that wrote the checkpoint is used. With several models, this is the run
of the first model that has one. If no model has a run, the defaults are used.

If the configuration evaluates by greedy decoding alone, the command also draws 8 samples of each
problem at the temperature of training, for mean@8 and pass@8. eval.temperature=0 draws none.

The command prints each metric with its 95% interval and count, says whether GRPO can begin with the
model, and writes every problem with its completions and their results to OUTPUT_DIR/evaluation.json
(or --output).
"""

import contextlib
import json
import os
from pathlib import Path
from statistics import fmean

from grpo.commands.command import command_parser
from grpo.commands.models import BUILTIN_ENGINE, find_tokenizer, load_engine
from grpo.config import Config, config_of_models
from grpo.data import Rows, load_rows, make_problems
from grpo.distributed import OtherRankFailed, World, start_world
from grpo.evaluation.collect import Evaluation, check_eval_context, eval_sampling, evaluate
from grpo.evaluation.grading import Grader, correctness_note
from grpo.rewards import RewardRunner
from grpo.rollout import engine_with_weights, split_stop
from grpo.run.prepare import check_rewards, open_rewards
from grpo.system import ignore_broken_pipes, write_atomically
from grpo.telemetry.console import FORM_METRICS
from grpo.telemetry.records import json_safe
from grpo.telemetry.terminal import exit_with_user_error
from grpo.turns.tools import Tools


def main(argv: list[str]) -> int:
    ignore_broken_pipes()
    parser = command_parser("evaluation", __doc__)
    parser.add_argument(
        "--model", action="append", default=[], help="folder or Hub id; can be repeated"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON file to write")
    options, overrides = parser.parse_known_args(argv)
    # This function has no decorator `@command`: under torchrun a mistake is printed once, and not
    # by each rank.
    world = None
    try:
        settings = [*BUILTIN_ENGINE, *overrides]
        config, run_file = config_of_models(options.model, options.config, settings)
        is_asked_for = "eval.temperature" in " ".join(overrides)
        if config.eval.temperature == 0 and not is_asked_for:
            settings = [
                f"eval.temperature={config.rollout.temperature}",
                "eval.num_samples=8",
                *settings,
            ]
            config, run_file = config_of_models(options.model, options.config, settings)
        world = start_world(config.runtime)
        if run_file and world.is_main:
            print(
                f"config    {run_file}, of the run; --config FILE or section.key=value changes it"
            )
        if not options.model and world.is_main:
            print("note: this evaluates the model that training starts from; --model names another")
        output = options.output or Path(config.output_dir) / "evaluation.json"
        models = options.model or [config.model.name_or_path]
        run(config, models, output, world)
    except (ValueError, OSError, OtherRankFailed) as error:
        return exit_with_user_error(error, world)
    world.shutdown()
    return 0


def run(config: Config, models: list[str], output: Path, world: World) -> list[Evaluation]:
    """Evaluate each model on all ranks. The main rank prints the results and writes the file.

    Raises:
        ValueError: on all ranks, if the configuration, the data or the output cannot be used.
    """
    with contextlib.ExitStack() as at_end:
        # Everything that can be checked without a model is checked first: an evaluation may take
        # hours, and must not fail when it writes its results.
        with world.fail_together():
            tools, rewards = open_rewards(config, at_end)
            rows = load_rows(
                config.data,
                train=False,
                seed=config.seed,
                has_environment=bool(config.environment),
            )
            if rows is None:
                raise ValueError(
                    "the configuration names no evaluation data: "
                    "set data.eval_split or data.eval_dataset"
                )
            check_rewards(config, rewards, rows)
            output.parent.mkdir(parents=True, exist_ok=True)
            if output.is_dir() or not os.access(output.parent, os.W_OK):
                raise ValueError(f"--output {output} cannot be written")
        # One model after the other, so that only one is in memory.
        evaluations = [_evaluate(config, model, rows, rewards, world, tools) for model in models]

    if world.is_main:
        for model, evaluation in zip(models, evaluations, strict=True):
            print_report(model, evaluation)
        if note := correctness_note(config.eval, rewards.names):
            print(note)
        write_json(config, models, evaluations, output)
        print(f"written   {output}")
    return evaluations


def _evaluate(
    config: Config,
    model: str,
    rows: Rows,
    rewards: RewardRunner,
    world: World,
    tools: Tools,
) -> Evaluation:
    """Evaluate one model, on all ranks."""
    # One rank downloads or builds the model, and the others read it from the cache.
    with world.main_first():
        path, tokenizer = find_tokenizer(config, model)
    with world.fail_together():
        split_stop(tokenizer, config.rollout.stop)  # refuses strings that could never match
        # The prompts depend on the tokenizer and the chat template of the model.
        problem_set = make_problems(rows, config.data, tokenizer, schemas=tools.schemas)
        problems = problem_set.problems[: config.eval.max_samples]
        check_eval_context(config, path, problems)
    if world.is_main:
        # The counts are part of the result: an evaluation of fewer problems is another benchmark.
        print(
            f"data      {rows.source}: {len(problems)} problems; "
            f"left out: {problem_set.num_too_long} too long, {problem_set.num_empty} without text"
        )
        for note in problem_set.notes:
            print(note)

    sampling = eval_sampling(config)
    max_row_length = config.data.max_prompt_length + sampling.max_completion_length
    engine = load_engine(config, world, path, tokenizer, tools, max_row_length)
    with contextlib.closing(engine), engine_with_weights(engine, world):
        return evaluate(
            engine,
            problems,
            Grader(config.eval, rewards),
            world,
            sampling,
            seed=config.seed,
        )


def print_report(model: str, evaluation: Evaluation) -> None:
    """Print each metric of a model with its 95% interval and its exact count. A form
    that no completion has is left out."""
    print(f"model     {model}\n{'':28}{'value':>10}  {'95% interval':>20}  {'count':>15}")
    for name, estimate in evaluation.estimates.items():
        if name.replace("greedy_", "") in FORM_METRICS and not estimate.value > 0:
            continue
        interval = f"{estimate.low:.4g} to {estimate.high:.4g}"
        count = "" if estimate.count is None else f"{estimate.count}/{estimate.of}"
        print(f"{name:28}{estimate.value:>10.4g}  {interval:>20}  {count:>15}".rstrip())
    if evaluation.num_unscored:
        print(
            f"note: {evaluation.num_unscored} completions have no value of the reward that decides "
            "what is correct (eval.correctness), and count as wrong"
        )
    print_outlook(evaluation)


def print_outlook(evaluation: Evaluation) -> None:
    """Print whether GRPO can begin with a model, if the evaluation has groups of samples."""
    num_samples = len(evaluation.problems[0].samples)
    if num_samples < 2:
        return
    metrics = evaluation.metrics
    pass_rate = metrics[f"eval/pass@{num_samples}"]
    # A group teaches if its rewards differ.
    share = fmean(
        len({str(sample.rewards) for sample in problem.samples}) > 1
        for problem in evaluation.problems
    )
    outlook = f"GRPO can begin, as the rewards of {share:.0%} of the groups differ: these teach"
    # The limits are rules of thumb: docs/small_model.md.
    if share < 0.05:
        outlook = (
            "few groups will differ. Examples in the prompt, easier problems or SFT first: "
            "docs/small_model.md (if completions in the JSON file look right, mend the reward)"
        )
        if metrics[f"eval/mean@{num_samples}"] > 0.95:
            outlook = (
                "few groups will differ, because most are right throughout: take harder problems"
            )
    print(f"pass@{num_samples} is {pass_rate:.1%}: {outlook}")


def write_json(
    config: Config,
    models: list[str],
    evaluations: list[Evaluation],
    output: Path,
) -> None:
    """Write the configuration and, for each model, all metrics and the results of every problem."""
    content = {"config": config.masked_values(), "models": []}
    for model, evaluation in zip(models, evaluations, strict=True):
        metrics = {name: vars(estimate) for name, estimate in evaluation.estimates.items()}
        problems = []
        for result in evaluation.problems:
            problem = {
                "prompt": result.problem.prompt,
                "answer": result.problem.columns.get("answer"),
                "greedy": vars(result.greedy),
                "samples": [vars(sample) for sample in result.samples],
            }
            problems.append(problem)
        content["models"].append({"model": model, "metrics": metrics, "problems": problems})
    # Values that JSON does not have, such as bytes and dates, are written as text: the column of
    # answers may hold them if only the user's rewards read it.
    text = json.dumps(json_safe(content, default=str), ensure_ascii=False, indent=1)
    write_atomically(output, text + "\n")
