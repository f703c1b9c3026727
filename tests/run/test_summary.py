"""The summary that is printed before the first step."""

import pytest
import regex
from conftest import DEFAULTS, load, run_trainer, small_run

from grpo.algorithm.batch import Problem
from grpo.algorithm.logprobs import CompletionScorer
from grpo.config import Config, DataConfig, load_config
from grpo.data import ProblemSet
from grpo.rewards import load_reward
from grpo.rewards.scores import messages_warning
from grpo.rollout.check import matches_model
from grpo.run.models import enable_packing
from grpo.run.summary import FORMAT_AFTER_THINK, INSIDE_OF_BOX, data_line, warnings_of


def problems(start: int, end: int) -> list[Problem]:
    return [Problem(n, f"question {n}", (n,)) for n in range(start, end)]


def test_evaluation_problems_that_are_trained_on_are_counted():
    shared = "warning: 5 of the evaluation problems are also in the training data"
    assert shared in list(warnings_of(Config(), problems(0, 15), problems(10, 20)))
    assert not any(
        "also in the training data" in line for line in warnings_of(Config(), problems(0, 15), problems(15, 20))
    )


def test_worked_solutions_as_gold_answers_are_noticed():
    def warned(**function):
        config = Config.model_validate({"reward": {"functions": [function]}})
        train = [Problem(0, "1 + 2", (0,), {"answer": "1 + 2 = 3 #### 3"}), Problem(1, "3", (1,), {"answer": "3"})]
        return [line for line in warnings_of(config, train, []) if "1 of 2 answers contain ####" in line]

    assert "data.answer_pattern" in warned(name="accuracy")[0]
    assert not warned(name="accuracy", args={"column": "gold"}) and not warned(name="my.py:reads_solutions")


def test_answers_in_a_box_are_noticed_and_the_pattern_reads_them():
    solution = r"So $x = \boxed{\frac{5}{2}}$, which is 2.5."

    def noted(name):
        config = Config.model_validate({"reward": {"functions": [name]}})
        train = [Problem(0, "x?", (0,), {"answer": solution}), Problem(1, "3?", (1,), {"answer": "3"})]
        return [line for line in warnings_of(config, train, []) if "1 of 2 answers contain \\boxed" in line]

    assert INSIDE_OF_BOX in noted("accuracy")[0] and not noted("math_verify")
    assert regex.search(INSIDE_OF_BOX, solution)[1] == r"\frac{5}{2}"


@pytest.mark.slow
def test_a_prompt_that_opens_the_thinking_is_said_to_the_reward_format(tmp_path, random_model):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 6)
    said = {}
    for name, function in (
        ("default", "format"),
        ("own", f"{{name: format, args: {{pattern: '{FORMAT_AFTER_THINK}'}}}}"),
    ):
        options = [f"data.dataset={rows}", "data.prompt_template={prompt}<think>", f"reward.functions=[{function}]"]
        done = run_trainer(
            *small_run(random_model, tmp_path / name), *options, "optim.max_steps=1", "data.eval_split=none"
        )
        said[name] = "the prompts end with <think>" in done.stdout
    assert said == {"default": True, "own": False}
    for text, matches in (
        ("a</think>\n<answer>5</answer>", 1.0),
        ("<answer>5</answer>", 0.0),
        ("a</think> <answer>5", 0.0),
    ):
        assert load_reward("format")([""], [text], pattern=FORMAT_AFTER_THINK) == [matches]


def test_numbers_with_signs_are_noticed_where_characters_are_compared():
    def noted(name):
        config = Config.model_validate({"reward": {"functions": [{"name": name}]}})
        answers = ["1,000", "$5", "5", "Paris, France", ["6", "2,000"], None]
        train = [Problem(n, "1", (n,), {"answer": answer}) for n, answer in enumerate(answers)]
        return [line for line in warnings_of(config, train, []) if "3 of 6 answers are numbers with , or $" in line]

    assert "there 1000 is not 1,000; accuracy compares numbers" in noted("exact_or_stripped")[0]
    assert not noted("accuracy")


def test_evaluation_data_without_a_column_answer_is_noticed():
    answered = [Problem(0, "1", (0,), {"answer": "1"})]
    assert any("data.answer_column=NAME" in line for line in warnings_of(Config(), [], problems(0, 2)))
    assert not any("data.answer_column" in line for line in warnings_of(Config(), [], [*answered, *problems(1, 2)]))


def test_a_template_with_braces_of_no_column_is_noticed():
    data = {"question_template": r"{topik} {answer}: {prompt} \\frac{1}{2}"}
    lines = list(warnings_of(Config(data=data), [Problem(0, "1", (0,), {"answer": "1"})], []))
    assert [line.split(":")[2].split()[0] for line in lines if "question_template" in line] == ["topik"]


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
    config = load_config([DEFAULTS, "model.disable_dropout=false"])
    policy = load(random_model)
    scorer = CompletionScorer(policy.model)
    why_padded = enable_packing(config, scorer)
    assert "model.disable_dropout" in why_padded and not matches_model(policy)
    assert enable_packing(load_config([DEFAULTS]), scorer) is None and matches_model(policy)


def test_own_rewards_that_get_messages_for_text_rows_are_noted():
    messages = [{"role": "user", "content": "q"}]

    def warning(prompt, reward_prompt, reward="mine.py:brevity", **data):
        config = Config.model_validate({"data": data, "reward": {"functions": ["accuracy", reward]}})
        rows = [Problem(0, messages, (1,), {}, messages), Problem(1, prompt, (1,), {}, reward_prompt)]
        return messages_warning(config, rows)

    assert warning("q", messages).startswith("note: for mine.py:brevity completions are lists of messages, since")
    assert not warning("q", None) and not warning(messages, messages)
    assert not warning("q", messages, conversational=True) and not warning("q", messages, reward="format")


def test_a_learning_rate_of_full_training_with_adapters_is_noticed():
    def notes(**sections):
        return [line for line in warnings_of(Config.model_validate(sections), [], []) if "LoRA" in line]

    assert "about ten times that" in notes(lora={"rank": 8})[0]
    assert not notes(lora={"rank": 8}, optim={"learning_rate": 1e-5}) and not notes(optim={"learning_rate": 1e-6})
