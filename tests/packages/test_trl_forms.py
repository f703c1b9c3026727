"""Classes and rewards in the form of TRL's examples run unchanged here and under TRL, with OpenEnv's real server.

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
NAMES = ["wordle", "multi"]


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The module of the forms, with a server, and a folder for what the runs write."""
    folder = tmp_path_factory.mktemp("forms")
    with running_server(8, folder / "sessions") as address:
        os.environ["GAME_URL"] = address
        import trl_forms

        trl_forms.folder = folder
        yield trl_forms
    del os.environ["GAME_URL"], sys.modules["trl_forms"]


@pytest.fixture(scope="module")
def under_trl(forms):
    """The number of sessions that TRL's runs of all forms opened."""
    pytest.importorskip("trl", reason="needs TRL: pip install -e '.[bench]'")
    for name in NAMES:
        model_of(forms, name)
    before = num_sessions(forms)
    environment = environment_of_runs({"TRL_EXPERIMENTAL_SILENCE": "1"})
    command = [sys.executable, str(HERE / "trl_forms.py"), str(forms.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return num_sessions(forms) - before


def model_of(forms, name):
    folder = forms.folder / name / "model"
    if not folder.exists():
        save_speaking_model(folder, forms.FORMS[name].phrases)
    return folder


def num_sessions(forms):
    return len((forms.folder / "sessions").read_text().splitlines())


def train_here(forms, name, folder="run", **more):
    """The metrics of the steps of a run, and the number of sessions that it opened."""
    form = forms.FORMS[name]
    model = model_of(forms, name)
    os.environ["STATES"] = str(forms.folder / name / "here.jsonl")
    Path(os.environ["STATES"]).unlink(missing_ok=True)
    settings = {
        "output_dir": forms.folder / name / folder,
        "model.name_or_path": model,
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
        environment_factory=form.environment,
        reward_functions=[*form.rewards, forms.write_state],
        dataset=form.rows,
        eval_dataset=form.rows[:3],
    )
    return [line for line in result.metrics if "loss" in line], num_sessions(forms) - before


def conversations(path):
    """The conversations of a file, and the state of the environment at the end of each."""
    found = {}
    for line in path.read_text().splitlines():
        prompt, completion, state, columns = json.loads(line)
        # A conversation that ends with calls was cut before their results.
        if "tool_calls" not in completion[-1]:
            found[key_of(prompt, completion, columns)] = state
    return found


def key_of(prompt, completion, columns):
    """A conversation as text. TRL takes the calls out of the model's text, where they stay here."""
    messages = []
    for message in completion:
        messages.append(message | {"content": ""} if "tool_calls" in message else message)
    return json.dumps([prompt, messages, columns], sort_keys=True)


def replay(forms, name, conversation):
    """The environment after the calls of a conversation. Its results must be those that the model has read."""
    prompt, completion, columns = json.loads(conversation)
    form = forms.FORMS[name]
    environment = form.environment()
    row = next(row for row in form.rows if columns.items() <= row.items())
    said = environment.reset(**row)
    assert prompt[-1]["content"] == row["prompt"][-1]["content"] + (said or "")
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


def assert_states(forms, name, found):
    """The rewards got the environment of each conversation, in the state at its end."""
    assert len(found) > 8
    for conversation, state in found.items():
        environment = replay(forms, name, conversation)
        assert state == {key: value for key, value in vars(environment).items() if forms.is_plain(value)}
        client = getattr(environment, "client", None) or environment._client
        client.close()


def test_a_form_trains_with_as_many_sessions_as_completions(forms):
    """Ten steps, evaluations, and substitutes for equal groups: 8 sessions, and the server is never full."""
    steps, sessions = train_here(
        forms,
        "wordle",
        "long",
        **{"optim.max_steps": 10, "algorithm.dynamic_sampling": True, "eval.every": 5},
    )
    assert sessions == 8
    assert all(step["stop_reason/failed"] == 0 and step["rewards/reward_func/errors"] == 0 for step in steps)
    assert len(steps) == 10 and sum(step["grad_norm"] > 0 for step in steps) > 5
    found = conversations(forms.folder / "wordle" / "here.jsonl")
    assert_states(forms, "wordle", found)
    tokenizer = AutoTokenizer.from_pretrained(forms.folder / "wordle" / "model")
    for file in sorted((forms.folder / "wordle" / "long" / "completions").glob("step_*.parquet")):
        for row in read_samples(file):
            check_tokens(row, tokenizer)
            key = key_of(json.loads(row["prompt"]), json.loads(row["messages"]), {})
            if key in found:
                assert row["rewards"]["reward_func"] == pytest.approx(found[key]["reward"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_form_trains_here_and_under_trl(forms, under_trl, name):
    """The same class, rewards, model and server; a conversation leaves the same state in both."""
    steps, sessions = train_here(forms, name)
    log = [line for line in json.loads((forms.folder / name / "trl.json").read_text()) if "loss" in line]
    assert len(steps) == len(log) == forms.STEPS
    for lines in (steps, log):
        assert sum(line["grad_norm"] > 0 for line in lines) > 2
        assert len({line["reward"] for line in lines}) > 2
    assert all(step["stop_reason/failed"] == 0 for step in steps)
    # `multi` opens one for each completion, also of the two evaluations.
    assert sessions == (6 * 8 + 2 * 3 if name == "multi" else 8)

    here = conversations(forms.folder / name / "here.jsonl")
    there = conversations(forms.folder / name / "trl.jsonl")
    assert_states(forms, name, here)
    assert_states(forms, name, there)
    shared = here.keys() & there.keys()
    assert any('"role": "tool"' in conversation for conversation in shared)
    assert all(here[conversation] == there[conversation] for conversation in shared)


@pytest.mark.slow
def test_trl_opens_as_many_sessions(under_trl):
    assert under_trl == 8 + 6 * 8
