"""The built-in rewards that run no code of the completion.

``fn(prompts, completions, *, <arguments>, **columns)`` gives one number or ``None`` per completion;
prompts and completions are texts or lists of messages. Where a docstring names a source, the
defaults are those published there. Each function checks its arguments before any row, so a call
without rows checks a configuration. The type of a default, or else the annotation, is that of the
values which ``functions.check_arguments`` accepts.
"""

import ast
import operator
import re
from fractions import Fraction
from functools import partial

from grpo.rewards import answers
from grpo.system import import_extra

Rewards = list[float | None]
"""One reward per completion. ``None`` marks a row that cannot be scored."""
COMPARING = ("accuracy", "pattern_answer", "exact_or_stripped", "math_verify", "r1_zero")
"""The built-in rewards that compare an answer with :func:`answers.reference_texts` of the column
``column``.
"""
TAGS_PATTERN = r"(<think>)|(</think>)|(<answer>)|(</answer>)(\s*\Z)?"
"""Five groups: one for each tag, and one that matches if nothing follows the last tag."""
MAX_LENGTH = 500
"""Characters of an arithmetic expression. There is no power operator, so this bounds the size of
every value too.
"""
_OTHER_OPERATORS = str.maketrans("×·÷[]", "**/()") | answers.MINUS_SIGNS
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
"""Operators for :func:`evaluate`."""


def score_rows(score, completions, columns, *names) -> Rewards:
    """``score(text, *values)`` for each completion: its text, and its row's values of the columns
    ``names``.
    """
    # The call without rows, which checks a configuration, has no columns either.
    values = [columns[name] if completions else [] for name in names]
    texts = map(answers.completion_text, completions)
    return [score(*row) for row in zip(texts, *values, strict=True)]


def grade_answers(
    read,
    grade,
    completions,
    columns,
    column,
    value=1.0,
    otherwise=0.0,
) -> Rewards:
    """The best score of each completion's answer, ``read(text)``, over the reference answers of its
    row.

    ``grade(answer, reference)`` is ``True`` or a number by which ``value`` is multiplied, or
    ``False`` or 0 for ``otherwise``. 0 without an answer; ``None`` without a reference answer, or
    if every grade is ``None``.
    """

    def score(text, value_of_row):
        references = answers.reference_texts(value_of_row)
        if not references:
            return None
        answer = read(text)
        if answer is None:
            return 0.0
        grades = [grade(answer, reference) for reference in references]
        scores = [value * part if part else otherwise for part in grades if part is not None]
        return max(scores, default=None)

    return score_rows(score, completions, columns, column)


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
    """``value`` where the answer, found by :func:`answers.extract_answer`, equals the reference
    answer, else 0.
    """
    read = partial(answers.extract_answer, mode=mode, tag=tag)
    read("")  # checks the mode
    return grade_answers(read, answers.answers_equal, completions, columns, column, value)


def format(
    prompts,
    completions,
    *,
    pattern=None,
    value=1.0,
    **columns,
) -> Rewards:
    """``value`` where the whole response matches ``pattern``; the default is
    :data:`answers.DEFAULT_FORMAT`.
    """
    if pattern is None:
        pattern = answers.DEFAULT_FORMAT
    compiled = re.compile(pattern, re.DOTALL)
    return score_rows(
        lambda text: value if compiled.fullmatch(text) else 0.0,
        completions,
        columns,
    )


