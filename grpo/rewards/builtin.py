"""The built-in rewards that run no code of the completion.

``fn(prompts, completions, *, <arguments>, **columns)`` gives one number or ``None`` per completion; prompts and
completions are texts or lists of messages. Where a docstring names a source, the defaults are those published there.
Each function checks its arguments before any row, so a call without rows checks a configuration. The type of a default,
or else the annotation, is that of the values which ``functions.check_arguments`` accepts.
"""

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from grpo.rewards import answers
from grpo.system import import_extra

Rewards = list[float | None]
"""One reward per completion. ``None`` marks a row that cannot be scored."""
COMPARING = ("accuracy", "pattern_answer", "exact_or_stripped", "math_verify", "r1_zero")
"""The built-in rewards that compare an answer with :func:`answers.reference_texts` of the column ``column``."""
TAGS_PATTERN = r"(<think>)|(</think>)|(<answer>)|(</answer>)(\s*\Z)?"
"""Five groups: one for each tag, and one that matches if nothing follows the last tag."""
MAX_LENGTH = 500
"""Characters of an arithmetic expression. There is no power operator, so this bounds the size of every value too."""
MAX_PARENTHESES = 50
"""Opening parentheses of an arithmetic expression."""
_OTHER_OPERATORS = str.maketrans("×·÷[]", "**/()") | answers.MINUS_SIGNS
_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def accuracy(
    prompts,
    completions,
    *,
    mode="strict",
    value=1.0,
    tag="answer",
    column="answer",
    **columns,
) -> Rewards:
    """``value`` where the answer, found by :func:`answers.extract_answer`, equals the reference answer, else 0."""
    answers.extract_answer("", mode, tag)
    read = partial(answers.extract_answer, mode=mode, tag=tag)

    def score(answer: str, reference: str) -> float:
        return value if answers.answers_equal(answer, reference) else 0.0

    return _compare(read, score, completions, columns, column)


def format(prompts, completions, *, pattern=None, value=1.0, **columns) -> Rewards:
    """``value`` where the whole response matches ``pattern``; the default is :data:`answers.DEFAULT_FORMAT`."""
    if pattern is None:
        pattern = answers.DEFAULT_FORMAT
    compiled = re.compile(pattern, re.DOTALL)
    texts = map(answers.completion_text, completions)
    return [float(value) if compiled.fullmatch(text) else 0.0 for text in texts]


def tag_groups(
    prompts,
    completions,
    *,
    pattern=TAGS_PATTERN,
    per_group=0.1,
    max_value=0.5,
    **columns,
) -> Rewards:
    """``per_group`` for each group of ``pattern`` that matches anywhere in the response, at most ``max_value``.

    A repeated match earns nothing. Source of the values (0.1 and 0.5): "The One Big Beautiful Blog on GRPO".
    """
    compiled = re.compile(pattern, re.DOTALL)
    if not compiled.groups:
        raise ValueError(f"tag_groups counts the groups of its pattern, and {pattern!r} has none")

    rewards = []
    for completion in completions:
        matched = set()
        for match in compiled.finditer(answers.completion_text(completion)):
            matched.update(n for n, text in enumerate(match.groups()) if text is not None)
        rewards.append(min(per_group * len(matched), float(max_value)))
    return rewards


def pattern_answer(
    prompts,
    completions,
    *,
    pattern: str,
    value=1.0,
    group="answer",
    column="answer",
    **columns,
) -> Rewards:
    """``value`` where the whole response matches ``pattern`` and the group equals the reference answer, else 0."""

    def score(answer: str, reference: str) -> float:
        is_right = answer.strip() and answers.answers_equal(answer, reference)
        return value if is_right else 0.0

    return _compare(_group_reader(pattern, group), score, completions, columns, column)


def exact_or_stripped(
    prompts,
    completions,
    *,
    exact=3.0,
    stripped=1.5,
    tag="answer",
    pattern=None,
    column="answer",
    **columns,
) -> Rewards:
    """``exact`` where the text in the tag is the reference answer, ``stripped`` where white space around it differs.

    With ``pattern``, which the whole response must match, the text is its group ``(?P<answer>...)``; no tag is read.
    Source of the values: "The Illustrated GRPO" and its Gemma 3 recipe (3.0 and 1.5, tag ``SOLUTION``).
    """
    read = partial(answers.tag_content, tag=tag)
    if pattern is not None:
        read = _group_reader(pattern, "answer")

    def score(answer, reference):
        if answer == reference:
            return exact
        return stripped if answer.strip() == reference.strip() else 0.0

    return _compare(read, score, completions, columns, column)


