"""The built-in rewards and the helpers under them, with values worked by hand."""

import sys
from fractions import Fraction

import pytest

from grpo.rewards import completion_text, load_reward
from grpo.rewards.answers import answers_equal, extract_answer, has_format, parse_number
from grpo.rewards.builtin import evaluate_expression

GOOD = "<think>2 + 2</think> <answer>4</answer>"


def test_parse_number():
    numbers = {
        "1,234": 1234, "$1,000.00": 1000, "−5": -5, "= 5": 5, "50 \\%": 50, "-$5": -5, "-\\$5": -5, "\\$-5": -5, "5 €": 5,
        "$\\$1{,}000$": 1000, "1,\\!000.5": 1000.5, "1\\ 000\\;000": 10**6, "$5$": 5, "5.": 5, ".5": Fraction(1, 2),
        "1/3": Fraction(1, 3), "1e3": 1000,
    }  # fmt: skip
    numbers |= dict.fromkeys(
        [
            "",
            ".",
            "--5",
            "12,34",
            "1\\,00",
            "5\\$6",
            "US\\$5",
            "x",
            "1/0",
            "1e99999",
            "1 2",
            "٣",
        ]
    )
    assert {text: parse_number(text) for text in numbers} == numbers


def test_equality_is_exact_and_falls_back_to_text():
    assert answers_equal("0.5", "1/2")
    assert not answers_equal("0.333333", "1/3")
    assert answers_equal(0.1, "0.10")
    assert answers_equal(72, "72.0")
    assert answers_equal("  The  Cat. ", "the cat")
    assert not answers_equal("cat", "5")
    assert not answers_equal("5", "")
    assert not answers_equal("9007199254740993", "9007199254740992")


def test_lenient_takes_the_last_number():
    texts = {
        "The answer is 1,234.": "1,234",
        "10-5": "5",
        "it is -5": "-5",
        "a −7 b": "-7",
        "= -$5.50!": "-$5.50",
    }
    texts |= {
        "now -\\$1{,}000": "-1000",
        "3€, then -5€": "-5",
        "1\\,000": "1000",
        "1{,}00": "00",
        "5\\$6": "$6",
    }
    texts |= {
        "1,2,3": "3",
        "costs $-3": "$-3",
        "x=.5": ".5",
        "1,000,000.25 in all": "1,000,000.25",
        "none": None,
    }
    assert {text: extract_answer(text, "lenient") for text in texts} == texts


def test_strict_needs_exactly_one_tag():
    texts = {
        GOOD: "4",
        "<answer> 4\n</answer> 5": "4",
        "<answer>4</answer> <think>5</think>": "4",
    }
    texts |= {"<think>5</think> <answer>4</answer> <think>5</think>": "4"}
    wrong = [
        "4",
        "<answer>4",
        "</answer>4<answer>",
        "<answer>4</answer><answer>4</answer>",
        "<answer> </answer>",
    ]
    wrong += [
        "<answer><answer>4</answer>",
        "<answer>4</answer></answer>",
        "<think><answer>4</answer></think> 5",
    ]
    wrong += ["opened by the prompt <answer>4</answer></think> 5"]
    texts |= dict.fromkeys(wrong)
    assert {text: extract_answer(text) for text in texts} == texts


def test_the_default_format_needs_each_tag_once():
    assert has_format(GOOD)
    assert has_format("\n" + GOOD + "\n")
    assert not has_format(GOOD + "x")
    assert not has_format(GOOD.replace("</think>", ""))
    assert not has_format("<think><think>a</think><answer>4</answer>")
    assert not has_format("<answer>4</answer><think>a</think>")
    assert has_format("<r>\n1\n</r>", r"<r>.*</r>")
    assert not has_format("a<r>1</r>", r"<r>.*</r>")


def test_completion_text_of_both_kinds():
    for content in ("a", [{"type": "text", "text": "a"}]):
        assert (
            completion_text([{"role": "assistant", "content": content}])
            == completion_text("a")
            == "a"
        )
    assert completion_text([{"role": "assistant", "content": None}]) == ""


def conversation(*turns):
    """Messages of the model and of others in turn."""
    roles = ["assistant", "tool"] * len(turns)
    return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


