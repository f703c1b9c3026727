"""The modes of ``accuracy``, its comparison by math-verify, and the tables about both in docs/rewards.md."""

import re

import pytest
from conftest import ROOT

from grpo.rewards import load_reward
from grpo.rewards.answers import MODES, extract_answer


@pytest.mark.parametrize(
    ("mode", "text", "answer"),
    [
        ("boxed", r"so \boxed{5}.", "5"),
        ("boxed", r"\boxed {\frac{1}{2}} ok", r"\frac{1}{2}"),
        ("boxed", r"\boxed{4}, no: \boxed{5}", "5"),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        ("boxed", r"<think>\boxed{4}</think> \boxed{5}", "5"),
        ("boxed", r"\boxed{5} <think> or \boxed{6}", "5"),
        ("boxed", r"<think>\boxed{4}</think> 5", None),
        ("boxed", r"\boxed{4} and \boxed{5", None),
        ("boxed", r"\boxed 5 boxed{5}", None),
        ("####", "#### 4\n#### 1,000 \r\nas above", "1,000"),
        ("####", "<think>#### 4</think>#### 5", "5"),
        ("####", "<think>#### 4</think> 5", None),
        ("####", "####\n5", None),
    ],
)
def test_a_box_and_the_line_of_gsm8k(mode, text, answer):
    assert extract_answer(text, mode) == answer


def test_r1_zero_compares_numbers_then_text_then_expressions():
    pytest.importorskip("math_verify")

    def score(answer: str, reference: str) -> float | None:
        return load_reward("r1_zero")([""], [f"</think> <answer>{answer}</answer>"], answer=[reference])[0]

    assert score("$1,000.00", "1000") == score("The  CAT", "the cat.") == score("\\sqrt{12}", "2\\sqrt{3}") == 1.0
    for answer, reference in (("5 or 6", "5"), ("5 million", "5"), ("5 cents", "5 dollars"), ("not Paris", "Paris")):
        assert score(answer, reference) == 0.0
    assert score("+".join(["0"] * 600) + "+5", "5") == 0.0, "too long for math-verify"


def test_a_unicode_minus_is_a_minus_in_a_sentence():
    pytest.importorskip("math_verify")
    text = "The answer is \u22125"
    for reference, score in (("-5", 1.0), ("\u22125", 1.0), ("5", 0.0)):
        assert load_reward("math_verify")([""], [text], answer=[reference]) == [score]
        assert load_reward("r1_zero")([""], [f"</think> <answer>{text}</answer>"], answer=[reference]) == [score]


def test_countdown_compares_numbers_exactly():
    countdown, text = load_reward("countdown"), "<answer>007 + 3</answer>"
    for numbers, score in (([3, 7], 1.0), (["7", 3.0], 1.0), ([3.5, 7], 0.0), ([3], 0.0)):
        assert countdown([""], [text], numbers=[numbers], target=[10]) == [score]


def tables() -> list[list[list[str]]]:
    """The tables of docs/rewards.md that give scores: their rows, of texts without the backticks."""
    text = (ROOT / "docs" / "rewards.md").read_text()
    blocks = re.findall(r"^\| (?:response|answer) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        [[cell.strip(" `") for cell in row.strip("|").split(" | ")] for row in block.splitlines()] for block in blocks
    ]


def cell(response: str, gold: str, mode: str) -> str:
    response = response.replace(" ⏎ ", "\n")
    return f"{load_reward('accuracy')([''], [response], answer=[gold], mode=mode)[0]:.0f}"


def test_the_tables_of_the_document():
    pytest.importorskip("math_verify")
    responses, answers = tables()
    assert len(responses) >= 10 and len(answers) >= 20
    for response, *cells in responses:
        assert cells == [cell(response, "5", mode) for mode in MODES], response
    for answer, gold, marked, lenient, symbolic in answers:
        assert load_reward("math_verify")([""], [f"<answer>{answer}</answer>"], answer=[gold]) == [float(symbolic)]
        assert cell(answer, gold, "lenient") == lenient, answer
        for response, mode in (
            (f"<answer>{answer}</answer>", "strict"),
            (f"\\boxed{{{answer}}}", "boxed"),
            (f"#### {answer}", "####"),
        ):
            assert cell(response, gold, mode) == marked, response