def soft_overlong(
    prompts,
    completions,
    completion_ids,
    *,
    max_length: int,
    cache_length: int,
    **columns,
) -> Rewards:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13, with 20480 and 4096 tokens).

    0 for up to ``max_length - cache_length`` tokens, then a linear decrease to -1 at ``max_length``, and -1 beyond.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"soft_overlong needs 0 < cache_length <= max_length, got {cache_length} and {max_length}")
    free_length = max_length - cache_length
    rewards = []
    for ids in completion_ids:
        remaining = (free_length - len(ids)) / cache_length
        rewards.append(max(-1.0, min(0.0, remaining)))
    return rewards


def math_verify(prompts, completions, *, value=1.0, tag=None, column="answer", **columns) -> Rewards:
    """``value`` where math-verify finds the answer after the thinking equal to the reference answer, else 0.

    The answer is the text inside the last ``<answer>...</answer>``, or without one the last expression. With ``tag`` it
    is the text inside the last such tag. ``None`` also where the reference answer cannot be parsed.
    """
    import_extra("math_verify", "math", "reward 'math_verify'")

    def read(text: str) -> list[Any]:
        response = answers.after_thinking(text)
        answer = answers.last_tag_content(response, tag or "answer")
        if answer is None and tag is None:
            return answers.find_expression(response)
        return answers.parse_answer(answer or "")

    def score(found, reference):
        expected = answers.parse_answer(reference)
        if not expected:
            return None
        return value if answers.same_expression(expected, found) else 0.0

    return _compare(read, score, completions, columns, column)


def r1_zero(
    prompts,
    completions,
    *,
    value=1.0,
    format_value=0.0,
    column="answer",
    **columns,
) -> Rewards:
    """The reward of "Understanding R1-Zero-Like Training" (arXiv 2503.20783), for prompts that end with ``<think>``.

    ``value`` for format and answer, ``format_value`` for the format alone, else 0. The format is ``</think> <answer>``
    and ``</answer>`` in the response. Answers are compared by :func:`answers.answers_equivalent`.
    """
    import_extra("math_verify", "math", "reward 'r1_zero'")

    def read(text: str) -> str | None:
        if "</think> <answer>" not in text or "</answer>" not in text:
            return None
        return text.split("<answer>")[-1].replace("</answer>", "")

    def score(answer: str, reference: str) -> float:
        return value if answers.answers_equivalent(answer, reference) else format_value

    return _compare(read, score, completions, columns, column)


# The runner calls these functions row by row, so that one slow expression does not use up the time limit of its batch.
math_verify.row_by_row = True
r1_zero.row_by_row = True


def reasoning_gym(
    prompts,
    completions,
    *,
    value=1.0,
    tag="answer",
    column="answer",
    metadata_column="metadata",
    **columns,
) -> Rewards:
    """``value`` times the score, 0 to 1, that reasoning-gym gives the text in the tag; 0 without a well-formed tag.

    The row's metadata names the task. Many of its scorers give a wrong answer 0.01, some give partial scores.
    """
    library = import_extra("reasoning_gym", "gym", "reward 'reasoning_gym'")

    def score(completion, prompt, reference, metadata):
        if not metadata:
            return None
        answer = answers.extract_answer(answers.completion_text(completion), "strict", tag)
        if answer is None:
            return 0.0
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        entry = {"question": question, "answer": reference, "metadata": metadata}
        score_answer = library.get_score_answer_fn(metadata["source_dataset"])
        return float(value * score_answer(answer, entry))

    # The answer of a row may be None: a task with many right answers has a scorer that reads the metadata alone.
    values = [columns[name] if completions else [] for name in (column, metadata_column)]
    return [score(*row) for row in zip(completions, prompts, *values, strict=True)]


