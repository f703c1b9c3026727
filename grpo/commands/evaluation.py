"""Evaluate models with the configuration of a run, outside training.

    python -m grpo.evaluation --model runs/X/checkpoint-150
    python -m grpo.evaluation --model runs/X/checkpoint-150 --engine vllm
    python -m grpo.evaluation --model BEFORE --model runs/X/checkpoint-150 eval.num_samples=8 eval.temperature=1
    torchrun --nproc_per_node=8 -m grpo.evaluation --config X.yaml --model FOLDER

Data, prompts, rewards, seed and the section `eval` come from the configuration, and with the built-in engine the
completions are the same as in the evaluations of the training loop. Without --config it is the configuration of the run
that wrote the checkpoint (with several models: the first that has one), without such a run the defaults.

The command prints each metric with its 95% interval and count, and writes every problem with its completions and their
results to OUTPUT_DIR/evaluation.json (or --output). With several models, the last table compares the first ("before")
with the last ("after").
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo.commands.command import command_parser
from grpo.commands.models import add_model_options, load_engine
from grpo.config import Config, config_of_models, engine_overrides
from grpo.data import Rows, load_rows, make_problems
from grpo.distributed import OtherRankFailed, World, start_world
from grpo.evaluation.collect import Evaluation, ProblemResult, check_eval_context, eval_sampling, evaluate
from grpo.evaluation.estimate import CompletionResult
from grpo.evaluation.grading import Grader, check_reward_names, correctness_note
from grpo.evaluation.intervals import LEVEL
from grpo.model import load_tokenizer, resolve_model
from grpo.rewards import RewardRunner
from grpo.rewards.code import check_rows
from grpo.rewards.scores import messages_warning
from grpo.rollout import engine_with_weights, split_stop
from grpo.system import write_atomically
from grpo.telemetry.console import evaluation_table, evaluation_text
from grpo.telemetry.records import json_safe
from grpo.telemetry.terminal import exit_with_user_error, survive_lost_readers
from grpo.turns.tools import Tools


def main(argv: list[str]) -> int:
    survive_lost_readers()
    parser = command_parser("evaluation", __doc__)
    parser.add_argument("--model", action="append", default=[], help="folder or Hub id; can be repeated")
    add_model_options(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="the JSON file to write")
    options, overrides = parser.parse_known_args(argv)
    world = None
    try:
        overrides = [*engine_overrides(options.engine), *overrides]
        config, saved = config_of_models(options.model, options.config, overrides)
        world = start_world(config.runtime)
        if saved and world.is_main:
            print(f"config    {saved}, of the run; --config FILE or section.key=value changes it", flush=True)
        output = options.output or Path(config.output_dir) / "evaluation.json"
        run(config, options.model or [config.model.name_or_path], output, world)
    except (ValueError, OSError, OtherRankFailed) as error:
        return exit_with_user_error(error, world)
    world.shutdown()
    return 0


def run(config: Config, models: list[str], output: Path, world: World) -> list[Evaluation]:
    """Evaluate each model on all ranks. The main rank prints the results and writes the file."""
    settings = dict(timeout_s=config.reward.timeout_s, num_workers=config.reward.num_workers, device=world.device)
    with contextlib.ExitStack() as at_end:
        with world.fail_together():
            tools = Tools(config).load() if config.uses_turns else None
            specs = tools.reward_specs(config.reward.functions) if tools else config.reward.functions
        at_end.callback(tools.close if tools else lambda: None)
        rewards = at_end.enter_context(RewardRunner(specs, environments=tools, **settings))
        with world.fail_together():
            rows = load_rows(
                config.data,
                train=False,
                seed=config.seed,
                has_environment=bool(config.environment),
            )
            if rows is None:
                raise ValueError("the configuration names no evaluation data: set data.eval_split or data.eval_dataset")
            rewards.check(None if config.rollout.function else rows.columns[0], f"the rows of {rows.source}")
            has_pattern = config.data.answer_pattern is not None
            check_rows(rewards.specs, rows.columns, rows.source, rows.places, has_pattern=has_pattern)
            check_reward_names(config.eval, rewards.names)
            is_replaced = output.is_file() or not output.exists()  # else it is a device or a pipe, and written into
            folder = output.parent if is_replaced else Path(config.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            if output.is_dir() or not os.access(output.resolve().parent if is_replaced else output, os.W_OK):
                raise ValueError(f"--output {output} cannot be written")
        evaluations = [_evaluate(config, model, rows, rewards, world, folder, tools) for model in models]
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


def _evaluate(
    config: Config, model: str, rows: Rows, rewards: RewardRunner, world: World, folder: Path, tools: Tools | None
) -> Evaluation:
    trust, sampling = config.model.trust_remote_code, eval_sampling(config)
    with world.main_first():
        path = resolve_model(model, config.data.dataset, trust_remote_code=trust, adapters=True)
    with world.fail_together():
        tokenizer = load_tokenizer(path, trust_remote_code=trust, chat_template=config.model.chat_template)
        split_stop(tokenizer, config.rollout.stop)  # refuses strings that could never match
        found = make_problems(rows, config.data, tokenizer, schemas_of=tools and tools.schemas_of)
        problems = found.problems[: config.eval.max_samples]
        check_eval_context(config, path, problems)
    if world.is_main:
        if num_left_out := found.num_too_long + found.num_empty:
            reason = f"their prompts are longer than {config.data.max_prompt_length} tokens, or empty"
            print(f"note: {num_left_out} problems are left out: {reason}", flush=True)
        for note in found.notes:
            print(note, flush=True)
        if warning := messages_warning(config, problems):
            print(warning, flush=True)
    longest = sampling.max_completion_length
    where = dict(problems=problems, completion_length=longest, folder=folder)
    engine = load_engine(config, world, path, tokenizer, **where, tools=tools)
    total = len(problems[world.rank :: world.size]) * (1 if sampling.is_greedy else 2)
    is_hidden = not (world.is_main and sys.stderr.isatty())
    bar = tqdm(total=total, desc=model, unit="problem", leave=False, disable=is_hidden)
    with contextlib.closing(engine), bar, engine_with_weights(engine, world):
        options = dict(seed=config.seed, keep_texts=True, on_problems=bar.update)
        evaluation = evaluate(engine, problems, Grader(config.eval, rewards), world, sampling, **options)
    if evaluation.num_unscored == len(evaluation.completions):
        count = f"none of {evaluation.num_unscored} completions"
        raise ValueError(f"the reward that decides what is correct could score {count}: there is no accuracy to report")
    return evaluation


def report(
    config: Config,
    model: str,
    evaluation: Evaluation,
) -> Iterator[str]:
    """The lines about one model: each metric with its 95% interval and its exact count."""
    settings = config.eval
    t = settings.temperature
    samples = f" and {settings.num_samples} sample(s) at temperature {t:g}" if t else ""
    yield f"model     {model}"
    source = config.data.eval_dataset or config.data.dataset
    yield f"data      {source}: {len(evaluation.problems)} problems, greedy{samples}"
    title = f"{LEVEL:.0%} interval"
    yield f"{'':28}{'value':>10}  {title:>20}  {'count':>15}"
    for name, estimate in evaluation.estimates.items():
        numbers = (estimate.value, estimate.low, estimate.high)
        value, low, high = (evaluation_text(f"eval/{name}", number) for number in numbers)
        interval = "unknown" if low == "-" else f"{low} to {high}"
        count = "" if estimate.count is None else f"{estimate.count}/{estimate.of}"
        yield f"{name.replace('_', ' '):28}{value:>10}  {interval:>20}  {count:>15}".rstrip()
    if evaluation.num_unscored:
        yield f"note: {evaluation.num_unscored} completions could not be scored and count as wrong"


def write_json(config: Config, models: list[str], evaluations: list[Evaluation], output: Path) -> None:
    """Write the configuration, and per model all metrics and the results of every problem."""
    values = config.for_writing()
    method = (
        "the unit is the problem; rates: Wilson's interval at the effective number of observations p(1-p)/se^2, "
        "se over problems; means: mean +- 1.96 se over problems, null for fewer than two problems"
    )
    content = {
        "config": {name: values[name] for name in ("seed", "data", "reward", "rollout", "eval")},
        "interval": {"level": LEVEL, "method": method},
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
    # A column that only the user's own rewards read may hold what JSON does not have: bytes, dates.
    text = json.dumps(json_safe(content), ensure_ascii=False, indent=1, default=str)
    write_atomically(output, text + "\n")


def _problem_json(result: ProblemResult) -> dict[str, Any]:
    def completion(one: CompletionResult) -> dict[str, Any]:
        values = dict(vars(one))
        return {"completion": values.pop("text"), **values}

    problem = result.problem
    return {
        "problem": problem.index,
        "prompt": problem.prompt,
        "answer": problem.columns.get("answer"),
        "greedy": [completion(result.greedy)],
        "samples": list(map(completion, result.samples)),
    }
