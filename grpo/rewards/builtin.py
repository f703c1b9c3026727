"""The built-in rewards, except ``python_tests``, which runs the code in a completion.

A reward ``fn(prompts, completions, *, <settings>, **columns)`` returns one number or ``None`` per
completion. Prompts and completions are texts or lists of messages. ``columns`` are the columns of
the dataset, with one value per completion. If a docstring names a source of the defaults, the
source published these values.

Each function checks its settings before it reads any row, so a call without rows checks a
configuration. ``functions.check_arguments`` checks the types of settings: a setting has the type of
its default, or else the annotated type.
"""

import ast
import operator
import re
from fractions import Fraction
from functools import partial

from grpo.rewards import answers
from grpo.system import import_extra

Rewards = list[float | None]
"""One reward per completion. ``None`` marks a completion that cannot be scored."""
ANSWER_REWARDS = ("accuracy", "pattern_answer", "exact_or_stripped", "math_verify", "r1_zero")
"""Names of the built-in rewards that compare an answer with a reference answer.

Their setting ``column`` names the column of the reference answers.
"""
TAGS_PATTERN = r"(<think>)|(</think>)|(<answer>)|(</answer>)(\s*\Z)?"
"""Pattern with five groups: one for each tag, and one for ``</answer>`` at the very end."""
MAX_EXPRESSION_LENGTH = 500
"""Largest number of characters in an expression of :func:`evaluate_expression`.

Since expressions have no power operator, the limit also bounds the size of every value.
"""
_OPERATOR_VARIANTS = str.maketrans("×·÷[]", "**/()") | answers.MINUS_SIGNS
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
"""Class of an operator in ``ast`` -> its function, for :func:`evaluate`.

The quotient of two integers is a float.
"""


