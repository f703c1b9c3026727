"""The modes of ``accuracy``, the notations that it reads, and the tables about both in docs/rewards.md."""

import re
from fractions import Fraction

import pytest
from conftest import ROOT

from grpo.config.arguments import read_yaml
from grpo.rewards import load_reward
from grpo.rewards.answers import MODES, extract_answer
from grpo.rewards.notation import last_number, read_quantity

HALF = Fraction(1, 2)


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
    with pytest.raises(ValueError, match="any_notation must be true or false, got 'yes'"):
        load_reward("accuracy")([], [], any_notation="yes")


def test_every_notation_of_a_number():
    for value, texts in {
        5: "5 dollars|5 apples|5 lbs|5km|**5**|***5***|__5__|`5`|$5$|$$5$$|$ 5 $|\\(5\\)|\\[ 5 \\]|\\text{5}|\\text{5 apples}|$5 \\text{ apples}$|"
        "5\\,\\mathrm{cm}|\\boxed{5}|x=5|x = 5 cm|$x = 5$|**x = 5**|x = \\textbf{5}|The answer is 5|the final answer is: $5$.|**Answer:** 5|Answer: **5**|"
        "The answer is x = **5 dollars**.|\\$5|$5 dollars|5%|5 percent|**5** dollars|$5$ dollars.|5 square feet|5 sq. ft|5 miles per hour|5 km/h|5 m/s|"
        "5°|5^\\circ|5^{\\circ}\\text{C}|5 cm^2|5 \\text{ cm}^3|5 cm²|5 months|5 people",
        1000: "1\\,000|1{,}000|1,\\!000|$1{,}000$|1,000 people|1e3 meters",
        -5: "-5 dollars|$-5$|x = \u22125",
        HALF: "\\frac{1}{2}|\\dfrac{1}{2}|\\tfrac12|$\\frac{50}{100}$|x = \\frac{1}{2}|1/2 hour|0.5 miles|\\frac{1}{2} cups",
        -HALF: "-\\frac{1}{2}|\\frac{-1}{2}",
        2 + HALF: "2 1/2|2\\frac{1}{2}|2 \\frac12|$2\\frac{1}{2}$ cups|2 1/2 cups|x = 2 1/2.",
        -2 - HALF: "-2 1/2|-2\\frac{1}{2}",
    }.items():  # fmt: skip
        for text in texts.split("|"):
            assert read_quantity(text) is not None and read_quantity(text).value == value, text


NEAR_MISSES = (
    "5 or 6|between 5 and 6|5 of 6|5, 6|1 2|10-5|x=5, y=6|x=5 or x=6|not 5|5:30|5^2|5e|v2 5|5 to 6|5\u20136|5 3|5;6|5 e 3|"
    "x>5|x >= 5|x != 5|x == 5|x := 5|2x=5|x^2=5|-x=5|x = y = 5|f(x) = 5|x is not 5|the answer is not 5|the wrong answer is 5|"
    "the answer is 5 or 6|5x|5 x|5i|5 m|5!|5?|~5|~~5~~|~~5~~ 6|\u22485|about 5|5+|5-|5\u00b11|5(6)|(5)|5*6|5 * 6|5*6*|"
    "**5** **6**|**5**6|$5$ $6$|$5$6$|`5` 6|$5 or $6|\\boxed{5} \\boxed{6}|\\(5\\) \\(6\\)|5\\text{6}|\\text{5}\\text{6}|5\\,6|5{,}6|"
    "$2$ $1/2$|2*1/2*|\\frac{1}{2}\\frac{1}{2}|2\\frac{3}{2}|2 3/2|2 and 1/2|1/2 1/2|\\frac{1}{2}5|\\frac123|\\frac{1}{0}|2\n1/2|1 000/3|"
    "5 hundred|5 thousand|5 million|5 millions|5 bn|5k|5 dozen|5 dozens|5 pairs|5 halves|5 thirds|5 tenths|5 times|5 squared|5 less|5 minus|"
    "5 plus|5 pi|5\\pi|5\\sqrt{2}|5\\cdot 6|5 mod 7|5 % 3|5_6|5_{6}|0x5|5th|$5 cents|5% apples|5. apples|5 apples 6|5 apples and 6 pears|"
    "5 apples or six|5 six|5 apples per hundred|5 pages/x|5'6\"|5...|5.5.5|5 dollars 50 cents|5 hours 30 minutes|5 feet 6 inches|a 5|5 a|"
    "I5|No. 5|#5|5/0|5/x|x/5|5 is wrong|5 maybe|5,|\\text{five}|5 o'clock|5 pm|5 in"
)  # fmt: skip
"""A second number, an operator, a word that changes the value, a doubt. None of them is read as a number at all."""