@pytest.mark.parametrize(
    ("mode", "right", "role"),
    [
        ("strict", "<answer>42</answer>", "user"),
        ("boxed", r"so \boxed{42}", "tool"),
        ("####", "#### 42", "tool"),
        ("lenient", "it is 42", "environment"),
    ],
)
def test_answers_are_read_in_the_turns_of_the_model(mode, right, role):
    said_by_a_tool = conversation("Let me look.", right, "I do not know.")
    never_said = conversation("Let me look.", right, "")
    said_by_the_model = conversation(
        "Let me look.", "Say <answer>7</answer>, \\boxed{7} or #### 7", right
    )
    said_early = conversation(right, "7", "Done.")
    completions = [said_by_a_tool, never_said, said_by_the_model, said_early]
    for completion in completions:
        completion[1]["role"] = role
    # A message without a role is the model's.
    completions.append([{"content": right}])
    accuracy = load_reward("accuracy")
    assert accuracy(["q"] * 5, completions, answer=["42"] * 5, mode=mode) == [
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
    ]


def test_accuracy():
    accuracy = load_reward("accuracy")
    texts = [GOOD, "so 4", "<answer>5</answer>", GOOD]
    assert accuracy([""] * 4, texts, answer=["4", "4", "4", None]) == [1.0, 0.0, 0.0, None]
    assert accuracy(
        ["q"], ["<SOLUTION>1,000</SOLUTION>"], gold=["$1000"], column="gold", tag="SOLUTION"
    ) == [1.0]


def test_format_and_tag_groups():
    assert load_reward("format")(["q"] * 2, [GOOD, "4"], value=0.5) == [0.5, 0.0]
    assert load_reward("format")(["q"], ["<r>\na</r>"], pattern="<r>.*</r>") == [1.0]
    tag_groups = load_reward("tag_groups")
    texts = [GOOD, GOOD + " x", "<think>", "<think><think><think>", ""]
    assert tag_groups([""] * 5, texts) == pytest.approx([0.5, 0.4, 0.1, 0.1, 0.0])
    assert tag_groups([""], [GOOD], max_value=0.25) == [0.25]


def test_exact_or_stripped():
    texts = [
        "<SOLUTION>4</SOLUTION>",
        "<SOLUTION> 4\n</SOLUTION>",
        "<SOLUTION>4.0</SOLUTION>",
        "4",
        "4",
    ]
    reward = load_reward("exact_or_stripped")
    assert reward([""] * 5, texts, answer=["4", "4", "4", "4", None], tag="SOLUTION") == [
        3.0,
        1.5,
        0.0,
        0.0,
        None,
    ]
    texts = [
        "<a>x</a><b>4</b>\n",
        "<a>x</a> <b> 4 </b>",
        "<a>x</a><b>5</b>",
        "<b>4</b>",
        "<a>x</a><b>4</b> so",
    ]
    whole = r"\s*<a>.*</a>\s*<b>(?P<answer>.+?)</b>\s*"
    assert reward([""] * 5, texts, answer=["4"] * 5, pattern=whole) == [
        3.0,
        1.5,
        0.0,
        0.0,
        0.0,
    ]


def test_pattern_answer_reads_a_group_of_a_whole_match():
    reward = load_reward("pattern_answer")
    pattern = r"<t>.*</t> <answer>\D*(?P<answer>\d[\d,.]*)?\D*</answer>"
    texts = {
        "<t>x</t> <answer>It is 10 pears</answer>": 1.0,
        "<t>x</t>\n <answer>10</answer>": 0.0,
        "<t>x</t> <answer>10</answer> pears": 0.0,
        "<t>x</t> <answer>1,0</answer>": 0.0,
        "<t>x</t> <answer>ten</answer>": 0.0,  # the group takes no part in the match
    }
    for reference in ("10", 10, "$10.00"):
        found = reward(
            [""] * len(texts), list(texts), answer=[reference] * len(texts), pattern=pattern
        )
        assert dict(zip(texts, found, strict=True)) == texts
    assert reward(
        [""],
        ["<t>x</t> <answer></answer>"],
        answer=["."],
        pattern=r"<t>.*<answer>(?P<answer>.*)</answer>",
    ) == [0.0]


def test_soft_overlong_is_dapo_equation_13():
    ids = [[0] * n for n in (1, 80, 85, 90, 100, 101)]
    rewards = load_reward("soft_overlong")([""] * 6, [""] * 6, ids, max_length=100, cache_length=20)
    assert rewards == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_countdown():
    def score(text, **args):
        rows = {"numbers": [[3, 5, 3]], "target": [24]}
        return load_reward("countdown")(["q"], [text], **rows, **args)[0]

    assert score("<answer>(3 + 5) * 3</answer>") == 1.0
    assert score("<answer>3 × (5 + 3) = 24</answer>") == 1.0
    assert (
        score("<answer>(3 + 5) * 3 = 25</answer>") == score("<answer>3 * 5 + 3 * 3</answer>") == 0.0
    )
    assert score("<answer>24</answer>", format_value=0.1) == 0.1
    assert score("(3 + 5) * 3", format_value=0.1) == 0.0
    assert load_reward("countdown")(["q"], ["x"], numbers=[[1]], target=[None]) == [None]


