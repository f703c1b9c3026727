"""What ``load_reward`` finds, and what it says when it does not."""

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo.rewards import load_reward
from grpo.rewards.functions import BUILTIN, check_arguments, unique_names
from grpo.rewards.worker import Logged, TrainerState, call_reward


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


def test_every_builtin_loads():
    assert all(callable(load_reward(name)) for name in BUILTIN)


def test_from_a_file_with_a_neighbour(write):
    write("SCORE = 3.0\n", "neighbour_of_a_reward.py")
    path = write("""
        def three(prompts, completions, **columns):
            from neighbour_of_a_reward import SCORE
            return [SCORE for _ in completions]
    """)
    assert load_reward(f"{path}:three")(["a"], ["b"]) == [3.0]


def test_from_a_module_in_the_working_folder(write, tmp_path, monkeypatch):
    write("def one(completions, **columns): return [1.0] * len(completions)\n", "a_reward_module.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_reward("a_reward_module:one")(completions=["b"]) == [1.0]
    assert load_reward("a_reward_module.py:one")(completions=["b"]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acuracy", "unknown reward 'acuracy': built in are accuracy, format"),
        ("", "unknown reward ''"),
        ("python:mine", "'python:mine' was an object passed to grpo.train"),
        ("nowhere.py:f", "No such file or directory: '.*nowhere.py'"),
        ("no_such_package.module:f", "No module named 'no_such_package'"),
        ("json:dmups", "json has no function 'dmups'"),
        ("json:JSONDecoder", "json has no function 'JSONDecoder'; of a class, name an instance"),
    ],
)
def test_unknown_names(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ndef f(:\n", "SyntaxError: .*mine.py, line 2"),
        ("import json\njson.loads('{')\n", "mine.py \\(line 2\\) raised JSONDecodeError"),
        ("import sys\nsys.exit(1)\n", "mine.py \\(line 2\\) raised SystemExit"),
        ("f = 3\n", "has no function 'f'"),
    ],
)
def test_files_that_cannot_be_loaded(write, text, message):
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as caught:
            load_reward(write(text) + ":f")
        assert "\n" not in str(caught.value)


def test_arguments_of_a_configuration():
    def mine(completions, threshold=0.5):
        return completions, threshold

    check_arguments("m:mine", mine, {"threshold": 0.1})
    check_arguments("accuracy", load_reward("accuracy"), {"mode": "lenient", "value": 2})
    for name, function, args, message in [
        ("accuracy", None, {"vlaue": 2.0}, "no argument 'vlaue' .*; it has mode, value"),
        ("accuracy", None, {"completions": []}, "no argument 'completions'"),
        ("accuracy", None, {"tag": "<answer>"}, "tag must be a bare name"),
        ("format", None, {"value": "1"}, "value must be a number, got '1'"),
        ("format", None, {"value": float("nan")}, "value must be a number, got nan"),
        ("m:mine", mine, {"treshold": 0.1}, "no argument 'treshold'"),
        ("m:any", lambda **columns: 0, {"completions": []}, "no argument 'completions'"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_arguments(name, function or load_reward(name), args)


@pytest.mark.parametrize(
    "name", ["accuracy", "format", "tag_groups", "pattern_answer", "exact_or_stripped", "soft_overlong", "countdown"]
)
def test_columns_fill_no_setting_of_a_builtin(name):
    """A column named like an argument (``value``, ``mode``, ``column``, ...) changes no score."""
    needed = {
        "soft_overlong": {"max_length": 4, "cache_length": 2},
        "pattern_answer": {"pattern": ".*>(?P<answer>.)<.*"},
    }
    function, args = load_reward(name), needed.get(name, {})
    columns = {"answer": ["4"], "numbers": [[2, 2]], "target": [4]}
    settings = [n for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY]
    text = "<think></think><answer>2+2</answer>" if name == "countdown" else "<think></think><answer>4</answer>"

    def call(columns):
        inputs = {"prompts": ["q"], "completions": [text], "completion_ids": [[1, 2, 3]]}
        return call_reward(function, args, columns | inputs, Logged(1))

    assert call(columns | {setting: ["lenient"] for setting in settings}) == call(columns) != [0.0]


def test_args_of_a_configuration_win_over_columns():
    def mine(completions, scale=1.0, other=1.0, trainer_state=None, **columns):
        return scale, other, trainer_state.global_step, sorted(columns)

    names = ("scale", "other", "more", "prompts", "completions", "completion_ids", "trainer_state", "log_metric")
    columns = {name: ["from the column"] for name in names}
    expected = (2.0, ["from the column"], 3, ["completion_ids", "more", "prompts"])
    assert call_reward(mine, {"scale": 2.0}, columns, Logged(1), TrainerState(3)) == expected


def test_names_in_metrics():
    specs = ["accuracy", "some/path/mine.py:fn", "package.module:fn", "classifier:org/model", "classifier:./a/model/"]
    assert unique_names(specs) == ["accuracy", "fn", "fn_2", "model", "model_2"]


def test_importing_the_package_imports_no_torch():
    code = (
        "import grpo.rewards, grpo.rewards.worker, sys; sys.exit(bool({'torch', 'numpy', 'pydantic'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