def tag_groups(
    prompts,
    completions,
    *,
    pattern=TAGS_PATTERN,
    per_group=0.1,
    max_value=0.5,
    **columns,
) -> Rewards:
    """``per_group`` for each group of ``pattern`` that matches anywhere in the response, at most
    ``max_value``.

    A repeated match earns nothing. Source of the values (0.1 and 0.5): "The One Big Beautiful Blog
    on GRPO".
    """
    compiled = re.compile(pattern, re.DOTALL)
    if not compiled.groups:
        raise ValueError(f"tag_groups counts the groups of its pattern, and {pattern!r} has none")

    def score(text):
        matched = set()
        for match in compiled.finditer(text):
            matched.update(n for n, part in enumerate(match.groups()) if part is not None)
        return min(per_group * len(matched), max_value)

    return score_rows(score, completions, columns)


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
    """``value`` where the whole response matches ``pattern`` and the group equals the reference
    answer, else 0.
    """
    return grade_answers(
        _group_reader(pattern, group),
        # An empty answer would be equal to a reference answer that is a period alone.
        lambda answer, reference: answer.strip() and answers.answers_equal(answer, reference),
        completions,
        columns,
        column,
        value,
    )


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
    """``exact`` where the text in the tag is the reference answer, ``stripped`` where white space
    around it differs.

    With ``pattern``, which the whole response must match, the text is its group
    ``(?P<answer>...)``; no tag is read. Source of the values: "The Illustrated GRPO" and its Gemma
    3 recipe (3.0 and 1.5, tag ``SOLUTION``).
    """
    read = partial(answers.tag_content, tag=tag)
    if pattern is not None:
        read = _group_reader(pattern, "answer")

    def grade(answer, reference):
        if answer == reference:
            return exact
        return stripped if answer.strip() == reference.strip() else 0.0

    return grade_answers(read, grade, completions, columns, column)


def _group_reader(pattern: str, group: str):
    """A function that reads a named group; ``None`` unless the whole text matches and the group
    takes part.
    """
    compiled = re.compile(pattern, re.DOTALL)
    if group not in compiled.groupindex:
        raise ValueError(
            f"the answer is read from a group (?P<{group}>...), and {pattern!r} has no group of that name"
        )

    def read(text):
        match = compiled.fullmatch(text)
        return match and match[group]

    return read


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

    0 for up to ``max_length - cache_length`` tokens, then a linear decrease to -1 at
    ``max_length``, and -1 beyond.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(
            f"soft_overlong needs 0 < cache_length <= max_length, got {cache_length} and {max_length}"
        )
    free_length = max_length - cache_length
    remaining = [(free_length - len(ids)) / cache_length for ids in completion_ids]
    return [max(-1.0, min(0.0, part)) for part in remaining]


def math_verify(
    prompts,
    completions,
    *,
    value=1.0,
    tag=None,
    column="answer",
    **columns,
) -> Rewards:
    """``value`` where math-verify finds the answer after the thinking equal to the reference
    answer, else 0.

    The answer is the text inside the last ``<answer>...</answer>``, or without one the last
    expression. With ``tag`` it is the text inside the last such tag. ``None`` also where the
    reference answer cannot be parsed.
    """
    import_extra("math_verify", "math", "reward 'math_verify'")

    def read(text):
        response = answers.after_thinking(text)
        answer = answers.last_tag_content(response, tag or "answer")
        if answer is None and tag is None:
            return answers.find_expression(response)
        return answers.parse_answer(answer or "")

    def grade(found, reference):
        expected = answers.parse_answer(reference)
        return answers.same_expression(expected, found) if expected else None

    return grade_answers(read, grade, completions, columns, column, value)


def r1_zero(
    prompts,
    completions,
    *,
    value=1.0,
    format_value=0.0,
    column="answer",
    **columns,
) -> Rewards:
    """The reward of "Understanding R1-Zero-Like Training" (arXiv 2503.20783), for prompts that end
    with ``<think>``.

    ``value`` for format and answer, ``format_value`` for the format alone, else 0. The format is
    ``</think> <answer>`` and ``</answer>`` in the response. Answers are compared by
    :func:`answers.answers_equivalent`.
    """
    import_extra("math_verify", "math", "reward 'r1_zero'")

    def read(text):
        if "</think> <answer>" not in text or "</answer>" not in text:
            return None
        return text.split("<answer>")[-1].replace("</answer>", "")

    return grade_answers(
        read,
        answers.answers_equivalent,
        completions,
        columns,
        column,
        value,
        otherwise=format_value,
    )