def countdown(
    prompts,
    completions,
    *,
    value=1.0,
    format_value=0.0,
    tag="answer",
    numbers_column="numbers",
    target_column="target",
    **columns,
) -> Rewards:
    """``value`` where the expression in the tag uses each number of the row exactly once and equals the row's target.

    ``format_value`` (TinyZero: 0.1) where the tag contains anything else, 0 without a tag. The expression may be the
    left side of an equation (``(3 + 5) * 3 = 24``) that holds. An error where the row has other values than numbers.
    """

    def score(completion, numbers, target):
        if numbers is None or target is None:
            return None
        # Read before the completion, so that a row which no answer solves is an error from the first step on.
        available = sorted(map(_fraction, numbers))
        goal = _fraction(target)
        text = answers.extract_answer(answers.completion_text(completion), tag=tag)
        if text is None:
            return 0.0
        return float(value if _solves_countdown(text, available, goal) else format_value)

    values = [columns[name] if completions else [] for name in (numbers_column, target_column)]
    return [score(*row) for row in zip(completions, *values, strict=True)]


def _fraction(number: Any) -> Fraction:
    return Fraction(str(number).replace(",", ""))


def _solves_countdown(text: str, available: list[Fraction], goal: Fraction) -> bool:
    expression, equals, claimed = text.partition("=")
    try:
        result, used = evaluate_expression(expression)
    except ValueError:
        return False
    is_consistent = not equals or answers.parse_number(claimed) == result
    return is_consistent and result == goal and sorted(used) == available


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of integers, ``+ - * /``, signs and parentheses, and its integers in order.

    ``ValueError`` if ``text`` is anything else, divides by zero, or exceeds ``MAX_LENGTH`` or ``MAX_PARENTHESES``.
    """
    expression = " ".join(text.translate(_OTHER_OPERATORS).split())
    is_too_long = len(text) > MAX_LENGTH or expression.count("(") > MAX_PARENTHESES
    if is_too_long or re.search(r"[^-+*/() 0-9]", expression):
        raise ValueError("not an expression of integers, + - * / and parentheses, or too long")
    expression = re.sub(r"(?<![0-9])0+(?=[0-9])", "", expression)  # Python refuses 007
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    # KeyError, AttributeError: an operator that is not allowed, or no operator but for example a call.
    except (
        SyntaxError,
        ZeroDivisionError,
        RecursionError,
        MemoryError,
        KeyError,
        AttributeError,
    ) as error:
        raise ValueError(f"an expression without a value: {error}") from None
    integers = [int(digits) for digits in re.findall("[0-9]+", expression)]
    return value, integers


def _value(node: Any) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return _OPERATIONS[type(node.op)](*map(_value, operands))


class EnvironmentReward:
    """The reward that an environment of this class gives itself: ``get_reward()``, or the sum of its turns' rewards."""

    def __init__(self, class_name: str):
        self.class_name = class_name

    def __call__(self, prompts, completions, environment_names=(), environment_rewards=(), **columns) -> Rewards:
        pairs = zip(environment_names, environment_rewards, strict=True)
        return [reward if name == self.class_name else None for name, reward in pairs]


def _compare(
    read: Callable[[str], Any],
    score: Callable[[Any, str], float | None],
    completions: Sequence[Any],
    columns: dict[str, Any],
    column: str,
) -> Rewards:
    """For each completion the best ``score(read(text), reference)`` over the reference answers of its row.

    0 where ``read`` finds no answer (``None``); ``None`` without a reference answer that ``score`` can use.
    """
    rewards: Rewards = []
    values = columns[column] if completions else []
    for completion, value in zip(completions, values, strict=True):
        references = answers.reference_texts(value)
        answer = read(answers.completion_text(completion)) if references else None
        scores = []
        for reference in references:
            found = 0.0 if answer is None else score(answer, reference)
            if found is not None:
                scores.append(float(found))
        rewards.append(max(scores, default=None))
    return rewards


def _group_reader(pattern: str, group: str) -> Callable[[str], str | None]:
    """A function that reads a named group; ``None`` unless the whole text matches and the group takes part."""
    compiled = re.compile(pattern, re.DOTALL)
    if group not in compiled.groupindex:
        raise ValueError(f"the answer is read from a group (?P<{group}>...), and {pattern!r} has no group of that name")

    def read(text):
        match = compiled.fullmatch(text)
        return match[group] if match else None

    return read
