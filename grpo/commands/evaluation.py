"""Evaluate models with the configuration of a run, outside training.

    python -m grpo.evaluation --model runs/X/checkpoint-150
    python -m grpo.evaluation --model runs/X/checkpoint-150 --engine vllm
    python -m grpo.evaluation --model BEFORE --model runs/X/checkpoint-150 eval.num_samples=8 eval.temperature=1
    torchrun --nproc_per_node=8 -m grpo.evaluation --config X.yaml --model FOLDER

Data, prompts, rewards, seed and the section `eval` come from the configuration, and with the built-in engine the completions are
the same as in the evaluations of the training loop. Without --config it is the configuration of the run that wrote the checkpoint (with several
models: the first that has one), without such a run the defaults.

The command prints each metric with its 95% interval and count, and writes every problem with its completions and their results to
OUTPUT_DIR/evaluation.json (or --output). With several models, the last table compares the first ("before") with the last ("after").
"""

import argparse
import contextlib
import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import KEYS_EPILOG, Config, EvalConfig, config_of_models, engine_overrides
from grpo.data import Rows, load_rows, make_problems
from grpo.distributed import OtherRankFailed, World, start_world
from grpo.evaluation.collect import Evaluation, ProblemResult, check_eval_context, eval_sampling, evaluate
from grpo.evaluation.estimate import CompletionResult
from grpo.evaluation.grading import Grader, check_reward_names, correctness_note
from grpo.evaluation.intervals import LEVEL
from grpo.model import Policy, load_policy, load_tokenizer, resolve_model
from grpo.rewards import RewardRunner
from grpo.rewards.code import check_rows
from grpo.rewards.scores import messages_warning
from grpo.rollout import Engine, check_sampling, sampling_weights, split_stop
from grpo.system import write_atomically
from grpo.telemetry.console import evaluation_form, evaluation_table
from grpo.telemetry.records import json_safe
from grpo.telemetry.terminal import exit_with_user_error, survive_lost_readers
from grpo.vllm import build_engine

INTERVAL_METHOD = (
    "the unit is the problem; rates: Wilson's interval at the effective number of observations p(1-p)/se^2, se over problems; "
    "means: mean +- 1.96 se over problems"
)
"""Written to the JSON file, beside the intervals."""


def main(argv: list[str]) -> int:
    survive_lost_readers()
    options, rest = _parser().parse_known_args(argv)
    models, world = options.model or [], None
    try:
        config, saved = config_of_models(models, options.config, [*engine_overrides(options.engine), *rest])
        world = start_world(config.runtime)
        if saved and world.is_main:
            print(f"config    {saved.source}, of the run; --config FILE or section.key=value changes it", flush=True)
        output = options.output or Path(config.output_dir) / "evaluation.json"
        run(config, models or [config.model.name_or_path], output, world)
    except (ValueError, OSError, OtherRankFailed) as error:
        return exit_with_user_error(error, world)
    world.shutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.evaluation", allow_abbrev=False, description=__doc__, epilog=KEYS_EPILOG,
        usage="python -m grpo.evaluation [--model MODEL ...] [--config FILE] [--engine ENGINE] [--output FILE] [section.key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model_help = "folder or Hub id; can be repeated; default: the configuration's model"
    parser.add_argument("--model", action="append", help=model_help)
    parser.add_argument("--config", metavar="FILE", help="YAML file of a run; default: that of the model's run")
    engine_help = "builtin (default, whatever the run sampled with) or vllm; short for rollout.engine=..."
    parser.add_argument("--engine", choices=("builtin", "vllm"), default="builtin", help=engine_help)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON file to write")
    return parser


def run(config: Config, models: list[str], output: Path, world: World) -> list[Evaluation]:
    """Evaluate each model on all ranks. The main rank prints the results and writes the file."""
    reward = config.reward
    settings = dict(timeout_s=reward.timeout_s, num_workers=reward.num_workers, device=world.device)
    with RewardRunner(reward.functions, **settings) as rewards:
        with world.fail_together():
            rows = _checked_rows(config, rewards)
        with world.fail_together():
            if world.is_main:
                _check_writable(output)
        evaluations = [_evaluate_model(config, model, rows, rewards, world, output) for model in models]
    if world.is_main:
        for model, evaluation in zip(models, evaluations, strict=True):
            print("\n".join(report(config, model, evaluation)), flush=True)
        if note := correctness_note(config.eval, rewards.names):
            print(note)
        if len(evaluations) > 1:
            print(evaluation_table(evaluations[0].metrics, evaluations[-1].metrics))
        write_json(config, models, evaluations, output)
        print(f"written   {output}", flush=True)
    return evaluations


def _checked_rows(config: Config, rewards: RewardRunner) -> Rows:
    rows = load_rows(config.data, train=False, seed=config.seed)
    if rows is None:
        raise ValueError("the configuration names no evaluation data: set data.eval_split or data.eval_dataset")
    rewards.check(rows.columns[0])
    check_rows(rewards.specs, rows.columns, rows.source)
    check_reward_names(config.eval, rewards.names)
    return rows


