"""The built-in rewards, except ``python_tests``, which runs code of the completion.

``fn(prompts, completions, *, <settings>, **columns)`` returns one number or ``None`` per
completion. Prompts and completions are texts or lists of messages. Where a docstring names a
source, the defaults are those published there.

Each function checks its settings before any row, so a call without rows checks a configuration. The
type of a default, or else the annotation, is the type that ``functions.check_arguments`` accepts.
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
ANSWER_REWARDS = ("accuracy", "pattern_answer", "exact_or_stripped", "math_verify", "r1_zero")
"""The built-in rewards that compare an answer with the reference answer in the column ``column``.
"""
TAGS_PATTERN = r"(<think>)|(</think>)|(<answer>)|(</answer>)(\s*\Z)?"
"""Five groups: one for each tag, and one that matches if nothing follows the last tag."""
MAX_EXPRESSION_LENGTH = 500
"""Characters of an arithmetic expression. There is no power operator, so this bounds the size of
every value too.
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
"""Operators for :func:`evaluate`. The quotient of two integers is a float."""


def score_rows(score, completions, columns, *names) -> Rewards:
    """Return ``score(text, *values)`` for each completion: its text, and values of its row.

    Args:
        names: the columns of these values.
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
    """Return the best score of each completion's answer over the reference answers of its row.

    0 without an answer; ``None`` without a reference answer, or if every grade is ``None``.

    Args:
        read: text of a completion -> its answer, or None.
        grade: answer, reference answer -> a factor of ``value``; True counts as 1, False or 0 means
            ``otherwise``, and None that the reference cannot be compared.
        column: column of the reference answers.
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
    """``value`` where :func:`answers.extract_answer` gives the reference answer, else 0."""
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
    """``value`` where the whole response matches ``pattern``, else 0.

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
    """``per_group`` for each group of ``pattern`` that matches anywhere in the response, at most
    ``max_value``.

    A repeated match earns nothing. Source of the values (0.1 and 0.5): "The One Big Beautiful Blog
    on GRPO".
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
    """``value`` where the whole response matches ``pattern`` and its named group has the reference
    answer, else 0.
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
    """``exact`` where the text in the tag is the reference answer to the character, ``stripped``
    where white space around it differs.

    With ``pattern``, which the whole response must match, the text is that of its group
    ``(?P<answer>...)``, and no tag is read. Source of the values: "The Illustrated GRPO" and its
    Gemma 3 recipe (3.0 and 1.5, tag ``SOLUTION``).
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
    """Return a function that reads a named group of a text that matches the pattern as a whole.

    The function returns ``None`` if the text does not match, or the group takes no part in it.
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
    """Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13, with 20480 and 4096 tokens).

    0 for up to ``max_length - cache_length`` tokens, then a linear decrease to -1 at
    ``max_length``, and -1 beyond.
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
    """``value`` where math-verify takes the answer for equal to the reference answer, else 0.

    The answer is the text inside the last ``<answer>...</answer>`` after the thinking or, without
    such a tag, the last expression there. With ``tag`` it is the text inside the last such tag.
    ``None`` also where the reference answer cannot be parsed.
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
    """Reward of "Understanding R1-Zero-Like Training" (arXiv 2503.20783), for prompts that end with
    ``<think>``.

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
    """``value`` times the score, 0 to 1, that reasoning-gym gives the text in the tag.

    0 without a well-formed tag, and where the task's scorer raises. The row's metadata names the
    task. Many scorers give a wrong answer 0.01, some give partial scores.
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
    """``value`` where the expression in the tag uses each number of the row once and equals the
    row's target.

    ``format_value`` (TinyZero: 0.1) where the tag contains anything else, 0 without a tag. The
    expression may be the left side of a true equation, such as ``(3 + 5) * 3 = 24``.

    Raises:
        ValueError: if the row has other values than numbers.
    """

    def score(text, numbers, target):
        if numbers is None or target is None:
            return None
        # Read before the answer, so that a broken row is an error from the first step on, and not
        # only when the policy has learned the format.
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
    """Return the exact value of an expression, and its integers in order.

    Raises:
        ValueError: if ``text`` has anything but integers, ``+ - * /``, signs and parentheses,
            divides by zero, exceeds ``MAX_EXPRESSION_LENGTH`` or opens 51 parentheses.
    """
    expression = " ".join(text.translate(_OPERATOR_VARIANTS).split())
    # Checked first: the text of a model may be nested too deep for Python's parser.
    is_too_long = len(text) > MAX_EXPRESSION_LENGTH
    if is_too_long or re.search(r"[^-+*/() 0-9]|(?:\([^(]*){51}", expression):
        raise ValueError("not an expression of integers, + - * / and parentheses, or too long")
    # Python refuses 007.
    expression = re.sub(r"(?<![0-9])0+(?=[0-9])", "", expression)
    try:
        # The quotient of two integers or fractions is a fraction.
        value = evaluate(expression, ARITHMETIC | {ast.Div: Fraction})
    except Exception as error:  # of any type: Python's parser has several
        raise ValueError(f"an expression without a value: {error}") from None
    integers = re.findall("[0-9]+", expression)
    return Fraction(value), list(map(int, integers))


def evaluate(expression: str, operations: dict) -> Fraction | float | complex:
    """Return the value of an expression of numbers and operators.

    Args:
        operations: class of an operator in ``ast`` -> the function that computes it.

    Raises:
        ValueError: for any other expression of Python.
        Exception: any error of Python's parser or of an operation.
    """

    # Never eval(): the text is the model's.
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
    """The environment's reward: that of its ``get_reward()``, or the sum of its turns' rewards."""
    # The rollout has asked for it, in the process where the environment lives.
    return environment_rewards
