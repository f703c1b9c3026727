"""Aviary's environment of GSM8K, which is in the extra ``environments``."""

import asyncio
import json

import pytest
from conftest import DEFAULTS, ROOT
from outputs import metrics_of
from replays import TWO_STEPS
from speaking import call, check_tokens, save_speaking_model
from transformers import AutoTokenizer

from grpo.telemetry.samples import read_samples
from train_grpo import main

pytest.importorskip("aviary.envs.gsm8k", reason="needs aviary: pip install -e '.[environments]'")
from aviary.core import ToolCall, ToolRequestMessage
from aviary.envs.gsm8k import CalculatorEnv

PHRASES = [
    call("calculator", expr="2+3"),
    call("calculator", expr="2+"),
    call("submit_answer", answer="5"),
    call("submit_answer", answer="1400"),
]
ROWS = [
    ("What is 2+3?", "5"),
    ("What is 700*2?", "1,400"),
    ("What is 10/2?", "5"),
    ("What is 2*700?", "1,400"),
]


async def play(problem: CalculatorEnv, messages: list[dict]) -> float:
    """The reward of a saved conversation, whose results must be those of the problem."""
    await problem.reset()
    reward = 0.0
    done = False
    calls = []
    for message in messages:
        if message["role"] == "assistant":
            calls += message.get("tool_calls", ())
            continue
        function = calls.pop(0)["function"]
        expected = str({"error": "the problem has ended"})
        if not done:
            made = ToolCall.from_name(function["name"], **function["arguments"])
            (answer,), gained, done, _ = await problem.step(ToolRequestMessage(tool_calls=[made]))
            reward += gained
            expected = answer.content
        assert message["content"] == expected
    return reward


def test_a_training_with_gsm8k_is_replayed_by_hand(tmp_path):
    model = save_speaking_model(tmp_path / "model", PHRASES)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in ROWS]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    arguments = [
        DEFAULTS,
        f"output_dir={tmp_path}/run",
        f"model.name_or_path={model}",
        f"environment={ROOT}/examples/environments.py:Gsm8k",
        f"data.dataset={tmp_path}/rows.jsonl",
        f"data.eval_dataset={tmp_path}/rows.jsonl",
        "data.answer_column=answer",
        "data.max_prompt_length=800",
        "reward.num_workers=1",
        "rollout.prompts_per_step=4",
        "rollout.num_generations=8",
        "rollout.max_completion_length=600",
        *TWO_STEPS,
    ]
    assert main(arguments) == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    rewards = set()
    for step in (1, 2):
        for row in read_samples(tmp_path / "run" / "completions" / f"step_{step:06d}.parquet"):
            check_tokens(row, tokenizer)
            question, answer = ROWS[row["problem"]]
            assert row["prompt"] == question
            if row["stop_reason"] != "stop":  # cut: the last calls have no results
                continue
            problem = CalculatorEnv(None, question, answer.replace(",", ""))
            reward = asyncio.run(play(problem, json.loads(row["messages"])))
            assert row["rewards"]["Gsm8k"] == pytest.approx(reward)
            rewards.add(reward)
    assert rewards >= {-1.0, 0.0, 1.0}
    steps = [line for line in metrics_of(tmp_path / "run") if "loss" in line]
    assert all(line["grad_norm"] > 0 and line["stop_reason/failed"] == 0 for line in steps)
    assert any("eval/rewards/Gsm8k" in line for line in metrics_of(tmp_path / "run"))
