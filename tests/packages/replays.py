"""A training with an environment of a package, and its saved conversations played again by hand.

``begin(row)`` of a test calls the package itself: it returns the prompt, and a function that takes
the text of a turn and returns the observation, the reward and whether the game has ended.
"""

import json
import random
from pathlib import Path

import numpy
import pytest
from conftest import DEFAULTS, save_random_model
from outputs import metrics_of

from grpo.algorithm.seeding import derive_seed
from grpo.data.tiny import build_tokenizer
from grpo.telemetry.samples import read_samples
from train_grpo import main

GROUP = 2
"""Completions of a problem."""
MAX_TURNS = 5
ROOM = 1800
"""Bound of a prompt, and of a conversation, in tokens. Most tokens are single characters."""
TWO_STEPS = (
    "eval.before_training=false",
    "optim.learning_rate=1e-3",
    "optim.max_steps=2",
    "logging.log_completions=1000",
    "runtime.precision=fp32",
    "runtime.threads_per_rank=1",
)
"""Settings of a run of two steps, large ones, of which every completion is saved."""


def train(folder: Path, environment: str, *settings: str) -> Path:
    """The folder of a run of two steps, with a greedy evaluation behind them.

    ``settings``: of the run, besides those below. The prompts are those of the environment.
    """
    model = save_random_model(folder / "model", max_position_embeddings=2 * ROOM)
    output = folder / "run"
    arguments = [
        DEFAULTS,
        f"output_dir={output}",
        f"model.name_or_path={model}",
        f"environment={environment}",
        "data.dataset=none",
        f"data.max_prompt_length={ROOM}",
        "data.max_train_samples=4",
        "data.max_eval_samples=2",
        "reward.functions=[]",
        "reward.num_workers=2",
        "rollout.prompts_per_step=2",
        f"rollout.num_generations={GROUP}",
        f"rollout.max_completion_length={ROOM}",
        f"rollout.max_turns={MAX_TURNS}",
        *TWO_STEPS,
        *settings,
    ]
    assert main(arguments) == 0
    return output


def reset_seed(problem: int) -> int:
    """The seed that ``reset`` gets for a problem of a run without a dataset."""
    return derive_seed(0, "environment/train", problem) % 2**31


def replay(output: Path, begin) -> list[dict]:
    """Play each saved conversation again. Returns the saved rows."""
    rows = []
    for step in (1, 2):
        of_step = read_samples(output / "completions" / f"step_{step:06d}.parquet")
        assert len(of_step) == 2 * GROUP
        for position, row in enumerate(of_step):
            _replay(row, position % GROUP, begin)
        rows += of_step
    return rows


def _replay(row: dict, number: int, begin) -> None:
    """Play one conversation again. ``number``: of its completion among those of the problem."""
    (name,) = row["rewards"]
    own_seed = derive_seed(0, "rollout", row["step"] - 1, row["problem"], number)
    prompt, step = begin(row)
    assert row["prompt"] == prompt

    messages = json.loads(row["messages"])
    turns = _turns(row)
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    assert said == [text for text, _, _ in turns]
    observations = [message["content"] for message in messages if message["role"] != "assistant"]
    rewards = []
    has_ended = False
    for count, (action, answer, is_finished) in enumerate(turns, 1):
        assert not has_ended
        if not is_finished:  # no environment gets a turn that was cut
            break
        seed = derive_seed(own_seed, "tool", count)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        observation, reward, has_ended = step(action)
        if reward is not None:
            rewards.append(reward)
        if answer is not None:
            assert answer == observation == observations.pop(0)
    assert not observations
    expected = (
        "environment"
        if has_ended
        else ("max_turns" if is_finished and count == MAX_TURNS else "length")
    )
    assert row["stop_reason"] == expected
    assert row["rewards"][name] == pytest.approx(sum(rewards), abs=1e-6)


def _turns(row: dict) -> list[tuple[str, str | None, bool]]:
    """The turns in the tokens of a completion: text, answer, and whether the turn was ended.

    Only tokens of answers are masked, and they are those that the chat template writes.
    """
    tokenizer = build_tokenizer()
    mask = row["sampled"] or [True] * len(row["token_ids"])
    parts = []
    for token, is_sampled in zip(row["token_ids"], mask, strict=True):
        if not parts or parts[-1][0] != is_sampled:
            parts.append((is_sampled, []))
        parts[-1][1].append(token)
    turns = []
    for is_sampled, ids in parts:
        text = tokenizer.decode(ids)
        if is_sampled:
            is_finished = ids[-1] == tokenizer.eos_token_id
            silent = (tokenizer.eos_token_id, tokenizer.pad_token_id)
            said = tokenizer.decode([id for id in ids if id not in silent])
            turns.append([said, None, is_finished])
        else:
            before = "\n<|im_start|>user\n"
            after = "<|im_end|>\n<|im_start|>assistant\n"
            assert text.startswith(before)
            assert text.endswith(after)
            turns[-1][1] = text.removeprefix(before).removesuffix(after)
    return [tuple(turn) for turn in turns]


def check_metrics(output: Path, name: str) -> None:
    """The steps learned from the environment's reward, and the greedy evaluation has it."""
    lines = metrics_of(output)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if f"eval/rewards/{name}" in line]
    assert len(steps) == 2
    assert len(evaluations) == 1
    assert all(
        line["frac_unscorable"] == 0.0 and line["stop_reason/failed"] == 0.0 for line in steps
    )
    assert all(line["turns/mean"] > 1 for line in steps)
    assert any(line["grad_norm"] > 0 for line in steps)
