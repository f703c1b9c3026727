"""What ``load_reward`` finds, and what it says when it does not."""

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo.rewards import load_reward
from grpo.rewards.functions import BUILTIN, check_arguments, display_name
from grpo.rewards.worker import Logged, RewardInputs, TrainerState, call_reward


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


def test_an_edited_file_is_read_again(write):
    assert load_reward(write("def f(**_): return 1\n") + ":f")() == 1
    assert load_reward(write("def f(**_): return 22\n") + ":f")() == 22


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acuracy", "unknown reward 'acuracy' \\(did you mean 'accuracy'\\?\\); built in are accuracy, format"),
        ("nowhere.py:f", "there is no file .*nowhere.py"),
        ("no_such_package.module:f", "no module 'no_such_package'"),
        ("json:dmups", "json has no function 'dmups' \\(did you mean 'dumps'\\?\\)"),
        (":f", "must read package.module:function"),
        ("json:", "must read package.module:function"),
        ("json:JSONDecoder", "reward 'json:JSONDecoder': that is a class: give an instance"),
        ("", "named by a string, got ''"),
        (None, "named by a string, got None"),
    ],
)
def test_unknown_names(spec, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(): pass\ndef another(): pass\nfrom json import dumps\n", "no function 'f'; it has another, other$"),
        ("x = 1\ndef f(:\n", "mine.py:2: SyntaxError"),
        ("x = 1\n\nraise KeyError('k')\n", "mine.py:3: importing it raised KeyError: 'k'"),
        ("import json\njson.loads('{')\n", "mine.py:2: importing it raised JSONDecodeError"),
        ("import no_such_thing_at_all\n", "mine.py:1: importing it raised ModuleNotFoundError"),
        ("import sys\nsys.exit(1)\n", "mine.py:2: importing it raised SystemExit"),
        ("f = 3\n", "'f' is not callable but a int"),
        (
            "class f:\n    def __call__(self, completions): return [0.0]\n",
            "that is a class: give an instance \\(in its file write",
        ),
        ("class Other: pass\ndef other(): pass\n", "no function 'f'; it has other$"),
    ],
)
def test_files_that_cannot_be_loaded(write, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_reward(write(text) + ":f")
    assert "\n" not in str(caught.value)


def test_arguments_of_a_configuration():
    check_arguments("accuracy", load_reward("accuracy"), {"mode": "lenient"})
    with pytest.raises(ValueError, match="no argument 'vlaue' \\(did you mean 'value'\\?\\); it has mode, value"):
        check_arguments("accuracy", load_reward("accuracy"), {"vlaue": 2.0})
    with pytest.raises(ValueError, match="needs the argument\\(s\\) max_length, cache_length"):
        check_arguments("soft_overlong", load_reward("soft_overlong"), {})
    with pytest.raises(ValueError, match="given by the trainer"):
        check_arguments("accuracy", load_reward("accuracy"), {"completions": []})

    def mine(completions, threshold=0.5):
        return completions, threshold

    check_arguments("m:mine", mine, {"threshold": 0.1})
    with pytest.raises(ValueError, match="has no argument 'treshold'"):
        check_arguments("m:mine", mine, {"treshold": 0.1})

    def make(scale=1.0):
        return lambda completions: [scale] * len(completions)

    for args in ({}, {"scale": 2.0}):
        with pytest.raises(
            ValueError, match="'m:make' takes neither prompts nor completions nor a column: if it makes"
        ):
            check_arguments("m:make", make, args)
    check_arguments("m:made", make(2.0), {})


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
        return call_reward(function, args, RewardInputs(["q"], [text], columns, [[1, 2, 3]]), Logged(1))

    assert call(columns | {setting: ["lenient"] for setting in settings}) == call(columns) != [0.0]
    for setting in (n for n in settings if n.endswith("column")):
        for column in ("value" if "value" in settings else "tag", "completions", "log_metric"):
            with pytest.raises(ValueError, match=f"cannot read a column named '{column}'.*rename the column"):
                check_arguments(name, function, args | {setting: column})


def test_args_of_a_configuration_win_over_columns():
    def mine(completions, scale=1.0, other=1.0, trainer_state=None, **columns):
        return scale, other, trainer_state.global_step, sorted(columns)

    names = ("scale", "other", "more", "prompts", "completion_ids", "trainer_state", "log_metric")
    columns = {name: ["from the column"] for name in names}
    inputs = RewardInputs(["q"], ["text"], columns, [[1]], TrainerState(3))
    expected = (2.0, ["from the column"], 3, ["completion_ids", "more", "prompts"])
    assert call_reward(mine, {"scale": 2.0}, inputs, Logged(1)) == expected


def test_display_names():
    assert display_name("accuracy") == "accuracy"
    assert display_name("some/path/mine.py:fn") == "fn"
    assert display_name("package.module:fn") == "fn"
    assert display_name("classifier:org/reward-model") == "reward-model"
    assert display_name("classifier:./folder/model/") == "model"


def test_importing_the_package_imports_no_torch():
    code = (
        "import grpo.rewards, grpo.rewards.worker, sys; sys.exit(bool({'torch', 'numpy', 'pydantic'} & {*sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