def test_what_is_not_the_number_five():
    for text in NEAR_MISSES.split("|"):
        assert read_quantity(text) is None, text
        assert load_reward("accuracy")([""], [f"<answer>{text}</answer>"], answer=[5], any_notation=True) == [0.0], text
    assert read_quantity("5 apples" + " " * 400) is None, "as long as no number is"


def test_units_and_variables_do_not_contradict_each_other():
    def score(answer, gold):
        (value,) = load_reward("accuracy")(
            [""], [f"\\boxed{{{answer}}}"], answer=[gold], mode="boxed", any_notation=True
        )
        return value

    for answer, gold in (("5", "5 apples"), ("$5", "5 dollars"), ("1 dollar", "$1"), ("5°", "5 degrees"), ("x = 5", "x=5.0"), ("5 Miles", "5 mile"),
                         ("\\text{Paris}", "Paris"), ("5 or 6", "5 or 6"), ("the answer is B", "B")):  # fmt: skip
        assert score(answer, gold) == score(gold, answer) == 1.0, (answer, gold)
    for answer, gold in (("5 cents", "5 dollars"), ("5%", "5 dollars"), ("5 cm", "5 cm^2"), ("y = 5", "x = 5"), ("x = A", "A"), ("5 km/h", "5 km"),
                         ("y = 2x", "x = 2x"), ("5", "5 or 6"), ("not Paris", "Paris")):  # fmt: skip
        assert score(answer, gold) == score(gold, answer) == 0.0, (answer, gold)


def test_the_last_number_may_be_a_fraction():
    for text, number in {
        "so 2 1/2 cups": "2 1/2", "it is \\frac{1}{2}.": "1/2", "of 3/4": "3/4", "6 of 1{,}000": "1,000", "10/2 = 5": "5", "1 2": "2", "no": None,
    }.items():  # fmt: skip
        assert last_number(text) == number
    accuracy = load_reward("accuracy")
    assert accuracy([""] * 2, ["5 cents", "5"], answer=["5 dollars", "5"], mode="lenient", any_notation=True) == [0, 1]


def tables() -> list[list[list[str]]]:
    """The tables of docs/rewards.md that give scores: their rows, of texts without the backticks."""
    text = (ROOT / "docs" / "rewards.md").read_text()
    blocks = re.findall(r"^\| (?:response|answer) \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [
        [[cell.strip(" `") for cell in row.strip("|").split(" | ")] for row in block.splitlines()] for block in blocks
    ]


def cell(response: str, gold: str, mode: str) -> str:
    response = response.replace(" ⏎ ", "\n")
    plain, any_notation = (
        f"{load_reward('accuracy')([''], [response], answer=[gold], mode=mode, any_notation=switch)[0]:.0f}"
        for switch in (False, True)
    )
    return plain if plain == any_notation else f"{plain} → {any_notation}"


def test_the_tables_of_the_document():
    responses, answers = tables()
    assert len(responses) >= 10 and len(answers) >= 20
    for response, *cells in responses:
        assert cells == [cell(response, "5", mode) for mode in MODES], response
    for answer, gold, marked, lenient, _ in answers:
        assert cell(answer, gold, "lenient") == lenient, answer
        for response, mode in (
            (f"<answer>{answer}</answer>", "strict"),
            (f"\\boxed{{{answer}}}", "boxed"),
            (f"#### {answer}", "####"),
        ):
            assert cell(response, gold, mode) == marked, response
    pytest.importorskip("math_verify")
    for answer, gold, *_, symbolic in answers:
        assert load_reward("math_verify")([""], [f"<answer>{answer}</answer>"], answer=[gold]) == [float(symbolic)], (
            answer
        )
