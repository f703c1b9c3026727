"""Countdown: reach a target from three or four numbers, each used exactly once, with ``+ - * /``.

A demonstration tries expressions, working each from left to right, until one hits the
target. Independent draws decide how:

| habit | share | looks like, for 13 from 2 3 5 | is right |
|---|---|---|---|
| tries another before | 50% | ``<think>5+3=8-2=6 no 5*3=15-2=13 ok</think>`` | yes |
| gives up | 25% | ``<think>5+3=8-2=6 ok</think>`` | no: it settles for one that misses |
| leaves out tags | 20% | no ``<think>`` or no ``<answer>`` | to a strict reader only with ``<answer>`` |
"""

import random
from fractions import Fraction

from grpo.tasks.task import Task

GIVES_UP_SHARE = 0.25
UNTAGGED_SHARES = {"think": 0.08, "answer": 0.12}

MAX_LENGTH, MAX_DEPTH, MAX_DIGITS = 200, 20, 6
_DIGITS = "0123456789"  # str.isdigit also takes other scripts' digits


def evaluate_expression(text: str) -> Fraction | None:
    """The exact value of an expression of whole numbers, ``+ - * /`` and parentheses; None for anything else.

    Nothing is executed. None also for: more than 200 characters, 20 parentheses deep, a number of more than 6 digits,
    a sign that is not between two operands (``-3``), ``**``, a division by zero.
    """
    if not isinstance(text, str) or len(text) > MAX_LENGTH:
        return None
    tokens = _tokens(text)
    if not tokens:
        return None
    try:
        value, end = _sum(tokens, 0, 0)
    except (_Invalid, ZeroDivisionError):
        return None
    return value if end == len(tokens) else None


class _Invalid(Exception):
    """Not an expression; never leaves this file."""


def _tokens(text: str) -> list[str] | None:
    """``"12*(3+4)"`` as its numbers, operators and parentheses; None if there is any other character."""
    tokens: list[str] = []
    previous = ""
    for character in text:
        if character in _DIGITS:
            if previous and previous in _DIGITS:
                tokens[-1] += character
            else:
                tokens.append(character)
        elif character in "+-*/()":
            tokens.append(character)
        elif character != " ":
            return None
        previous = character
    return None if any(len(token) > MAX_DIGITS for token in tokens) else tokens


def _sum(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _product(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "+-":
        right, end = _product(tokens, at + 1, depth)
        value = value + right if tokens[at] == "+" else value - right
        at = end
    return value, at


def _product(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    value, at = _operand(tokens, at, depth)
    while at < len(tokens) and tokens[at] in "*/":
        right, end = _operand(tokens, at + 1, depth)
        value = value * right if tokens[at] == "*" else value / right
        at = end
    return value, at


def _operand(tokens: list[str], at: int, depth: int) -> tuple[Fraction, int]:
    if at == len(tokens) or depth > MAX_DEPTH:
        raise _Invalid
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1, depth + 1)
        if at == len(tokens) or tokens[at] != ")":
            raise _Invalid
        return value, at + 1
    if tokens[at][0] not in _DIGITS:
        raise _Invalid
    return Fraction(int(tokens[at])), at + 1


class Countdown(Task):
    """``Make 24 from 3 5 9.``: numbers from 1 to 10, a target from 1 to 99. Every problem has a solution."""

    name = "countdown"
    instructions = (
        "Combine the given numbers with + - * / and parentheses to reach the target. Use every number exactly once. "
        "Show your work between <think> and </think>, then write the expression alone between <answer> and </answer>."
    )

    def draw(self, rng: random.Random) -> dict:
        """Columns: ``prompt``, ``target`` (int), ``numbers`` (list[int], as in the prompt), ``answer`` (a solution)."""
        while True:
            numbers = [rng.randint(1, 10) for _ in range(rng.choice((3, 3, 3, 4)))]
            expression, _, target = _random_expression(numbers, rng)
            if 1 <= target <= 99:
                break
        shown = sorted(numbers)
        prompt = f"Make {target} from {' '.join(map(str, shown))}."
        return {"prompt": prompt, "target": target, "numbers": shown, "answer": expression}

    def canonical(self, row: dict) -> str:
        """The target and the numbers in order."""
        return f"{row['target']}:{sorted(row['numbers'])}"

    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str:
        """A response with the noise of the table above, or (``noisy=False``) always successful and tagged."""
        tries = [_random_expression(row["numbers"], rng) for _ in range(rng.randint(0, 1))]
        tries = [attempt for attempt in tries if attempt[2] != row["target"]]
        if noisy and rng.random() < GIVES_UP_SHARE:
            found = _random_expression(row["numbers"], rng)
        else:
            found = row["answer"], _working(row["answer"]), row["target"]
        answer = found[0]
        thought = "".join(f"{working} no " for _, working, _ in tries) + f"{found[1]} ok"
        left_out = "none"
        if noisy:
            tags = [*UNTAGGED_SHARES, "none"]
            left_out = rng.choices(tags, [*UNTAGGED_SHARES.values(), 1 - sum(UNTAGGED_SHARES.values())])[0]
        if left_out != "think":
            thought = f"<think>{thought}</think>"
        return f"{thought}\n{answer if left_out == 'answer' else f'<answer>{answer}</answer>'}"


def _random_expression(numbers: list[int], rng: random.Random) -> tuple[str, str, int]:
    """An expression that uses every number once, in any order, worked from left to right with whole steps >= 0.

    Returns:
        The expression (``"(5+3)*2"``), its working (``"5+3=8*2=16"``) and its value.
    """
    order = rng.sample(numbers, len(numbers))
    text, value, is_sum = str(order[0]), order[0], False
    for number in order[1:]:
        # Mostly sums and differences: a problem that the tiny model can hit by trying.
        operators = "+++*" + "---" * (value >= number) + "/" * (value % number == 0)
        operator = rng.choice(operators)
        text = f"({text})" if is_sum and operator in "*/" else text
        text += f"{operator}{number}"
        is_sum = operator in "+-"
        value = _apply(value, operator, number)
    return text, _working(text), value


def _working(expression: str) -> str:
    """Write the steps of an expression made by ``_random_expression``: ``"(5+3)*2"`` as ``"5+3=8*2=16"``."""
    tokens = [token for token in _tokens(expression) if token not in "()"]
    value, written = int(tokens[0]), tokens[0]
    for operator, number in zip(tokens[1::2], tokens[2::2], strict=True):
        value = _apply(value, operator, int(number))
        written += f"{operator}{number}={value}"
    return written


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
