"""A parser for arithmetic expressions: exact values, bounded time and memory, no ``eval``."""

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from grpo.rewards.extract import parse_number

MAX_LENGTH = 500
"""Characters. There is no power operator, so this bounds the size of every intermediate value too."""
MAX_DEPTH = 50
"""Levels of nested parentheses and signs."""

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
_OPERATORS = str.maketrans({"×": "*", "·": "*", "÷": "/", "\u2212": "-", "\u2013": "-", "[": "(", "]": ")"})


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of integers, ``+ - * /``, signs and parentheses, and the integers used, in order.

    Raises:
        ValueError: if ``text`` is not such an expression, divides by zero, or exceeds the limits above.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"an expression has at most {MAX_LENGTH} characters, this one has {len(text)}")
    parser = _Parser(list(_tokens(text.translate(_OPERATORS))))
    value = parser.sum(depth=0)
    if parser.peek() is not None:
        raise ValueError(f"unexpected {parser.peek()!r} in the expression {text!r}")
    return value, parser.used


def solves_countdown(text: str, numbers: Iterable[Any], target: Any) -> bool:
    """True if an expression, or an equation whose right side is its value, equals the target and uses each number exactly once."""
    expression, equals, claimed = text.partition("=")
    goal = parse_number(str(target))
    if goal is None:
        raise ValueError(f"the target of a countdown row must be a number, got {target!r}")
    try:
        result, used = evaluate_expression(expression)
    except ValueError:
        return False
    if equals and parse_number(claimed) != result:
        return False
    return result == goal and sorted(used) == sorted(int(Fraction(str(number))) for number in numbers)


def _tokens(text: str) -> Iterator[str]:
    text, position = text.rstrip(), 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"unexpected {text[position:].strip()[:10]!r} in the expression {text!r}")
        yield match[1] or match[2]
        position = match.end()


class _Parser:
    """A recursive descent parser with one method per level of operator precedence."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.position, self.used = tokens, 0, []

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str | None:
        token = self.peek()
        self.position += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value += sign * self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            if self.take() == "*":
                value *= self.factor(depth)
                continue
            divisor = self.factor(depth)
            if divisor == 0:
                raise ValueError("division by zero")
            value /= divisor
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError(f"an expression is nested at most {MAX_DEPTH} deep")
        token = self.take()
        if token in ("+", "-"):
            return self.factor(depth + 1) * (1 if token == "+" else -1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ValueError("a parenthesis is not closed")
            return value
        if token is None or not token.isdigit():
            raise ValueError(f"expected a number, got {token!r}")
        self.used.append(int(token))
        return Fraction(self.used[-1])
