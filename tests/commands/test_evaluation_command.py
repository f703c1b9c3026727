"""``python -m grpo.evaluation`` on 1, 2 and 3 ranks, for two models, and its refusals.

``tests/documents/test_commands.py`` starts it as a person does, also with torchrun.
"""

import datetime
import json
import subprocess

import pytest
from conftest import ROOT, environment_of_runs, run_forked, run_trainer, small_run

from grpo.algorithm.batch import Problem
from grpo.commands.evaluation import write_json
from grpo.config import Config
from grpo.evaluation.collect import Evaluation, ProblemResult
from grpo.evaluation.estimate import CompletionResult


def run_evaluation(*arguments: str, ranks: int = 1, check: bool = True) -> subprocess.CompletedProcess:
    words = ["grpo.evaluation", *arguments, "runtime.threads_per_rank=1"]
    script = ROOT / "tests" / "module.py"
    done = run_forked(script, words, ranks=ranks, timeout=240, env=environment_of_runs())
    if check and done.returncode:
        raise AssertionError(f"exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done


def test_an_answer_that_json_does_not_have_is_written_as_text(tmp_path):
    result = CompletionResult(correct=True, formatted=True, lenient=False, length=1, truncated=False)
    problem = Problem(0, "q", (1,), {"answer": {"bytes": b"7", "day": datetime.date(2024, 5, 6)}})
    evaluation = Evaluation([ProblemResult(problem, result, [])], {})
    write_json(Config(), ["model"], [evaluation], tmp_path / "evaluation.json")
    (model,) = json.loads((tmp_path / "evaluation.json").read_text())["models"]
    assert model["problems"][0]["answer"] == {"bytes": "b'7'", "day": "2024-05-06"}


SAMPLES = ["eval.num_samples=3", "eval.temperature=1.0", "eval.top_p=0.99", "eval.max_completion_length=10", "seed=5"]


def evaluated(model, output, ranks: int) -> bytes:
    run_evaluation(f"--model={model}", f"--output={output}", *small_run(model, output.parent), *SAMPLES, ranks=ranks)
    return output.read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory, random_model) -> bytes:
    return evaluated(random_model, tmp_path_factory.mktemp("evaluation") / "1.json", 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_file_to_the_last_byte(tmp_path, random_model, alone, ranks):
    """13 problems: uneven shares. Every text, result and digit is the same."""
    assert evaluated(random_model, tmp_path / "many.json", ranks) == alone


@pytest.mark.slow
def test_the_file_holds_every_completion_and_its_numbers_follow_from_them(alone):
    (model,) = json.loads(alone)["models"]
    assert model["num_problems"] == len(model["problems"]) == 13
    greedy = [problem["greedy"][0] for problem in model["problems"]]
    samples = [problem["samples"] for problem in model["problems"]]
    assert [len(row) for row in samples] == [3] * 13
    metrics = model["metrics"]
    assert {f"eval/pass@{k}" for k in (1, 2, 3)} <= set(metrics)
    for name, rows in (("eval/truncated", [c for row in samples for c in row]), ("eval/greedy_truncated", greedy)):
        assert metrics[name]["count"] == sum(c["truncated"] for c in rows)
        assert metrics[name]["of"] == len(rows)
        assert metrics[name]["value"] == metrics[name]["count"] / metrics[name]["of"]
    correct = [sum(c["correct"] for c in row) for row in samples]
    assert metrics["eval/mean@3"]["count"] == sum(correct)
    assert metrics["eval/pass@3"]["value"] == pytest.approx(sum(c > 0 for c in correct) / 13)
    values = [c["rewards"]["share_of_digits"] for row in samples for c in row]
    assert metrics["eval/rewards/share_of_digits"]["value"] == pytest.approx(sum(values) / 39)
    assert len({c["completion"] for row in samples for c in row}) > 10
    assert all(m["low"] <= m["value"] <= m["high"] for m in metrics.values())


@pytest.mark.slow
def test_the_training_loop_finds_the_same_numbers(tmp_path, random_model, alone):
    run_trainer(*small_run(random_model, tmp_path), *SAMPLES, "optim.max_steps=1")
    before, _ = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    found = json.loads(alone)["models"][0]["metrics"]
    assert {name: m["value"] for name, m in found.items()} == {k: v for k, v in before.items() if k != "step"}
    done = run_evaluation(
        f"--model={random_model}", f"--model={tmp_path}/checkpoint-1", *small_run(random_model, tmp_path), *SAMPLES
    )
    assert "before" in done.stdout and "after" in done.stdout and "95% interval" in done.stdout
    both = json.loads((tmp_path / "evaluation.json").read_text())["models"]
    assert [m["model"] for m in both] == [str(random_model), f"{tmp_path}/checkpoint-1"]
    assert both[0]["metrics"] == found
    # The checkpoint's run has all of these settings, also where it lies now.
    moved = (tmp_path / "checkpoint-1").rename(tmp_path / "elsewhere")
    done = run_evaluation(f"--model={moved}")
    assert f"config    {moved}/trainer/state.json, of the run; --config FILE or " in done.stdout
    assert json.loads((moved / "evaluation.json").read_text())["models"][0]["metrics"] == both[1]["metrics"]


@pytest.mark.slow
def test_user_errors_are_one_line(tmp_path, random_model):
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    for changes, message in (
        ([f"data.dataset={tmp_path}/d.jsonl"], "the configuration names no evaluation data"),
        (["eval.format=shape"], "eval.format=shape: no such reward"),
        (["--model=nowhere/at/all"], "nowhere/at/all cannot be loaded"),
        ([f"--output={tmp_path}/d.jsonl/e.json"], f"File exists: '{tmp_path}/d.jsonl'"),
        ([f"--output={tmp_path}"], f"--output {tmp_path} cannot be written"),
    ):
        done = run_evaluation(*small_run(random_model, tmp_path), *changes, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and message in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_reward_that_never_works_gives_no_accuracy(tmp_path, random_model):
    broken = f"reward.functions=[{{name: '{ROOT}/tests/rewards_for_tests.py:raises'}}]"
    done = run_evaluation(*small_run(random_model, tmp_path), broken, ranks=2, check=False)
    assert done.returncode != 0
    assert "RuntimeError: this reward is broken" in done.stderr
    assert done.stderr.count("error: the reward that decides what is correct could score none of 13 completions") == 1
    assert not (tmp_path / "evaluation.json").exists()
