"""``python -m grpo.evaluation`` on 1, 2 and 3 ranks, for two models, and its refusals.

``tests/documents/test_commands.py`` starts it as a person does, also with torchrun.
"""

import datetime
import json
import subprocess

import pytest
from conftest import ROOT, environment_of_runs, run_forked, run_trainer, small_run

from grpo.algorithm.batch import Problem
from grpo.commands.evaluation import main, print_outlook, write_json
from grpo.config import Config
from grpo.evaluation.collect import Evaluation, ProblemResult
from grpo.evaluation.estimate import CompletionResult, estimate_metrics

SAMPLES = [
    "eval.num_samples=3",
    "eval.temperature=1.0",
    "eval.top_p=0.99",
    "eval.max_completion_length=10",
    "seed=5",
]


def run_evaluation(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess:
    words = ["grpo.evaluation", *arguments, "runtime.threads_per_rank=1"]
    return run_forked(
        ROOT / "tests" / "module.py", words, ranks=ranks, timeout=240, env=environment_of_runs()
    )


def models_of(done: subprocess.CompletedProcess, output) -> list:
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(output.read_text())["models"]


def test_an_answer_that_json_does_not_have_is_written_as_text(tmp_path):
    answer = {"bytes": b"7", "day": datetime.date(2024, 5, 6)}
    result = ProblemResult(
        Problem(0, "q", (1,), {"answer": answer}), CompletionResult(True, True, None, 1, False), []
    )
    write_json(Config(), ["model"], [Evaluation([result], {})], tmp_path / "e.json")
    (model,) = json.loads((tmp_path / "e.json").read_text())["models"]
    assert model["problems"][0]["answer"] == {"bytes": "b'7'", "day": "2024-05-06"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.eval_split=none"], "the configuration names no evaluation data"),
        (
            ["eval.format=shape"],
            "eval.correctness and eval.format take one of share_of_digits, not {'shape'}",
        ),
        (["--model=nowhere/at/all"], "nowhere/at/all: there is no such folder"),
        (["--output=/"], "--output / cannot be written"),
        (["--engine", "vllm"], "argument '--engine' is not understood"),
    ],
)
def test_user_errors_are_one_line(tmp_path, random_model, changes, message, capsys):
    assert main([*small_run(random_model, tmp_path), *changes]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_samples_are_drawn_without_being_asked_for(tmp_path, random_model, capsys):
    """8 at the temperature of training. An evaluation of the run itself keeps its settings."""
    command = [*small_run(random_model, tmp_path), "data.max_eval_samples=2"]
    for changes, shown in (
        ([], ["eval/mean@8", "eval/pass@8", "pass@8 is 0.0%: few groups will differ. Examples"]),
        (["eval.num_samples=2"], ["eval/mean@2", "pass@2 is 0.0%"]),
        (["eval.num_samples=3", "eval.temperature=0.5"], ["eval/mean@3"]),
        (["eval.temperature=0"], []),
    ):
        assert main([*command, "reward.functions=[accuracy]", *changes]) == 0
        printed = capsys.readouterr().out
        assert all(words in printed for words in shown)
        assert ("pass@" in printed) == bool(shown)
    config = json.loads((tmp_path / "evaluation.json").read_text())["config"]
    assert config["eval"]["temperature"] == 0


@pytest.mark.parametrize(
    ("rights", "line"),
    [
        ([0] * 39 + [1], "pass@4 is 2.5%: few groups will differ. Examples in the prompt, easier"),
        ([0] * 9 + [1], "pass@4 is 10.0%: GRPO can begin, as the rewards of 10% of the groups"),
        ([4] * 9 + [2], "pass@4 is 100.0%: GRPO can begin, as the rewards of 10% of the groups"),
        ([4] * 39 + [3], "pass@4 is 100.0%: few groups will differ, because most are right"),
    ],
)
def test_the_line_that_says_whether_grpo_can_begin(rights, line, capsys):
    """Of 4 samples of each problem so many are right. Rewards count, also of wrong samples."""
    problems = []
    for num_right in rights:
        samples = []
        for i in range(4):
            right = i < num_right
            samples.append(CompletionResult(right, True, None, 1, False, {"right": float(right)}))
        problems.append(ProblemResult(Problem(0, "q", (1,), {}), samples[0], samples))
    estimates = estimate_metrics([p.greedy for p in problems], [p.samples for p in problems])
    print_outlook(Evaluation(problems, estimates))
    assert capsys.readouterr().out.startswith(line)
    # With marks below what counts as right, the rewards of all groups differ.
    for problem in problems:
        for mark, sample in enumerate(problem.samples):
            sample.rewards["mark"] = 0.1 * mark
    print_outlook(Evaluation(problems, estimates))
    assert "the rewards of 100% of the groups differ" in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_and_the_training_loop_find_the_same_numbers(tmp_path, random_model):
    """13 problems: uneven shares of 2 and 3 ranks. Every text, result and digit is the same."""
    settings = [*small_run(random_model, tmp_path), *SAMPLES]
    output = tmp_path / "evaluation.json"
    files = []
    for ranks in (1, 2, 3):
        (model,) = models_of(run_evaluation(*settings, ranks=ranks), output)
        files.append(output.read_bytes())
    assert files[1] == files[0] and files[2] == files[0]

    metrics = model["metrics"]
    rows = [problem["samples"] for problem in model["problems"]]
    assert [len(row) for row in rows] == [3] * 13
    completions = [completion for row in rows for completion in row]
    truncated = metrics["eval/truncated"]
    assert (truncated["count"], truncated["of"]) == (sum(c["truncated"] for c in completions), 39)
    assert len({c["text"] for c in completions}) > 10

    run_trainer(*settings, "optim.max_steps=1")
    before, _ = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {name: m["value"] for name, m in metrics.items()} == {
        k: v for k, v in before.items() if k != "step"
    }
    checkpoint = tmp_path / "checkpoint-1"
    done = run_evaluation(f"--model={random_model}", f"--model={checkpoint}", *settings)
    first, second = models_of(done, output)
    assert first["metrics"] == metrics and "95% interval" in done.stdout
    assert metrics["eval/format"]["value"] == 0 and "eval/format" not in done.stdout
    assert [first["model"], second["model"]] == [str(random_model), str(checkpoint)]
    # The checkpoint's run has all of these settings, also where it lies now.
    moved = checkpoint.rename(tmp_path / "elsewhere")
    done = run_evaluation(f"--model={moved}")
    assert f"config    {moved}/trainer/state.json, of the run; --config FILE or " in done.stdout
    assert models_of(done, moved / "evaluation.json")[0]["metrics"] == second["metrics"]


@pytest.mark.slow
def test_a_reward_that_never_works_gives_no_accuracy(tmp_path, random_model):
    broken = f"reward.functions=[{{name: '{ROOT}/tests/rewards_for_tests.py:raises'}}]"
    done = run_evaluation(*small_run(random_model, tmp_path), broken, "eval.temperature=0", ranks=2)
    assert done.returncode != 0
    assert "RuntimeError: this reward is broken" in done.stderr
    assert (
        done.stderr.count(
            "raises, which decides what is correct, has no value for any of 13 completions of an"
        )
        == 1
    )
    assert "Errors: {'raises': 'RuntimeError: this reward is broken'}" in done.stderr
    assert not (tmp_path / "evaluation.json").exists()
