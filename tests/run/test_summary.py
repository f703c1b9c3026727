"""The summary that is printed before the first step."""

import pytest

from grpo.batch import Problem
from grpo.config import Config, DataConfig
from grpo.data import ProblemSet
from grpo.run.summary import data_line, warnings_of


def problems(start: int, end: int) -> list[Problem]:
    return [Problem(n, f"question {n}", (n,)) for n in range(start, end)]


def test_evaluation_problems_that_are_trained_on_are_counted():
    shared = "warning: 5 evaluation problems are also in the training data"
    assert shared in list(warnings_of(Config(), problems(0, 15), problems(10, 20)))
    assert not any(
        "also in the training data" in line for line in warnings_of(Config(), problems(0, 15), problems(15, 20))
    )


def test_problems_that_are_left_out_are_counted():
    train = ProblemSet(problems(0, 7), num_too_long=2, num_empty=1, num_without_answer=4)
    evaluation = ProblemSet(problems(0, 5), num_too_long=1, num_empty=2)
    line = data_line(DataConfig(dataset="file.jsonl", max_prompt_length=64), train, evaluation, num_evaluated=3)
    assert line == (
        "data      file.jsonl: 7 problems to train on, 2 left out as longer than 64 tokens, 1 left out as empty, "
        "4 without an answer; 3 to evaluate on, 3 left out as longer than 64 tokens or empty"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"delta": 3.0, "name": "cispo", "epsilon_high": 1.0}, "algorithm.delta has no effect with objective cispo"),
        ({"name": "rloo", "importance_level": "sequence"}, "algorithm.importance_level=sequence has no effect"),
        ({"beta": 0.0, "ref_sync_steps": 4}, "algorithm.ref_sync_steps has no effect with objective clip and beta 0"),
        ({"beta": 0.1, "ref_sync_steps": 4}, None),
    ],
)
def test_settings_without_effect_are_noted(changes, expected):
    config = Config.model_validate({"algorithm": changes})
    lines = [line for line in warnings_of(config, [], []) if "no effect" in line]
    assert (len(lines) == 1 and expected in lines[0]) if expected else not lines


def test_text_rows_that_rewards_get_as_messages_are_noted():
    def is_noted(prompt, reward_prompt, **data):
        config = Config.model_validate({"data": data})
        lines = warnings_of(config, [Problem(0, prompt, (1,), {}, reward_prompt)], [])
        return any(line.startswith("note: rewards get prompts and completions as lists of messages") for line in lines)

    messages = [{"role": "user", "content": "q"}]
    assert is_noted("q", messages)
    assert not is_noted("q", None) and not is_noted(messages, messages)
    assert not is_noted("q", messages, conversational=True)
