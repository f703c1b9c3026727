"""Evaluate models by the configuration of a run, apart from training.

    python -m grpo.evaluation --config X.yaml --model FOLDER [--model ANOTHER] [--output FILE.json] [section.key=value ...]
    torchrun --nproc_per_node=8 -m grpo.evaluation --config X.yaml --model FOLDER

Data, prompt, rewards, seed and the section `eval` are the configuration's; the completions are those that the training loop's
evaluation would draw. Prints each metric with its 95% interval and count; writes every problem, completion and verdict to
OUTPUT_DIR/evaluation.json (or --output). Several models are evaluated in turn and compared, the first as "before", the last as "after".
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo.batch import Problem
from grpo.config import Config, load_config
from grpo.data import Rows, load_rows, make_problems
from grpo.distributed import WORLD_KEYS, RanksDisagree, World, start_world
from grpo.evaluation.collect import Answers, Evaluation, evaluate
from grpo.evaluation.estimate import LEVEL, Estimate
from grpo.evaluation.verdict import Verdict, check_names, judge_of
from grpo.logprobs import CompletionScorer
from grpo.model import check_context, load_policy, load_tokenizer, resolve_model
from grpo.rewards import RewardRunner
from grpo.rollout import BuiltinEngine
from grpo.telemetry.console import evaluation_form, evaluation_table
from grpo.telemetry.metrics import json_safe
from grpo.telemetry.user_errors import refuse

METHOD = (
    "the unit is the problem; rates: Wilson's interval at the effective number of observations p(1-p)/se^2, se over problems; "
    "means: mean +- 1.96 se over problems"
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.evaluation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", action="append", help="folder or Hub id; may be given again; none: the configuration's"
    )
    parser.add_argument("--output", type=Path, help="the JSON file")
    options, rest = parser.parse_known_args(argv)
    world = None
    try:
        config = load_config(rest)
        world = start_world(**config.runtime.model_dump(include=WORLD_KEYS))
        output = options.output or Path(config.output_dir) / "evaluation.json"
        run(config, options.model or [config.model.name_or_path], output, world)
    except (ValueError, OSError, RanksDisagree) as mistake:  # what a user can mend
        return refuse(mistake, world)
    world.shutdown()
    return 0


def run(config: Config, models: list[str], output: Path, world: World) -> list[Evaluation]:
    """Evaluate each model on all ranks; the main rank prints and writes."""
    with RewardRunner(
        config.reward.functions,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers,
        device=world.device,
    ) as rewards:
        rows = world.together(lambda: _checked_rows(config, rewards))
        world.together(lambda: _check_writable(output) if world.is_main else None)
        evaluations = [_evaluate(config, model, rows, rewards, world) for model in models]
    if world.is_main:
        for model, evaluation in zip(models, evaluations, strict=True):
            print("\n".join(report(config, model, evaluation)), flush=True)
        if len(evaluations) > 1:
            print(evaluation_table(evaluations[0].metrics, evaluations[-1].metrics))
        write_json(config, models, evaluations, output)
        print(f"written   {output}", flush=True)
    return evaluations


def _checked_rows(config: Config, rewards: RewardRunner) -> Rows:
    rows = load_rows(config.data, train=False, seed=config.seed)
    if rows is None:
        raise ValueError("the configuration names no evaluation data: set data.eval_split or data.eval_dataset")
    rewards.check({"answer", *rows.columns[0]} if config.data.answer_column else set(rows.columns[0]))
    check_names(config, rewards.names)
    return rows


def _check_writable(output: Path) -> None:
    """Now, and not after the last completion."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
        if output.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error.strerror}") from None


def _evaluate(config: Config, model: str, rows: Rows, rewards: RewardRunner, world: World) -> Evaluation:
    with world.main_first():
        path = resolve_model(model, config.data.dataset, trust_remote_code=config.model.trust_remote_code)
    engine, problems = world.together(lambda: _loaded(config, path, rows, world))
    passes = 1 + (config.eval.num_samples > 1)
    total = len(problems[world.rank :: world.size]) * passes
    shown = world.is_main and sys.stderr.isatty()
    with tqdm(total=total, desc=model, unit="problem", leave=False, disable=not shown) as bar:
        evaluation = evaluate(
            engine,
            problems,
            judge_of(config, rewards),
            world,
            num_samples=config.eval.num_samples,
            temperature=config.eval.temperature,
            max_completion_length=config.rollout.max_completion_length,
            stop=tuple(config.rollout.stop),
            tokens_in_flight=config.rollout.tokens_in_flight,
            seed=config.seed,
            keep_texts=True,
            on_problems=bar.update,
        )
    completions = sum(len(a.greedy) + len(a.samples) for a in evaluation.answers)
    if evaluation.num_unscored == completions:
        raise ValueError(
            f"the reward that decides what is correct could score none of {completions} completions: there is no accuracy to report"
        )
    return evaluation


