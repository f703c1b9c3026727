"""The built-in tools. Their type hints and docstrings are what the model reads about them."""

import ast
import operator

from grpo.rewards.sandbox import Limits, run_python

OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
MAX_EXPONENT = 1000
TRACEBACK = (
    "import sys, traceback\ntry:\n    exec(compile(sys.stdin.read(), '<code>', 'exec'), {'__name__': '__main__'})"
)
TRACEBACK += "\nexcept BaseException as error:\n    print(''.join(traceback.format_exception_only(error)), end='')\n"


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / // % ** and parentheses, for example 12*(3+4)

    Returns:
        The number.
    """
    value = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
    if isinstance(value, complex):
        raise ValueError("not a real number")
    return f"{value:.15g}"


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _value(node.left), _value(node.right)
        if abs(exponent) > MAX_EXPONENT or abs(base) > 1e9:
            raise ValueError("the power is too large")
        return base**exponent
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("not an arithmetic expression")


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: the program; it must print what you want to see

    Returns:
        The printed text, with the error at its end if the program raised one.
    """
    (result,) = run_python(TRACEBACK, [{"input": code}], Limits(test_seconds=5.0, total_seconds=8.0))
    if result.status == "timeout":
        raise TimeoutError("the program did not end within 5 seconds")
    return result.output or "(the program printed nothing)"


TOOLS = {"calculator": calculator, "python": python}
