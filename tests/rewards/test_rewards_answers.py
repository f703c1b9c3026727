"""The modes of ``accuracy``, its comparison by math-verify, and the tables about both in docs/rewards.md."""

import re

import pytest
from conftest import ROOT

from grpo.config.arguments import read_yaml
from grpo.rewards import load_reward
from grpo.rewards.answers import MODES, extract_answer


@pytest.mark.parametrize(
    ("mode", "text", "answer"),
    [
        ("boxed", r"so \boxed{5}.", "5"),
        ("boxed", r"\boxed {\frac{1}{2}} ok", r"\frac{1}{2}"),
        ("boxed", r"\fbox{ x }", "x"),
        ("boxed", r"\boxed{4}, no: \boxed{5}", "5"),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        ("boxed", r"\boxed{\{}", r"\{"),
        ("boxed", r"<think>\boxed{4}</think> \boxed{5}", "5"),
        ("boxed", r"\boxed{5} <think> or \boxed{6}", "5"),
        ("boxed", r"<think>\boxed{4}</think> 5", None),
        ("boxed", r"\boxed{4} and \boxed{5", None),
        ("boxed", r"put it in \boxed{}", None),
        ("boxed", r"\boxed 5 boxed{5}", None),
        ("####", "2 + 3 = 5\n#### 5\n", "5"),
        ("####", "####5", "5"),
        ("####", "#### 4\n#### 1,000 \r\nas above", "1,000"),
        ("####", "<think>#### 4</think>#### 5", "5"),
        ("####", "<think>#### 4</think> 5", None),
        ("####", "### 5", None),
        ("####", "####\n5", None),
    ],
)
def test_a_box_and_the_line_of_gsm8k(mode, text, answer):
    assert extract_answer(text, mode) == answer


def test_a_mode_that_yaml_read_as_a_comment():
    with pytest.raises(ValueError, match=r'got None; in YAML an unquoted # begins a comment: write mode: "####"$'):
        load_reward("accuracy")([], [], mode=None)
    with pytest.raises(
        ValueError, match=r'x\.yaml:1: not valid YAML: .*; an unquoted # begins a comment: write "####"$'
    ):
        read_yaml("args: {mode: ####}", "x.yaml")


EQUIVALENT = {
    "5": "$5$|\\(5\\)|\\boxed{5}|\\text{5}|5 apples|$5 \\text{ apples}$|x = 5|$x = 5$|The answer is 5|**Answer:** 5|10-5|\\sqrt{25}|\\frac{50}{10}",
    "0.5": "\\frac{1}{2}|\\dfrac{1}{2}|\\tfrac12|x = \\frac{1}{2}",
    "-5": "x = \u22125|The answer is \u22125|$\u22125$",
    "1000": "1{,}000|$1{,}000$",
    "2\\sqrt{3}": "\\sqrt{12}|$2 \\cdot \\sqrt{3}$",
    "x + 1": "1 + x",
}  # fmt: skip
WRONG = {
    "5": "5 or 6|5, 6|5;6|5 of 6|between 5 and 6|5 to 6|5\u20136|1 2|5 3|x=5, y=6|x=5 or x=6|$5$ $6$|$5$ or $6$|\\boxed{5} \\boxed{6}|not 5|x is not 5|"
    "x>5|x != 5|5x|5i|5!|5\\pi|5\\sqrt{2}|5^2|5:30|5\u00b11|5(6)|5\\,6|5k|5 million|5 dozen|5 halves|5 minus|5 plus|5/x|5 mod 7|0x5|a 5|5 is wrong|about 5",
    "0.5": "\\frac{1}{3}|\\frac{1}{2}5|\\frac{1}{2}\\frac{1}{2}|1/2 1/2",
    "5 dollars": "5 cents|6 dollars",
    "5 or 6": "5|6",
    "Paris": "not Paris|London",
    "-5": "5|The answer is 5",
}  # fmt: skip
"""Reference answer -> answers that math-verify must not take for it: a second number, an operator, another value, a doubt."""


def test_r1_zero_compares_expressions_by_math_verify():
    pytest.importorskip("math_verify")

    def score(answer: str, reference: str) -> float | None:
        return load_reward("r1_zero")([""], [f"</think> <answer>{answer}</answer>"], answer=[reference])[0]

    for table, expected in ((EQUIVALENT, 1.0), (WRONG, 0.0)):
        for reference, texts in table.items():
            for text in texts.split("|"):
                assert score(text, reference) == expected, (text, reference)
    assert score("The  CAT", "the cat.") == 1.0, "as text first"
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