# The runner calls these functions row by row, so that one slow expression does not use up the time
# limit of its batch.
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
    """``value`` times the score, 0 to 1, that reasoning-gym gives the text in the tag; 0 without a
    well-formed tag, and where the task's scorer raises.

    The row's metadata names the task. Many of its scorers give a wrong answer 0.01, some give
    partial scores.
    """
    library = import_extra("reasoning_gym", "gym", "reward 'reasoning_gym'")

    # The reference of a row may be None: a task with many right answers has a scorer that reads the
    # metadata alone.
    def score(text, prompt, reference, metadata):
        if not metadata:
            return None
        answer = answers.extract_answer(text, tag=tag)
        if answer is None:
            return 0.0
        question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        entry = {"question": question, "answer": reference, "metadata": metadata}
        arguments = metadata.get("arguments_of_task", {})
        task = library.create_dataset(metadata["source_dataset"], **arguments)
        try:
            return value * task.score_answer(answer, entry)
        except Exception:  # of a scorer that cannot read the text
            return 0.0

    columns["prompts"] = prompts
    return score_rows(score, completions, columns, "prompts", column, metadata_column)


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
    """``value`` where the expression in the tag uses each number of the row exactly once and equals
    the row's target.

    ``format_value`` (TinyZero: 0.1) where the tag contains anything else, 0 without a tag. The
    expression may be the left side of an equation (``(3 + 5) * 3 = 24``) that holds. An error where
    the row has other values than numbers.
    """

    def score(text, numbers, target):
        if numbers is None or target is None:
            return None
        # Read before the answer, so that a row which no answer solves is an error from the first
        # step on.
        texts = [str(number).replace(",", "") for number in [*numbers, target]]
        *available, goal = map(Fraction, texts)
        answer = answers.extract_answer(text, tag=tag)
        if answer is None:
            return 0.0
        expression, *claimed = answer.split("=", 1)
        try:
            result, used = evaluate_expression(expression)
        except ValueError:
            return format_value
        # The result, and what the right side of an equation says that it is.
        results = {result, *map(answers.parse_number, claimed)}
        is_solved = results == {goal} and sorted(used) == sorted(available)
        return value if is_solved else format_value

    return score_rows(score, completions, columns, numbers_column, target_column)


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of integers, ``+ - * /``, signs and parentheses, and its
    integers in order.

    ``ValueError`` if ``text`` is anything else, divides by zero, exceeds ``MAX_LENGTH`` or opens 51
    parentheses.
    """
    expression = " ".join(text.translate(_OTHER_OPERATORS).split())
    if len(text) > MAX_LENGTH or re.search(r"[^-+*/() 0-9]|(?:\([^(]*){51}", expression):
        raise ValueError("not an expression of integers, + - * / and parentheses, or too long")
    expression = re.sub(r"(?<![0-9])0+(?=[0-9])", "", expression)  # Python refuses 007
    try:
        # The quotient of two integers or fractions is a fraction.
        value = evaluate(expression, ARITHMETIC | {ast.Div: Fraction})
    # Of any type: Python's parser has many for text that is no expression.
    except Exception as error:
        raise ValueError(f"an expression without a value: {error}") from None
    integers = re.findall("[0-9]+", expression)
    return Fraction(value), list(map(int, integers))


def evaluate(expression: str, operations: dict) -> Fraction | float | complex:
    """The value of an expression of numbers and operators (a class of ``ast`` -> the function that
    computes it).

    ``ValueError`` for any other expression of Python, and any error of Python's parser or of a
    function.
    """

    def value(node):
        if type(getattr(node, "value", None)) in (int, float):
            return node.value
        operation = operations.get(type(getattr(node, "op", None)))
        if operation is None:
            raise ValueError("not an arithmetic expression")
        operands = [child for child in ast.iter_child_nodes(node) if child is not node.op]
        return operation(*map(value, operands))

    return value(ast.parse(expression, mode="eval").body)


def environment(prompts, completions, environment_rewards=(), **columns) -> Rewards:
    """The reward that the environment gives itself: ``get_reward()``, or the sum of its turns'
    rewards.
    """
    return environment_rewards
