"""The conversations of TRL 1.16's ``environment_factory``, recorded: the same tokens make
the same ids, masks, messages and rewards here, with the same class unchanged."""

import json
from pathlib import Path

import pytest
from conftest import load
from test_conversations import Scripted
from trl_tokenizer import build_tokenizer

from grpo.config import load_config
from grpo.data import Rows, make_problems
from grpo.rollout import SamplingParams
from grpo.turns.engine import TurnsEngine
from grpo.turns.tools import Tools

HERE = Path(__file__).parent


CONTINUED = (
    "broken JSON",
    "a good call, then broken JSON",
    "a call without a name",
    "a list for a call",
)
"""Cases that TRL ends at a call that it cannot read. Here the model reads what is wrong with it."""
DIFFERENT = dict.fromkeys(CONTINUED, ("completion_ids", "mask", "messages")) | {
    # TRL reads the number in a string where the schema wants a number.
    "integer as a string": ("completion_ids", "mask", "messages", "reward"),
    # TRL makes no call of the turn.
    "a good call, then broken JSON": ("completion_ids", "mask", "messages", "reward"),
    # TRL keeps an answer that leaves no room for a token of the model; here the completion ends
    # before it.
    "answer fits exactly": ("completion_ids", "mask", "messages"),
    # The error names the module of the class in TRL.
    "arguments in a string": ("completion_ids", "mask", "messages"),
}
"""Case -> what differs from TRL."""


def without_text(messages):
    """Messages without the text of the model: TRL takes the calls out of it, and here they stay in
    it."""
    kept = []
    for message in messages:
        is_result = message["role"] == "tool"
        kept.append(message if is_result else message.get("tool_calls", []))
    return kept


def test_the_same_tokens_make_the_same_conversation(random_model):
    recorded = json.loads((HERE / "trl_conversations.json").read_text())
    policy = load(random_model)
    records = recorded["completions"]
    policy.tokenizer = build_tokenizer()
    config = load_config([
        f"environment={HERE}/trl_environment.py:Pantry", f"rollout.max_turns={recorded['max_tool_calling_iterations'] + 1}",
        "data.dataset=rows.jsonl", "data.max_prompt_length=2000",
    ])  # fmt: skip
    tools = Tools(config).load()
    G = len(records) // 2
    T = recorded["max_completion_length"]
    of_problem = [record["row"] for record in records[::G]]
    columns = [
        {name: value for name, value in row.items() if name != "prompt"} for row in of_problem
    ]
    rows = Rows("rows", [row["prompt"] for row in of_problem], columns)
    problems = make_problems(rows, config.data, policy.tokenizer, schemas=tools.schemas).problems
    script = [record["turns"][: record["turns_sampled"]] for record in records]
    engine = TurnsEngine(Scripted(policy, script), tools, config)
    engine.check()
    try:
        groups = engine.generate(problems, SamplingParams(G, T), seed_key=(0, "rollout", 0))
    finally:
        engine.close()
    found = [(group.problem, completion) for group in groups for completion in group.completions]
    for (problem, completion), record in zip(found, records, strict=True):
        assert list(problem.prompt_ids) == record["prompt_ids"]
        ours = {
            "completion_ids": list(completion.ids),
            "mask": [*map(int, completion.loss_mask)],
            "messages": without_text(completion.messages),
            "reward": round(completion.environment_reward, 5),
        }
        theirs = record | {
            "messages": without_text(record["messages"]),
            "reward": round(record["reward"], 5),
        }
        differing = tuple(name for name in ours if ours[name] != theirs[name])
        assert differing == DIFFERENT.get(record["case"], ()), record["case"]
    calls = []
    for (_, completion), record in zip(found, records, strict=True):
        if record["case"] not in CONTINUED:
            calls += completion.calls
    assert len(calls) / len(found) == pytest.approx(recorded["metrics"]["tools/call_frequency"])
    # One more call fails here, that with an integer as a string.
    failed = (sum(bool(call.error) for call in calls) - 1) / len(calls)
    assert failed == pytest.approx(recorded["metrics"]["tools/failure_frequency"])
