"""Countdown: reach a target from three or four numbers, each used exactly once, with ``+ - * /``.

A demonstration tries expressions, each evaluated from left to right, until one equals the target. Independent draws add mistakes:

| mistake | share | example, for 13 from 2 3 5 | correct |
|---|---|---|---|
| tries another expression first | 50% | ``<think>5+3=8-2=6 no 5*3=15-2=13 ok</think>`` | yes |
| gives up | 25% | ``<think>5+3=8-2=6 ok</think>`` | no: the answer misses the target |
| leaves out tags | 20% | no ``<think>`` or no ``<answer>`` | by strict accuracy, only with ``<answer>`` |
"""

import random
import re

from grpo.data.task import Task, choose_missing_tag

GIVES_UP_SHARE = 0.25
UNTAGGED_SHARES = {"think": 0.08, "answer": 0.12}


class Countdown(Task):
    """``Make 24 from 3 5 9.``: numbers from 1 to 10, a target from 1 to 99. Every problem has a solution."""

    name = "countdown"
    instructions = (
        "Combine the given numbers with + - * / and parentheses to reach the target. Use every number exactly once. "
        "Show your work between <think> and </think>, then write the expression alone between <answer> and </answer>."
    )

    def draw(self, rng: random.Random) -> dict:
        """Columns: ``prompt``, ``target`` (int), ``numbers`` (list[int], in the prompt's order), ``answer`` (a solution)."""
        while True:
            numbers = [rng.randint(1, 10) for _ in range(rng.choice((3, 3, 3, 4)))]
            expression, _, target = _random_expression(numbers, rng)
            if 1 <= target <= 99:
                break
        shown = sorted(numbers)
        prompt = f"Make {target} from {' '.join(map(str, shown))}."
        return {"prompt": prompt, "target": target, "numbers": shown, "answer": expression}

    def problem_key(self, row: dict) -> str:
        """The target and the sorted numbers."""
        return f"{row['target']}:{sorted(row['numbers'])}"

    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str:
        """A response with the mistakes in the table above, or (``noisy=False``) always correct and tagged."""
        failed = [_random_expression(row["numbers"], rng) for _ in range(rng.randint(0, 1))]
        failed = [attempt for attempt in failed if attempt[2] != row["target"]]
        if noisy and rng.random() < GIVES_UP_SHARE:
            answer, steps, _ = _random_expression(row["numbers"], rng)
        else:
            answer, steps = row["answer"], _steps(row["answer"])
        thought = "".join(f"{failed_steps} no " for _, failed_steps, _ in failed) + f"{steps} ok"
        missing_tag = choose_missing_tag(UNTAGGED_SHARES, rng) if noisy else "none"
        if missing_tag != "think":
            thought = f"<think>{thought}</think>"
        return f"{thought}\n{answer if missing_tag == 'answer' else f'<answer>{answer}</answer>'}"


def _random_expression(numbers: list[int], rng: random.Random) -> tuple[str, str, int]:
    """An expression that uses every number once, in any order. Evaluated from left to right, each result is an integer >= 0.

    Returns:
        The expression (``"(5+3)*2"``), its steps (``"5+3=8*2=16"``) and its value.
    """
    order = rng.sample(numbers, len(numbers))
    text, value, is_sum = str(order[0]), order[0], False
    for number in order[1:]:
        # Mostly sums and differences, so that the tiny model can solve a problem by trying.
        operators = "+++*" + "---" * (value >= number) + "/" * (value % number == 0)
        operator = rng.choice(operators)
        text = f"({text})" if is_sum and operator in "*/" else text
        text += f"{operator}{number}"
        is_sum = operator in "+-"
        value = _apply(value, operator, number)
    return text, _steps(text), value


def _steps(expression: str) -> str:
    """The steps of an expression of ``_random_expression``: ``"5+3=8*2=16"`` for ``"(5+3)*2"``."""
    tokens = re.findall(r"[0-9]+|[-+*/]", expression)
    value, written = int(tokens[0]), tokens[0]
    for operator, number in zip(tokens[1::2], tokens[2::2], strict=True):
        value = _apply(value, operator, int(number))
        written += f"{operator}{number}={value}"
    return written


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[operator]