def _check_writable(output: Path) -> None:
    """Raise ``ValueError`` now, rather than after the evaluation, if the file cannot be written."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from None


def _evaluate_model(
    config: Config, model: str, rows: Rows, rewards: RewardRunner, world: World, output: Path
) -> Evaluation:
    with world.main_first():
        path = resolve_model(
            model, config.data.dataset, trust_remote_code=config.model.trust_remote_code, adapters=True
        )
    with world.fail_together():
        policy, problems = _load(config, path, rows, world)
    longest = max((len(problem.prompt_ids) for problem in problems), default=0)
    engine = build_engine(
        config,
        world,
        policy,
        path=path,
        root=policy.model,
        longest=longest + eval_sampling(config).max_completion_length,
        probe_ids=problems[0].prompt_ids if problems else (),
        folder=output.parent,
        builtin=dict(fast_decode=config.runtime.fast_decode),
    )
    with contextlib.closing(engine):
        return _evaluate(config, model, engine, problems, rewards, world)


def _evaluate(
    config: Config, model: str, engine: Engine, problems: list[Problem], rewards: RewardRunner, world: World
) -> Evaluation:
    if world.is_main and (warning := messages_warning(config, problems)):
        print(warning, flush=True)
    sampling = eval_sampling(config)
    total = len(problems[world.rank :: world.size]) * (1 if sampling.is_greedy else 2)
    show_bar = world.is_main and sys.stderr.isatty()
    with tqdm(total=total, desc=model, unit="problem", leave=False, disable=not show_bar) as bar:
        grade, options = Grader(config.eval, rewards), dict(seed=config.seed, keep_texts=True, on_problems=bar.update)
        with sampling_weights(engine, world):
            evaluation = evaluate(engine, problems, grade, world, sampling, **options)
    num_completions = len(evaluation.completions)
    if evaluation.num_unscored == num_completions:
        count = f"none of {num_completions} completions"
        raise ValueError(f"the reward that decides what is correct could score {count}: there is no accuracy to report")
    return evaluation


def _load(config: Config, path: str, rows: Rows, world: World) -> tuple[Policy, list[Problem]]:
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    split_stop(tokenizer, config.rollout.stop)  # refuses strings that could never match
    problem_set = make_problems(rows, config.data, tokenizer)
    num_left_out = problem_set.num_too_long + problem_set.num_empty
    if num_left_out and world.is_main:
        reason = f"their prompts are longer than {config.data.max_prompt_length} tokens, or empty"
        print(f"note: {num_left_out} problems are left out: {reason}", flush=True)
    problems = problem_set.problems[: config.eval.max_samples]
    check_eval_context(config, path, problems)
    settings = config.model.model_dump(exclude={"name_or_path", "adapter", "reference"})
    settings["base_precision"] = config.lora.base_precision
    policy = load_policy(path, tokenizer, device=world.device, precision=config.runtime.precision, **settings)
    CompletionScorer(policy.model).pack_groups()  # as in training: the same kernels, so the same tokens
    longest = max((len(problem.prompt_ids) for problem in problems), default=0)
    check_sampling(policy, reach=longest + eval_sampling(config).max_completion_length)
    return policy, problems


def _samples_line(e: EvalConfig) -> str:
    filters = (("top-p", e.top_p, 1.0), ("top-k", e.top_k, 0), ("min-p", e.min_p, 0.0))
    chosen = "".join(f", {name} {value:g}" for name, value, neutral in filters if value != neutral)
    return f"{e.num_samples} sample{'s' * (e.num_samples > 1)} at temperature {e.temperature:g}{chosen}"


def report(config: Config, model: str, evaluation: Evaluation) -> Iterator[str]:
    n, e = len(evaluation.problems), config.eval
    samples = f" and {_samples_line(e)}" if e.temperature > 0 else ""
    yield f"model     {model}"
    yield f"data      {config.data.eval_dataset or config.data.dataset}: {n} problems, greedy{samples}"
    yield f"{'':28}{'value':>10}  {f'{LEVEL:.0%} interval':>20}  {'count':>15}"
    for name, estimate in evaluation.estimates.items():
        form = evaluation_form(f"eval/{name}")
        value, low, high = (form.format(number) for number in (estimate.value, estimate.low, estimate.high))
        count = "" if estimate.count is None else f"{estimate.count}/{estimate.of}"
        yield f"{name.replace('_', ' '):28}{value:>10}  {f'{low} to {high}':>20}  {count:>15}".rstrip()
    if evaluation.num_unscored:
        yield f"note: {evaluation.num_unscored} completions could not be scored and count as wrong"


def write_json(config: Config, models: list[str], evaluations: list[Evaluation], output: Path) -> None:
    """Write the configuration, and per model all metrics and the results of every problem."""
    values = config.for_writing()
    sections = {name: values[name] for name in ("seed", "data", "reward", "rollout", "eval")}
    content = {
        "config": sections,
        "interval": {"level": LEVEL, "method": INTERVAL_METHOD},
        "models": [
            {
                "model": model,
                "num_problems": len(evaluation.problems),
                "num_unscored": evaluation.num_unscored,
                "metrics": {
                    f"eval/{name}": {key: value for key, value in vars(estimate).items() if value is not None}
                    for name, estimate in evaluation.estimates.items()
                },
                "problems": [_problem_json(result) for result in evaluation.problems],
            }
            for model, evaluation in zip(models, evaluations, strict=True)
        ],
    }
    write_atomically(output, json.dumps(json_safe(content), ensure_ascii=False, indent=1) + "\n")


def _problem_json(result: ProblemResult) -> dict[str, Any]:
    problem = result.problem
    return {
        "problem": problem.index,
        "prompt": problem.prompt,
        "answer": problem.columns.get("answer"),
        "greedy": [_completion_json(result.greedy)],
        "samples": [_completion_json(sample) for sample in result.samples],
    }


def _completion_json(result: CompletionResult) -> dict[str, Any]:
    values = dict(vars(result))
    return {"completion": values.pop("text"), **values}
