"""Whole runs with turns: the same on 1, 2 and 3 ranks, killed and continued with the same bits, shown everywhere."""

import contextlib
import io
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
    options = [f"environment={USER}:Slow", "reward.functions=[]", "rollout.max_completion_length=90"]
    options += ["logging.log_completions=1000", "eval.num_samples=2", "eval.temperature=1.0", "data.max_eval_samples=7"]
    return [
        *small_run(model, output),
        *options,
        "optim.max_steps=3",
        "checkpoint.save_steps=1",
        "checkpoint.keep=9",
        *more,
    ]


class Runs(dict):
    """Number of ranks -> the folder of a run on so many, which is trained when it is first asked for."""

    def __init__(self, folder, model):
        super().__init__()
        self.folder, self.model = folder, model

    def __missing__(self, ranks):
        self[ranks] = self.folder / str(ranks)
        run_trainer(*arguments(self.model, self[ranks]), ranks=ranks)
        return self[ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, random_model):
    return Runs(tmp_path_factory.mktemp("turns"), random_model)


def sampled(output):
    rows = [row for step in (1, 2, 3) for row in read_samples(output / "completions" / f"step_{step:06d}.parquet")]
    keys = ("step", "problem", "completion", "stop_reason", "reward")
    return {(*(row[key] for key in keys), tuple(row["token_ids"]), tuple(row["sampled"] or ())) for row in rows}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_same_conversations_and_weights_on_any_number_of_ranks(runs, ranks):
    assert sampled(runs[ranks]) <= sampled(runs[1]) and len(sampled(runs[ranks])) >= 72 // ranks - 8
    for one, many in zip(lines(runs[1]), lines(runs[ranks]), strict=True):
        for name in one.keys() - {"sampling/logprob_difference", "loss", "grad_norm"}:
            assert many[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), f"{name} at step {one['step']}"
    for name, expected in weights(runs[1] / "checkpoint-3").items():
        torch.testing.assert_close(weights(runs[ranks] / "checkpoint-3")[name], expected, rtol=1e-4, atol=2e-4)


def test_metrics_of_turns_by_hand(runs):
    """Those of the first step, counted from its completions."""
    rows = read_samples(runs[1] / "completions" / "step_000001.parquet")
    line = next(line for line in lines(runs[1]) if line["step"] == 1)
    masks = [row["sampled"] or [True] * len(row["token_ids"]) for row in rows]
    assert line["completions/mean_length"] == pytest.approx(sum(map(sum, masks)) / len(rows))
    assert line["completions/total_length"] == pytest.approx(sum(map(len, masks)) / len(rows))
    turns = [sum(message["role"] == "assistant" for message in messages_of(row)) for row in rows]
    assert line["turns/mean"] == pytest.approx(sum(turns) / len(rows)) and line["turns/mean"] > 1
    for kind in ("length", "environment"):
        share = sum(row["stop_reason"] == kind for row in rows) / len(rows)
        assert line[f"stop_reason/{kind}"] == pytest.approx(share) and share > 0
    for row, mask in zip(rows, masks, strict=True):
        assert [value is None for value in row["logprobs"]] == [not m for m in mask]


def messages_of(row):
    import json

    return json.loads(row["messages"])


@pytest.mark.parametrize("step", [1, 2])
def test_killed_and_continued_with_the_same_bits(tmp_path, runs, random_model, step):
    """Although the environment answers after random times."""
    copy = tmp_path / "run"
    shutil.copytree(runs[1], copy)
    for number in range(step + 1, 4):
        shutil.rmtree(copy / f"checkpoint-{number}")
    text = (copy / "config.yaml").read_text().replace(str(runs[1]), str(copy))
    (copy / "config.yaml").write_text(text)
    assert main(arguments(random_model, copy)) == 0
    assert_same_run(runs[1], copy, 3)


def test_what_a_person_sees(runs, random_model, capsys, tmp_path):
    """The report has the masked tokens, the chat the conversation with its roles."""
    assert report.main([str(runs[1]), "--output", str(tmp_path / "page.html")]) == 0
    assert '"sampled":[' in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert chat.main(["--model", str(runs[1] / "checkpoint-3"), "--prompt", "1+1=", "--samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert "[user] ok" in printed and "of them not the model's" in printed
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*arguments(random_model, tmp_path / "debug"), "--debug"]) == 0
    assert "[user] ok" in out.getvalue()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_stops_where_every_step_of_an_environment_fails(random_model, tmp_path, ranks):
    """Although completions that are cut before they act have a reward."""
    changes = [f"environment={USER}:Breaking", "eval.before_training=false", "optim.max_steps=20"]
    done = run_trainer(*arguments(random_model, tmp_path, *changes), ranks=ranks, check=False)
    line = next(n for n, text in enumerate(USER.read_text().splitlines(), 1) if "no such key" in text)
    failure = f"first with step: KeyError: 'no such key' File \"{USER}\", line {line}"
    assert done.returncode and "Traceback" not in done.stderr
    (number,) = set(re.findall(r"all (\d+) environments of this step have failed, ", done.stderr))
    assert 0 < int(number) < 24 and failure in done.stderr
    assert f"completions have failed, {failure}" in done.stdout


@pytest.mark.parametrize(("num_cut", "stops"), [(23, False), (13, False), (12, False), (11, True), (0, True)])
def test_a_few_environments_that_fail_stop_no_run(num_cut, stops):
    """A game may raise at an odd action, and where most completions are cut, few have acted."""
    result = RewardResult(["game"], 24)
    result.environment_failures = ["no such move"] * (24 - num_cut)
    world = World(0, 1, 0, torch.device("cpu"))
    expected = pytest.raises(UserError, match="first with no such move") if stops else contextlib.nullcontext()
    with expected:
        add_outcome(Accumulator(), result, world, is_checked=True)


@pytest.mark.slow
def test_a_chat_with_a_run_whose_environment_makes_the_prompts(random_model, tmp_path, monkeypatch, capsys):
    changes = ["data.dataset=none", "data.max_train_samples=6", "optim.max_steps=1", "eval.before_training=false"]
    run_trainer(*arguments(random_model, tmp_path, *changes))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert chat.main(["--model", str(tmp_path / "checkpoint-1")]) == 0
    assert "[assistant]" in capsys.readouterr().out
