"""What ``load_reward`` finds, and what it says when it does not."""

import sys

import pytest

from grpo.rewards import load_reward
from grpo.rewards.calls import RewardLog, TrainerState, call_reward
from grpo.rewards.functions import FunctionInfo, check_arguments


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_from_a_file_with_a_neighbour_and_from_a_module(write, tmp_path, monkeypatch):
    write("SCORE = 3.0", "neighbour_of_a_reward.py")
    write(
        "from neighbour_of_a_reward import SCORE\ndef three(prompts, completions): return [SCORE]\n",
        "three_module.py",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for spec in (
        f"{tmp_path}/three_module.py:three",
        "three_module:three",
        "three_module.py:three",
    ):
        assert load_reward(spec)(["a"], ["b"]) == [3.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acuracy", "unknown reward 'acuracy': built in are accuracy, format"),
        ("nowhere.py:f", "No such file or directory: '.*nowhere.py'"),
        ("json:dmups", "json has no function or class 'dmups'"),
        (["def other(): pass", "from json import dumps"], "has no function or class 'f'"),
        (["x = 1", "def f(:"], "SyntaxError: .*mine.py, line 2"),
        (["import json", "json.loads('{')"], "mine.py \\(line 2\\) raised JSONDecodeError"),
    ],
)
def test_what_is_no_reward_is_refused_in_one_line(write, spec, message):
    """``spec`` as a list: the lines of a file."""
    for _ in range(2):
        with pytest.raises(ValueError, match=message) as caught:
            load_reward(spec if isinstance(spec, str) else write("\n".join(spec)) + ":f")
        assert "\n" not in str(caught.value)


def test_arguments_of_a_configuration():
    def mine(completions, threshold=0.5):
        return completions, threshold

    check_arguments("m:mine", mine, {"threshold": 0.1})
    check_arguments("accuracy", load_reward("accuracy"), {"mode": "lenient", "value": 2})
    for name, function, args, message in [
        ("accuracy", None, {"vlaue": 2.0}, "no argument 'vlaue' .*it has mode, value"),
        ("accuracy", None, {"tag": "<answer>"}, "tag must be a bare name"),
        (
            "soft_overlong",
            None,
            {"max_length": True},
            "max_length must be of type int, got True",
        ),
        ("m:any", lambda **columns: 0, {"completions": []}, "no argument 'completions'"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_arguments(name, function or load_reward(name), args)


def test_columns_fill_no_setting_of_a_builtin():
    """A column named like an argument (``value``, ``mode``, ...) changes no score."""
    given = {"prompts": ["q"], "completions": ["<answer>4</answer>"], "answer": ["4"]}
    columns = {"mode": ["lenient"], "value": [3], "tag": ["b"], "column": ["mode"]}
    assert call_reward(load_reward("accuracy"), {}, given | columns, RewardLog(1)) == [1.0]


def test_args_of_a_configuration_win_over_columns():
    def mine(completions, scale=1.0, other=1.0, trainer_state=None, **columns):
        return scale, other, trainer_state.global_step, sorted(columns)

    names = (
        "scale",
        "other",
        "more",
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_metric",
    )
    columns = {name: ["from the column"] for name in names}
    in_kwargs = ["completion_ids", "log_extra", "log_metric", "more", "prompts"]
    expected = (2.0, ["from the column"], 3, in_kwargs)
    assert call_reward(mine, {"scale": 2.0}, columns, RewardLog(1), TrainerState(3)) == expected


def test_environments_are_for_functions_that_name_them():
    """A function with ``**kwargs`` runs where no environments are: they would be numbers."""
    inputs = {"prompts": [], "answer": [], "environments": [0]}

    def with_kwargs(prompts, **kwargs):
        return []

    def with_environments(environments, **kwargs):
        return []

    info = FunctionInfo(with_kwargs, {})
    assert info.call_arguments(inputs, {}).keys() == {"prompts", "answer"}
    assert FunctionInfo(with_environments, {}).call_arguments(inputs, {}) == inputs
