"""Whole runs with turns: the same on 1, 2 and 3 ranks, killed and continued with the same bits,
shown everywhere."""

import contextlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_trainer, small_run
from harness import assert_same_run
from outputs import lines, weights

from grpo.commands import chat, report
from grpo.distributed.world import World
from grpo.rewards import RewardResult
from grpo.run.rollouts import add_outcome
from grpo.system import UserError
from grpo.telemetry.accumulator import Accumulator
from grpo.telemetry.samples import read_samples
from train_grpo import main

USER = Path(__file__).parent / "user_tools.py"


def arguments(model, output, *more):
    return [
        *small_run(model, output),
        f"environment={USER}:Slow",
        "reward.functions=[]",
        "reward.num_workers=2",
        "rollout.max_completion_length=90",
        "data.max_eval_samples=3",
        "eval.num_samples=2",
        "eval.temperature=1.0",
        "logging.log_completions=1000",
        "optim.max_steps=3",
        "checkpoint.save_steps=1",
        "checkpoint.keep=9",
        *more,
    ]


class Runs(dict):
    """Number of ranks -> the folder of a run on so many, which is trained when it is first asked
    for."""

    def __init__(self, folder, model):
        super().__init__()
        self.folder = folder
        self.model = model

    def __missing__(self, ranks):
        self[ranks] = self.folder / str(ranks)
        words = arguments(self.model, self[ranks])
        if ranks == 1:
            assert main(words) == 0
        else:
            run_trainer(*words, ranks=ranks)
        return self[ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, random_model):
    return Runs(tmp_path_factory.mktemp("turns"), random_model)


def samples_of(output, step):
    return read_samples(output / "completions" / f"step_{step:06d}.parquet")


def sampled(output):
    """All that was sampled, as a set: a run writes the samples of its first rank."""
    found = set()
    for step in (1, 2, 3):
        for row in samples_of(output, step):
            place = (step, row["problem"], row["completion"])
            tokens = (tuple(row["token_ids"]), tuple(row["sampled"] or ()))
            found.add((place, row["stop_reason"], row["reward"], tokens))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_same_conversations_and_weights_on_any_number_of_ranks(runs, ranks):
    assert sampled(runs[ranks]) <= sampled(runs[1])
    assert len(sampled(runs[ranks])) >= 72 // ranks - 8
    for one, many in zip(lines(runs[1]), lines(runs[ranks]), strict=True):
        for name in one.keys() - {"sampling/logprob_difference", "loss", "grad_norm"}:
            assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), (
                f"{name} at step {one['step']}"
            )
    found = weights(runs[ranks] / "checkpoint-3")
    for name, expected in weights(runs[1] / "checkpoint-3").items():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=2e-4)


def test_metrics_of_turns_by_hand(runs):
    """Those of the first step, counted from its completions."""
    rows = samples_of(runs[1], 1)
    line = next(line for line in lines(runs[1]) if line["step"] == 1)
    sampled_lengths = []
    num_tokens = 0
    num_turns = 0
    for row in rows:
        mask = row["sampled"] or [True] * len(row["token_ids"])
        sampled_lengths.append(sum(mask))
        num_tokens += len(mask)
        roles = [message["role"] for message in json.loads(row["messages"])]
        num_turns += roles.count("assistant")
        has_logprob = [value is not None for value in row["logprobs"]]
        assert has_logprob == mask
    mean_length = sum(sampled_lengths) / len(rows)
    assert line["completions/mean_length"] == pytest.approx(mean_length)
    # Also over several ranks.
    for run in runs.values():
        of_run = next(line for line in lines(run) if line["step"] == 1)
        assert of_run["completions/min_length"] == min(sampled_lengths)
        assert of_run["completions/max_length"] == max(sampled_lengths)
    assert line["completions/total_length"] == pytest.approx(num_tokens / len(rows))
    assert line["turns/mean"] == pytest.approx(num_turns / len(rows))
    assert num_turns > len(rows)
    for kind in ("length", "environment"):
        share = sum(row["stop_reason"] == kind for row in rows) / len(rows)
        assert share > 0
        assert line[f"stop_reason/{kind}"] == pytest.approx(share)


def test_killed_and_continued_with_the_same_bits(tmp_path, runs, random_model):
    """Although the environment answers after random times."""
    copy = tmp_path / "run"
    shutil.copytree(runs[1], copy)
    for number in (2, 3):
        shutil.rmtree(copy / f"checkpoint-{number}")
    text = (copy / "config.yaml").read_text().replace(str(runs[1]), str(copy))
    (copy / "config.yaml").write_text(text)
    assert main(arguments(random_model, copy)) == 0
    assert_same_run(runs[1], copy, 3)


def test_what_a_person_sees(runs, random_model, capsys, tmp_path):
    """The report has the masked tokens, chat and debug have the conversation with its roles."""
    assert report.main([str(runs[1]), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert '"sampled":[' in page and '"stop_reason":"length"' in page
    capsys.readouterr()
    assert (
        chat.main(["--model", str(runs[1] / "checkpoint-3"), "--prompt", "1+1=", "--samples", "2"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "[user] ok" in printed
    assert "of them not the model's" in printed
    debug = ["--debug", "eval.before_training=false", "data.max_eval_samples=1"]
    assert main([*arguments(random_model, tmp_path / "debug"), *debug]) == 0
    assert "[user] ok" in capsys.readouterr().out


def test_a_run_stops_where_every_step_of_an_environment_fails(random_model, tmp_path):
    """Although completions that are cut before they act have a reward."""
    changes = [
        f"environment={USER}:Breaking",
        "eval.before_training=false",
        "optim.max_steps=20",
    ]
    done = run_trainer(*arguments(random_model, tmp_path, *changes), check=False)
    before_failure, _, _ = USER.read_text().partition('["no such key"]')
    line = 1 + before_failure.count("\n")
    failure = f": KeyError: 'no such key', File \"{USER}\", line {line}"
    assert done.returncode
    assert "Traceback" not in done.stderr
    (number,) = re.findall(r"all (\d+) environments of this step have failed, ", done.stderr)
    assert 0 < int(number) < 24
    # With what the method was called: an action and a seed.
    assert "have failed, first with step '" in done.stderr and failure in done.stderr
    assert "completions have failed, first with step '" in done.stdout and failure in done.stdout


@pytest.mark.parametrize(("num_cut", "stops"), [(12, False), (11, True)])
def test_a_few_environments_that_fail_stop_no_run(num_cut, stops):
    """A game may raise at an odd action, and where most completions are cut, few have acted."""
    result = RewardResult(["game"], 24)
    result.environment_failures = ["no such move"] * (24 - num_cut)
    world = World(0, 1, torch.device("cpu"))
    expected = (
        pytest.raises(UserError, match="first with no such move")
        if stops
        else contextlib.nullcontext()
    )
    with expected:
        add_outcome(Accumulator(), result, world, is_checked=True)


@pytest.mark.slow
def test_a_chat_with_a_run_whose_environment_makes_the_prompts(
    random_model, tmp_path, monkeypatch, capsys
):
    changes = [
        "data.dataset=none",
        "data.max_train_samples=6",
        "optim.max_steps=1",
        "eval.before_training=false",
    ]
    run_trainer(*arguments(random_model, tmp_path, *changes))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert chat.main(["--model", str(tmp_path / "checkpoint-1")]) == 0
    assert "[assistant]" in capsys.readouterr().out