def _loaded(config: Config, path: str, rows: Rows, world: World) -> tuple[BuiltinEngine, list[Problem]]:
    trust = config.model.trust_remote_code
    tokenizer = load_tokenizer(path, trust_remote_code=trust)
    found = make_problems(rows, config.data, tokenizer)
    left_out = found.num_too_long + found.num_empty
    if left_out and world.is_main:
        longest = config.data.max_prompt_length
        print(
            f"note: {left_out} problems are left out: their prompts are longer than {longest} tokens, or empty",
            flush=True,
        )
    problems = found.problems[: config.eval.max_samples]
    check_context(path, problems, config.rollout.max_completion_length, trust_remote_code=trust)
    settings = config.model.model_dump(exclude={"name_or_path"})
    policy = load_policy(path, tokenizer, device=world.device, precision=config.runtime.precision, **settings)
    if config.runtime.packed:  # as the run does: the same kernels, so the same tokens
        CompletionScorer(policy.model).pack_groups()
    return BuiltinEngine(policy, fast_decode=config.runtime.fast_decode), problems


def report(config: Config, model: str, evaluation: Evaluation) -> Iterator[str]:
    """The metrics of one model, one a line: value, interval, count."""
    n, e = len(evaluation.answers), config.eval
    samples = f" and {e.num_samples} samples at temperature {e.temperature:g}" if e.num_samples > 1 else ""
    yield f"model     {model}"
    yield f"data      {config.data.eval_dataset or config.data.dataset}: {n} problems, greedy{samples}"
    yield f"{'':28}{'value':>10}  {f'{LEVEL:.0%} interval':>20}  {'count':>15}"
    for name, estimate in evaluation.estimates.items():
        form = evaluation_form(f"eval/{name}")
        value, low, high = (form.format(x) for x in (estimate.value, estimate.low, estimate.high))
        count = "" if estimate.count is None else f"{estimate.count}/{estimate.of}"
        yield f"{name.replace('_', ' '):28}{value:>10}  {f'{low} to {high}':>20}  {count:>15}".rstrip()
    if evaluation.num_unscored:
        yield f"note: {evaluation.num_unscored} completions could not be scored and count as wrong"


def write_json(config: Config, models: list[str], evaluations: list[Evaluation], output: Path) -> None:
    """One file, whole or not at all."""
    sections = config.model_dump(mode="json", include={"seed", "data", "reward", "rollout", "eval"})
    content = {
        "config": sections,
        "interval": {"level": LEVEL, "method": METHOD},
        "models": [
            {
                "model": model,
                "num_problems": len(evaluation.answers),
                "num_unscored": evaluation.num_unscored,
                "metrics": {f"eval/{name}": _estimate(e) for name, e in evaluation.estimates.items()},
                "problems": [_answers(answers) for answers in evaluation.answers],
            }
            for model, evaluation in zip(models, evaluations, strict=True)
        ],
    }
    temporary = output.with_name(output.name + ".tmp")
    temporary.write_text(json.dumps(json_safe(content), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, output)


def _estimate(estimate: Estimate) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(estimate).items() if value is not None}


def _answers(answers: Answers) -> dict[str, Any]:
    problem = answers.problem
    return {
        "problem": problem.index,
        "prompt": problem.prompt,
        "answer": problem.columns.get("answer"),
        "greedy": _completions(answers.greedy_texts, answers.greedy),
        "samples": _completions(answers.sample_texts, answers.samples),
    }


def _completions(texts: list[str], verdicts: list[Verdict]) -> list[dict[str, Any]]:
    return [{"completion": text, **dataclasses.asdict(verdict)} for text, verdict in zip(texts, verdicts, strict=True)]
