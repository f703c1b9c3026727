"""A class and a reward in the form of TRL's examples run unchanged here and under TRL, with
OpenEnv's real server.

A step has 8 completions, and the server takes 8 sessions.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment_of_runs

pytest.importorskip("openenv", reason="needs OpenEnv: pip install -e '.[environments]'")
from openenv_game import running_server
from speaking import check_tokens, save_speaking_model
from transformers import AutoTokenizer

from grpo import train
from grpo.telemetry.samples import read_samples

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The module of the forms, with a server, a model, and a folder for what the runs write."""
    folder = tmp_path_factory.mktemp("forms")
    with running_server(8, folder / "sessions") as address:
        os.environ["GAME_URL"] = address
        import trl_forms

        trl_forms.folder = folder
        save_speaking_model(folder / "model", trl_forms.PHRASES)
        yield trl_forms
    del os.environ["GAME_URL"], sys.modules["trl_forms"]


def num_sessions(forms):
    return len((forms.folder / "sessions").read_text().splitlines())


def train_here(forms, name, **more):
    """The metrics of the steps of a run in the folder ``name``, and the number of sessions that it
    opened."""
    os.environ["STATES"] = str(forms.folder / f"{name}.jsonl")
    settings = {
        "output_dir": forms.folder / name,
        "model.name_or_path": forms.folder / "model",
        "data.max_prompt_length": 800,
        "rollout.prompts_per_step": forms.SLOTS // forms.GENERATIONS,
        "rollout.num_generations": forms.GENERATIONS,
        "rollout.max_completion_length": forms.MAX_LENGTH,
        "reward.num_workers": 1,
        "algorithm.beta": 0.0,
        "optim.learning_rate": forms.LEARNING_RATE,
        "optim.max_steps": forms.STEPS,
        "logging.log_completions": 1000,
        "runtime.precision": "fp32",
        "runtime.threads_per_rank": 1,
    }
    before = num_sessions(forms)
    result = train(
        settings | more,
        environment_factory=forms.WordEnv,
        reward_functions=[forms.reward_func, forms.write_state],
        dataset=forms.ROWS,
        eval_dataset=forms.ROWS[:3],
    )
    steps = [line for line in result.metrics if "loss" in line]
    return steps, num_sessions(forms) - before


def conversations(path):
    """The conversations of a file, and the state of the environment at the end of each."""
    found = {}
    for line in path.read_text().splitlines():
        prompt, completion, state = json.loads(line)
        # A conversation that ends with calls was cut before their results.
        if "tool_calls" not in completion[-1]:
            found[key_of(prompt, completion)] = state
    return found


def key_of(prompt, completion):
    """A conversation as text. TRL takes the calls out of the model's text, where they stay here."""
    messages = []
    for message in completion:
        messages.append(message | {"content": ""} if "tool_calls" in message else message)
    return json.dumps([prompt, messages], sort_keys=True)


def replay(forms, conversation):
    """The environment after the calls of a conversation. Its results must be those that the model
    has read."""
    prompt, completion = json.loads(conversation)
    environment = forms.WordEnv()
    said = environment.reset()
    assert prompt[-1]["content"] == forms.ROWS[0]["prompt"][-1]["content"] + said
    calls = []
    for message in completion:
        if message["role"] == "assistant":
            assert not calls
            calls = [call["function"] for call in message.get("tool_calls", ())]
            continue
        call = calls.pop(0)
        try:
            result = getattr(environment, call["name"])(**call["arguments"])
        except (ValueError, TypeError) as error:
            result = {"error": str(error)}
            # Python's message names the class, which has another name in the run.
            if isinstance(error, TypeError):
                assert "unexpected keyword argument" in message["content"]
                continue
        assert message["content"] == str(result)
    return environment


def assert_states(forms, found):
    """The rewards got the environment of each conversation, in the state at its end."""
    assert len(found) > 8
    for conversation, state in found.items():
        environment = replay(forms, conversation)
        assert state == forms.plain_state(environment)
        environment.client.close()


def test_a_form_trains_with_as_many_sessions_as_completions(forms):
    """Ten steps, evaluations, and substitutes for equal groups: 8 sessions, and the server is never
    full."""
    more = {"optim.max_steps": 10, "algorithm.dynamic_sampling": True, "eval.every": 5}
    steps, sessions = train_here(forms, "long", **more)
    assert sessions == 8
    assert len(steps) == 10
    assert sum(step["grad_norm"] > 0 for step in steps) > 5
    for step in steps:
        assert step["stop_reason/failed"] == 0
        assert step["rewards/reward_func/errors"] == 0
    found = conversations(forms.folder / "long.jsonl")
    assert_states(forms, found)
    tokenizer = AutoTokenizer.from_pretrained(forms.folder / "model")
    for file in sorted((forms.folder / "long" / "completions").glob("step_*.parquet")):
        for row in read_samples(file):
            check_tokens(row, tokenizer)
            key = key_of(json.loads(row["prompt"]), json.loads(row["messages"]))
            if key in found:
                assert row["rewards"]["reward_func"] == pytest.approx(found[key]["reward"])


@pytest.mark.slow
def test_a_form_trains_here_and_under_trl(forms):
    """The same class, rewards, model and server; a conversation leaves the same state in both."""
    pytest.importorskip("trl", reason="needs TRL: pip install -e '.[bench]'")
    steps, sessions = train_here(forms, "here")
    assert sessions == 8
    assert all(step["stop_reason/failed"] == 0 for step in steps)

    before = num_sessions(forms)
    states = forms.folder / "trl.jsonl"
    environment = environment_of_runs({"TRL_EXPERIMENTAL_SILENCE": "1", "STATES": str(states)})
    command = [sys.executable, str(HERE / "trl_forms.py"), str(forms.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert num_sessions(forms) - before == 8
    log = json.loads((forms.folder / "trl.json").read_text())
    steps_of_trl = [line for line in log if "loss" in line]
    for lines in (steps, steps_of_trl):
        assert len(lines) == forms.STEPS
        assert sum(line["grad_norm"] > 0 for line in lines) > 2
        assert len({line["reward"] for line in lines}) > 2

    here = conversations(forms.folder / "here.jsonl")
    there = conversations(states)
    assert_states(forms, here)
    assert_states(forms, there)
    shared = here.keys() & there.keys()
    assert any('"role": "tool"' in conversation for conversation in shared)
    assert all(here[conversation] == there[conversation] for conversation in shared)
