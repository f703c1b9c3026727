"""The modes of ``accuracy``, its comparison by math-verify, and the tables about both in
docs/rewards.md."""

import math
import re

import pytest
from conftest import ROOT

from grpo.rewards import RewardSpec, load_reward
from grpo.rewards.answers import ANSWER_MODES, equals_reference, reference_texts
from grpo.rewards.builtin import ANSWER_REWARDS
from grpo.rewards.code import check_rows


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ("70", ["70"]),
        (" 70\n", [" 70\n"]),
        (0.5, ["0.5"]),
        (["70"], ["70"]),
        (("70", 71, None, ""), ["70", "71"]),
        *((nothing, []) for nothing in (None, math.nan, "", " ", [], [None])),
        # Texts that begin as a list does.
        *(
            (text, [text])
            for text in (
                "[0, 1]",
                "[-2,7)",
                "[]",
                "['a', 5]",
                "['a'] + ['b']",
                "[it's 5, isn't it]",
            )
        ),
    ],
)
def test_the_texts_of_a_reference_answer(answer, texts):
    assert reference_texts(answer) == texts


OTHERS = {
    "not a dict": {"ground_truth": "70"},
    "not a bytes": b"70",
    "not a list in a list": [["70"]],
    "not a dict in a list": [{"answer": "70"}],
}
# the last of a NumPy array
TEXTS_OF_LISTS = (
    "['70']",
    '["it\'s 70", "71"]',
    str(["\\frac{1}{2}"]),
    "['70' '71']",
)


@pytest.mark.parametrize("message", OTHERS)
def test_anything_else_is_no_reference_answer(message):
    with pytest.raises(ValueError, match=message):
        reference_texts(OTHERS[message])
    assert not equals_reference("70", OTHERS[message])


@pytest.mark.parametrize("name", ANSWER_REWARDS)
def test_any_item_of_a_list_is_right(name):
    pytest.importorskip("math_verify")
    args = {"pattern": ".*<answer>(?P<answer>.*)</answer>"} if name == "pattern_answer" else {}

    def scores(*references):
        response = "I think.</think> <answer>70</answer>"
        reward = load_reward(name)
        return reward(
            [""] * len(references),
            [response] * len(references),
            answer=list(references),
            **args,
        )

    right = scores("70")[0]
    assert right > 0
    assert scores(["71", "70"], ["70"], [70, 71], ["", "70"], ("70",)) == [right] * 5
    assert scores(["71", "72"], [], [None], None) == [0.0, None, None, None]
    for other in OTHERS.values():
        with pytest.raises(ValueError, match="answer"):
            scores(other)


def test_the_start_of_a_run_reads_every_reference_answer():
    rows = [
        {"answer": ["70", "71"], "gold": None},
        {"answer": {"style": "rule", "ground_truth": "70"}, "gold": b"70"},
    ]

    def check(*specs):
        check_rows(specs, rows, "data.dataset=FILE", ["line 1", "line 2"], has_pattern=False)

    taken = "^data.dataset=FILE, line 2, column answer: .* data.answer_column=COLUMN.KEY takes .* style, ground_truth$"
    for name in ANSWER_REWARDS:
        with pytest.raises(ValueError, match=taken):
            check(RewardSpec("format"), RewardSpec(name))
        with pytest.raises(
            ValueError, match=r"^data.dataset=FILE, line 2, column gold: .*, not a bytes$"
        ):
            check(RewardSpec(name, args={"column": "gold"}))
    for text in TEXTS_OF_LISTS:
        rows[1] = {"answer": text}
        with pytest.raises(
            ValueError,
            match=r"line 2, column answer: .* is the text of a list: data.answer_pattern takes",
        ):
            check(RewardSpec("accuracy"))
        # An answer that a pattern has found is meant as it is.
        check_rows(
            [RewardSpec("accuracy")],
            rows,
            "data.dataset=FILE",
            ["line 1", "line 2"],
            has_pattern=True,
        )
    check(
        RewardSpec("mine.py:reads_anything"),
        RewardSpec("reasoning_gym"),
        RewardSpec("format"),
    )


def rows_of_table(name: str) -> list[list[str]]:
    """The rows of the table of docs/rewards.md whose first column has a name, without the
    backticks."""
    text = (ROOT / "docs" / "rewards.md").read_text()
    (table,) = re.findall(rf"^\| {name} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = []
    for line in table.splitlines():
        cells = line.strip("|").split(" | ")
        rows.append([cell.strip(" `") for cell in cells])
    return rows


def cell(response: str, gold: str, mode: str) -> str:
    response = response.replace(" ⏎ ", "\n")
    return f"{load_reward('accuracy')([''], [response], answer=[gold], mode=mode)[0]:.0f}"


def test_the_tables_of_the_document():
    pytest.importorskip("math_verify")
    responses = rows_of_table("response")
    answers = rows_of_table("answer")
    assert len(responses) >= 10
    assert len(answers) >= 20
    for response, *cells in responses:
        assert cells == [cell(response, "5", mode) for mode in ANSWER_MODES], response
    for answer, gold, marked, lenient, symbolic in answers:
        assert load_reward("math_verify")([""], [f"<answer>{answer}</answer>"], answer=[gold]) == [
            float(symbolic)
        ]
        assert cell(answer, gold, "lenient") == lenient, answer
        for response, mode in (
            (f"<answer>{answer}</answer>", "strict"),
            (f"\\boxed{{{answer}}}", "boxed"),
            (f"#### {answer}", "####"),
        ):
            assert cell(response, gold, mode) == marked, response