def test_expressions_are_exact_and_bounded():
    assert evaluate_expression("1/3 + 1/3 + 1/3") == (1, [1, 3, 1, 3, 1, 3])
    assert evaluate_expression("2 - -(3 - 1) * 4 ÷ [2]") == (6, [2, 3, 1, 4, 2])
    assert evaluate_expression(" (8 - 3 - 2) * 3 / 4 ")[0] == Fraction(9, 4)
    wrong = [
        "",
        "1 +",
        "(1",
        "1 2",
        "2 ** 3",
        "1/(2-2)",
        "1.5",
        "a",
        "3(4)",
        "1//2",
        "1e5",
        "1_000",
        "²",
        "٣+1",
        "1,2",
    ]
    wrong += ["__import__('os').getcwd()", "9" * 501, "1" + "+1" * 500]
    for text in [*wrong, "(" * 60 + "1" + ")" * 60, "(" * 5000 + "1" + ")" * 5000]:
        assert load_reward("countdown")(
            [""], [f"<answer>{text}</answer>"], numbers=[[9]], target=[9]
        ) == [0.0]
        with pytest.raises(ValueError):
            evaluate_expression(text)


RIGHT = [
    "<think>\nFirst 10 then 20</think>\n<answer>30</answer>", "<answer>30</answer>",
    "<answer>\n\\frac{60}{2}\n</answer>", "<answer>It is \\boxed{30}</answer> for 7 days",
    "<answer>31</answer> no: <answer>30</answer>",
    "<think>so <answer>31</answer></think> it is 30", "opened by the prompt: 31</think> $30$",
    "<think>31</think> $30$ <think>or 31",
]  # fmt: skip
WRONG = [
    "<think>10+20=30</think>\n<answer>31</answer>", "<answer>30</answer> no: <answer>31</answer>", "<think>10+20=30",
    "<think>so <answer>30</answer></think> 31", "opened by the prompt: $30$</think> who knows",
    "<think>31</think> <think>no, $30$", "",
]  # fmt: skip


def test_math_verify_reads_the_answer_and_never_the_thinking():
    pytest.importorskip("math_verify")
    texts = [*RIGHT, *WRONG, "30"]
    reward = load_reward("math_verify")
    scores = reward([""] * len(texts), texts, answer=["30"] * (len(texts) - 1) + [None], value=2.0)
    assert scores == [2.0] * len(RIGHT) + [0.0] * len(WRONG) + [None]
    texts = [
        "<r>30</r> 31",
        "30",
        "<answer>30</answer>",
        "<think><r>30</r></think>",
        "<r>30",
    ]
    assert reward([""] * 5, texts, answer=["30"] * 5, tag="r") == [
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ], "a tag, and nothing else"


def test_r1_zero():
    pytest.importorskip("math_verify")
    texts = {
        "2+2 is 4 </think> <answer>4</answer>": 1.0,
        "half </think> <answer>\\boxed{\\frac{8}{2}}</answer>": 1.0,
        "</think> <answer>5</answer>": 0.1,
        "</think><answer>4</answer>": 0.0,  # the scheme wants the space
        "</think> <answer>4": 0.0,
    }
    scores = load_reward("r1_zero")([""] * 5, list(texts), answer=["4"] * 5, format_value=0.1)
    assert dict(zip(texts, scores, strict=True)) == texts


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "accuracy",
            {"mode": "loose"},
            "mode must be one of 'strict', 'lenient', 'boxed', '####', got 'loose'",
        ),
        ("pattern_answer", {"pattern": "So"}, r"'So' has no group of that name"),
        (
            "soft_overlong",
            {"max_length": 10, "cache_length": 20, "completion_ids": []},
            "cache_length <= max_length",
        ),
        (
            "python_tests",
            {"memory_mb": 0},
            "each limit must be positive, got .*memory_mb=0",
        ),
        (
            "math_verify",
            {},
            r"^reward 'math_verify' needs the package math_verify .*pip install -e '\.\[math\]'$",
        ),
        ("reasoning_gym", {}, r"needs the package reasoning_gym .*'\.\[gym\]'$"),
    ],
)
def test_arguments_and_packages_are_checked_before_any_row(name, args, message, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # as if the package of this name were missing
    with pytest.raises(ValueError, match=message):
        load_reward(name)([], [], **args)