def score_rows(score, completions, columns, *names) -> Rewards:
    """Return ``score(text, *values)`` for each completion.

    ``text`` is the text of the completion. ``values`` are the entries of its row in some columns.

    Args:
        names: names of the columns, in the order of the values.
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
    """Compare each completion's answer with the reference answers of its row. Return the scores.

    The best score over the reference answers counts. A completion without an answer scores 0. The
    score is ``None`` if the row has no reference answer, or if every grade is ``None``.

    Args:
        read: text of a completion -> its answer, or None.
        grade: answer, reference answer -> a factor that multiplies ``value``. True counts as 1.
            False or 0 gives the score ``otherwise``. None says that the reference answer cannot be
            compared.
        column: name of the column of the reference answers.
    """

    def score(text, reference_answer):
        references = answers.reference_texts(reference_answer)
        if not references:
            return None
        answer = read(text)
        if answer is None:
            return 0.0
        scores = []
        for reference in references:
            factor = grade(answer, reference)
            if factor is not None:
                scores.append(value * factor if factor else otherwise)
        # Any item of a list is right, so the best one counts.
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
    """Score ``value`` if the answer equals the reference answer, else 0.

    :func:`answers.extract_answer` reads the answer. It gets ``mode`` and ``tag``.
    """
    read = partial(answers.extract_answer, mode=mode, tag=tag)
    read("")  # an unknown mode is an error also in a call without rows
    return grade_answers(read, answers.answers_equal, completions, columns, column, value)


def format(
    prompts,
    completions,
    *,
    pattern=None,
    value=1.0,
    **columns,
) -> Rewards:
    """Score ``value`` if the whole response matches ``pattern``, else 0.

    Default of ``pattern``: :data:`answers.DEFAULT_FORMAT`.
    """
    if pattern is None:
        pattern = answers.DEFAULT_FORMAT
    compiled = re.compile(pattern, re.DOTALL)

    def score(text):
        return value if compiled.fullmatch(text) else 0.0

    return score_rows(score, completions, columns)


def tag_groups(
    prompts,
    completions,
    *,
    pattern=TAGS_PATTERN,
    per_group=0.1,
    max_value=0.5,
    **columns,
) -> Rewards:
    """Score ``per_group`` for each group of ``pattern`` that matches anywhere in the response.

    A group that matches several times counts once. The total score is at most ``max_value``. Source
    of the defaults 0.1 and 0.5: "The One Big Beautiful Blog on GRPO".
    """
    compiled = re.compile(pattern, re.DOTALL)
    if not compiled.groups:
        raise ValueError(f"tag_groups counts the groups of its pattern, and {pattern!r} has none")

    def score(text):
        matched_groups = set()
        for match in compiled.finditer(text):
            for number, part in enumerate(match.groups()):
                if part is not None:
                    matched_groups.add(number)
        return min(per_group * len(matched_groups), max_value)

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
    """Score ``value`` if the response has the reference answer in a group of ``pattern``, else 0.

    The whole response must match the pattern. ``group`` is the name of the group.
    """
    read = _group_reader(pattern, group)

    def grade(answer, reference):
        # An empty answer would be equal to a reference answer that is a period alone.
        return answer.strip() and answers.answers_equal(answer, reference)

    return grade_answers(read, grade, completions, columns, column, value)


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
    """Score ``exact`` if the answer equals the reference answer exactly.

    Score ``stripped`` if the two differ only in the white space around them, else 0. The answer is
    the text in the tag. If ``pattern`` is set, no tag is read: the whole response must match the
    pattern, and the answer is the text of the group ``(?P<answer>...)``. Source of the defaults 3.0
    and 1.5: "The Illustrated GRPO" and its Gemma 3 recipe, which has the tag ``SOLUTION``.
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
    """Return a function that matches a whole text with ``pattern``, and returns a named group.

    The function returns ``None`` if the text does not match, or if the group is not in the match.
    """
    compiled = re.compile(pattern, re.DOTALL)
    if group not in compiled.groupindex:
        raise ValueError(
            f"the answer is read from a group (?P<{group}>...), "
            f"and {pattern!r} has no group of that name"
        )

    def read(text):
        match = compiled.fullmatch(text)
        return match[group] if match else None

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
    """Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13).

    The score is 0 up to ``max_length - cache_length`` tokens. It then falls linearly to -1 at
    ``max_length`` tokens, and stays -1 beyond. DAPO sets ``max_length`` to 20480 tokens and
    ``cache_length`` to 4096 tokens.
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(
            "soft_overlong needs 0 < cache_length <= max_length, "
            f"got {cache_length} and {max_length}"
        )
    rewards = []
    for ids in completion_ids:
        remaining_length = max_length - cache_length - len(ids)
        rewards.append(max(-1.0, min(0.0, remaining_length / cache_length)))
    return rewards


def math_verify(
    prompts,
    completions,
    *,
    value=1.0,
    tag=None,
    column="answer",
    **columns,
) -> Rewards:
    """Score ``value`` if math-verify judges the answer equal to the reference answer, else 0.

    The thinking is not read. The answer is the text inside the last ``<tag>...</tag>``. If ``tag``
    is not set, the answer is the text inside the last ``<answer>...</answer>`` or, without this
    tag, the last expression. The score is ``None`` if no reference answer can be parsed.
    """
    import_extra("math_verify", "math", "reward 'math_verify'")

    def read(text):
        response = answers.after_thinking(text)
        answer = answers.last_tag_content(response, tag or "answer")
        if answer is None and tag is None:
            return answers.find_expression(response)
        return answers.parse_answer(answer or "")

    def grade(answer, reference):
        expected = answers.parse_answer(reference)
        return answers.same_expression(expected, answer) if expected else None

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
    """Reward of "Understanding R1-Zero-Like Training" (arXiv 2503.20783).

    The prompts end with ``<think>``. A response has the right format if it contains
    ``</think> <answer>`` and ``</answer>``. In this format a right answer scores ``value``, and a
    wrong answer ``format_value``. Any other response scores 0. Answers are compared by
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
# limit of a whole batch.
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
    """Score ``value`` times the score, 0 to 1, that reasoning-gym gives to the text in the tag.

    The row's metadata names a task of reasoning-gym, and the scorer of the task reads the text. The
    score is 0 without a well-formed tag, or if the scorer raises. It is ``None`` without metadata.
    Many scorers give 0.01 to a wrong answer, and some give partial scores.
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
        except Exception:  # the scorer cannot read the text
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
    """Score ``value`` if the expression in the tag uses each number of the row once and equals the
    row's target.

    Any other text in the tag scores ``format_value``, which is 0.1 in TinyZero. A response without
    the tag scores 0. The expression may be the left side of a true equation, such as
    ``(3 + 5) * 3 = 24``.

    Raises:
        ValueError: if the numbers or the target of a row cannot be read as numbers.
    """

    def score(text, numbers, target):
        if numbers is None or target is None:
            return None
        # The numbers are read before the answer, so that a broken row is an error from the first
        # step on, and not only when the policy has learned the format.
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
        # An equation with a wrong right side is wrong, even if its left side equals the target.
        results = {result, *map(answers.parse_number, claimed)}
        is_solved = results == {goal} and sorted(used) == sorted(available)
        return value if is_solved else format_value

    return score_rows(score, completions, columns, numbers_column, target_column)


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression, and the integers in it, in order.

    Raises:
        ValueError: if ``text`` contains anything but integers, ``+ - * /``, signs and parentheses,
            if it has no value, is longer than ``MAX_EXPRESSION_LENGTH``, or has more than 50
            opening parentheses.
    """
    expression = " ".join(text.translate(_OPERATOR_VARIANTS).split())
    # The text is checked before it is parsed: it may be nested too deep for Python's parser.
    is_too_long = len(text) > MAX_EXPRESSION_LENGTH
    if is_too_long or re.search(r"[^-+*/() 0-9]|(?:\([^(]*){51}", expression):
        raise ValueError("not an expression of integers, + - * / and parentheses, or too long")
    # Leading zeros are removed, since Python refuses 007.
    expression = re.sub(r"(?<![0-9])0+(?=[0-9])", "", expression)
    try:
        # The quotient of two integers or fractions is a fraction.
        value = evaluate(expression, ARITHMETIC | {ast.Div: Fraction})
    except Exception as error:  # Python's parser raises errors of several types
        raise ValueError(f"an expression without a value: {error}") from None
    integers = re.findall("[0-9]+", expression)
    return Fraction(value), list(map(int, integers))


def evaluate(expression: str, operations: dict) -> Fraction | float | complex:
    """Return the value of an expression that consists of numbers and operators.

    Args:
        operations: class of an operator in ``ast`` -> the function that computes it.

    Raises:
        ValueError: if the expression contains anything but numbers and these operators.
        Exception: any error of Python's parser or of an operation.
    """

    # eval() would run any code, and the text comes from the model.
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
    """Return the rewards that the environments gave to the completions.

    An environment's reward is the value of its ``get_reward()``, or the sum of the rewards of its
    turns.
    """
    # The rollout has fetched the rewards from the processes where the environments live.
    return environment_rewards
