"""The summary that is printed before the first step."""

import pytest
from conftest import load

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import Config, DataConfig
from grpo.data import ProblemSet
from grpo.rewards import load_reward
from grpo.rollout import check_model
from grpo.run.summary import data_line, warnings_of


def problems(start: int, end: int) -> list[Problem]:
    return [Problem(n, f"question {n}", (n,)) for n in range(start, end)]


def test_evaluation_problems_that_are_trained_on_are_counted():
    shared = "warning: 5 of the evaluation problems are also in the training data"
    assert shared in list(warnings_of(Config(), problems(0, 15), problems(10, 20)))
    assert not any(
        "also in the training data" in line for line in warnings_of(Config(), problems(0, 15), problems(15, 20))
    )


def test_worked_solutions_as_reference_answers_are_noticed():
    answers = ["1 + 2 = 3 #### 3", [r"So $x = \boxed{3}$."], "4", None]
    train = [Problem(n, "question", (n,), {"answer": answer}) for n, answer in enumerate(answers)]

    def warned(name):
        config = Config.model_validate({"reward": {"functions": [name]}})
        return [line for line in warnings_of(config, train, []) if "answers contain" in line]

    (line,) = warned("accuracy")
    assert line.startswith("warning: 2 of 4 answers contain #### or \\boxed, and accuracy compares the whole text: ")
    assert not warned("math_verify")


@pytest.mark.parametrize("name", ["math_verify", "r1_zero"])
def test_rewards_without_that_warning_read_worked_solutions(name):
    pytest.importorskip("math_verify")
    reward = load_reward(name)
    right = "<think>a</think> <answer>72</answer>"
    solutions = ["48/2 = <<48/2=24>>24, and 48+24 = <<48+24=72>>72.\n#### 72", r"So $x = \boxed{72}$, not 24."]
    assert reward(["", ""], [right, right], answer=solutions) == [1.0, 1.0]
    assert reward(["", ""], [right.replace("72", "24")] * 2, answer=solutions) == [0.0, 0.0]


def test_problems_that_are_left_out_are_counted():
    train = ProblemSet(problems(0, 7), num_too_long=2, num_empty=1, num_without_answer=4)
    evaluation = ProblemSet(problems(0, 5), num_too_long=1, num_empty=1)
    line = data_line(DataConfig(dataset="file.jsonl", max_prompt_length=64), train, evaluation, num_evaluated=4)
    assert line == (
        "data      file.jsonl: 7 problems to train on, 4 of them with an empty answer; 4 to evaluate on; "
        "left out, as empty or longer than 64 tokens: 3 and 2"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"delta": 3.0, "name": "cispo", "epsilon_high": 1.0, "num_minibatches": 2},
            "algorithm.delta has no effect with algorithm.objective=cispo",
        ),
        ({"beta": 0.0, "ref_sync_steps": 4}, "algorithm.ref_sync_steps has no effect with algorithm.beta=0"),
        ({"beta": 0.0, "unbiased_kl": True}, "algorithm.unbiased_kl has no effect"),
        ({"name": "sapo", "epsilon": 0.3}, "algorithm.epsilon has no effect with algorithm.objective=sapo"),
        ({"beta": 0.1, "ref_sync_steps": 4}, None),
    ],
)
def test_settings_without_effect_are_noted(changes, expected):
    config = Config.model_validate({"algorithm": changes})
    lines = [line for line in warnings_of(config, [], []) if "no effect" in line]
    assert (len(lines) == 1 and expected in lines[0]) if expected else not lines


def test_packing_is_what_fast_decode_needs(random_model):
    """The loss that the note speaks of: without packing the engine finds no written-out decode step."""
    policy = load(random_model)
    scorer = CompletionScorer(policy.model)
    why_padded = check_model(policy, scorer, disable_dropout=False)
    assert "model.disable_dropout" in why_padded and not policy.is_llama
    assert check_model(policy, scorer) is None and policy.is_llama


