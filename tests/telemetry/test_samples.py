"""The completions that a run keeps: what is written can be read back, and the log-probs are those
of the policy."""

import json
from collections import Counter

import pytest
import torch
from conftest import load, run_trainer, small_run

from grpo.algorithm.batch import Completion, Group, Problem, right_pad
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import DataConfig
from grpo.data import render
from grpo.rollout import Stops
from grpo.telemetry.samples import read_samples, sample_records, write_samples

NASTY = "zwölf\u2028</script>\x00\x1b[31m\n\u202e\ud800"


def records_of(completion: Completion, answer, prompt) -> list[dict]:
    problem = Problem(0, prompt, (1,), {"answer": answer})
    one = torch.ones(1, len(completion.ids))
    return sample_records(
        [Group(problem, [completion])],
        one[None, :, :1],
        one[:, :1],
        one[:, :1],
        names=["a/b"],
        rows=[(0, 0)],
        step=1,
        logprobs_BT=-one,
        updated_logprobs_BT=one,
        ref_logprobs_BT=None,
        decode=str,
    )


def test_records_are_read_as_they_were_written(tmp_path):
    chat = [{"role": "user", "content": "2+2"}]
    turns = Completion(
        (7, 8), NASTY, True, logged_columns={"why": NASTY, "n": 1}, loss_mask=(True, False)
    )
    records = records_of(turns, {"é": [70], "bytes": b"7"}, chat)
    write_samples(tmp_path / "a.parquet", records)
    (row,) = read_samples(tmp_path / "a.parquet")
    assert row == records[0]
    assert row["answer"] == '{"é": [70], "bytes": "b\'7\'"}'
    assert json.loads(row["prompt"]) == chat
    nasty = NASTY.replace("\ud800", "?")  # half of a surrogate pair has no UTF-8
    assert row["completion"] == nasty and json.loads(row["logged"]) == {"why": nasty, "n": 1}
    assert row["logprobs"] == [-1.0, None] and row["ref_logprobs"] is None
    assert row["rewards"] == {"a/b": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"], "no temporary file is left"


def test_a_step_that_changes_nothing_has_ratios_of_one_also_in_bf16(tmp_path, random_model):
    """In bf16, without packing, log-probs from sampling differ from those of the loss; the file has
    the loss's."""
    run_trainer(
        *small_run(random_model, tmp_path),
        "optim.max_steps=1",
        "logging.log_completions=24",
        "runtime.precision=bf16",
        "optim.learning_rate=1e-20",
        "model.disable_dropout=false",
    )
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["sampling/logprob_difference"] > 1e-3
    for row in read_samples(tmp_path / "completions" / "step_000001.parquet"):
        assert row["updated_logprobs"] == row["logprobs"]


def test_the_log_probs_are_those_of_the_policy_before_and_after_the_step(tmp_path, random_model):
    run_trainer(
        *small_run(random_model, tmp_path / "run"),
        "optim.max_steps=1",
        "logging.log_completions=5",
        "algorithm.beta=0.1",
    )
    records = read_samples(tmp_path / "run" / "completions" / "step_000001.parquet")
    assert list(Counter(row["problem"] for row in records).values()) == [2, 2, 1]
    policies = {
        "logprobs": load(random_model),
        "updated_logprobs": load(tmp_path / "run" / "checkpoint-1"),
    }
    tokenizer = policies["logprobs"].tokenizer
    stops = Stops(policies["logprobs"], [])
    for row in records:
        assert len(row["tokens"]) == len(row["token_ids"]) == row["length"]
        assert stops.text(row["token_ids"]) == row["completion"]
        prompt_ids = tokenizer(
            render(row["prompt"], tokenizer, DataConfig()), add_special_tokens=False
        )["input_ids"]
        ids = row["token_ids"]
        mask_BT = torch.ones(1, len(ids), dtype=torch.bool)
        for column, policy in policies.items():
            with torch.no_grad():
                scored_BT, _ = CompletionScorer(policy.model)(
                    right_pad([prompt_ids + ids], 0), torch.tensor([len(prompt_ids)]), mask_BT
                )
            assert row[column] == pytest.approx(scored_BT[0].tolist(), abs=1e-4), column
        # In the first step the reference is the sampling policy.
        assert row["ref_logprobs"] == pytest.approx(row["logprobs"], abs=1e-5)
        assert row["updated_logprobs"] != pytest.approx(row["logprobs"], abs=1e-4), (
            "the step changed them"
        )
