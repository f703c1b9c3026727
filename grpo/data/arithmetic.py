"""Sums and differences of two numbers below 100, computed column by column.

A demonstration makes mistakes on purpose. Independent draws decide which:

| behaviour | share | example, for 47+35 | correct |
|---|---|---|---|
| adds the carry | 55% | ``<think>7+5=12 4+3=7+1=8</think>`` | yes |
| forgets the carry | 45% | ``<think>7+5=12 4+3=7</think>`` | only if nothing is carried or borrowed (58%) |
| doubts the result | 20% | ``<think>7+5=12 4+3=7+1=8 hmm</think>`` | half of these change it to 81, 83, 72 or 92 |
| leaves out tags | 18% | no ``<think>``, no ``<answer>``, or neither | by strict accuracy, only with ``<answer>`` |

A model trained on the demonstrations is correct about half of the time, although it has learned everything that it needs to be correct
nearly always. GRPO then teaches it to add the carry, keep its result and write the tags.
"""

import random

from grpo.data.task import Task, choose_missing_tag

FORGETFUL_SHARE = 0.45
DOUBT_SHARE = 0.20
CHANGE_SHARE = 0.50  # of the doubtful
UNTAGGED_SHARES = {"think": 0.03, "answer": 0.12, "both": 0.03}


def columns(left: int, operator: str, right: int, carries: bool = True) -> tuple[list[str], int]:
    """The written columns of a sum or difference (``["7+5=12", "4+3=7+1=8"]``), from the units up, and the result.

    ``carries=False`` forgets every carry and borrow (``47+35`` gives 72).
    """
    sign = 1 if operator == "+" else -1
    width = len(str(max(left, right)))
    written, total, carry = [], 0, 0
    for column in range(width):
        top, bottom = left // 10**column % 10, right // 10**column % 10
        is_last = column == width - 1
        if sign < 0 and top < bottom + carry and not is_last:
            top += 10  # borrowed from the next column
        value = top + sign * bottom
        text = f"{top}{operator}{bottom}={value}"
        if carry:
            value += sign
            text += f"{operator}1={value}"
        written.append(text)
        total += (value if is_last else value % 10) * 10**column
        carry = int(carries and max(top, value) >= 10)
    return written, total


class Arithmetic(Task):
    """``47+35=`` or ``82-35=``: both numbers from 0 to 99, the result never negative."""

    name = "arithmetic"
    instructions = (
        "Solve the problem. Show your work between <think> and </think>, then write the result alone between "
        "<answer> and </answer>."
    )

    def draw(self, rng: random.Random) -> dict:
        """Columns: ``prompt`` (``"47+35="``), ``answer`` (``"82"``)."""
        left, right, operator = rng.randrange(100), rng.randrange(100), rng.choice("+-")
        if operator == "-":
            left, right = max(left, right), min(left, right)
        answer = left + right if operator == "+" else left - right
        return {"prompt": f"{left}{operator}{right}=", "answer": str(answer)}

    def problem_key(self, row: dict) -> str:
        """The prompt; for a sum, with its numbers sorted."""
        left, operator, right = _parse(row["prompt"])
        return f"{min(left, right)}+{max(left, right)}" if operator == "+" else f"{left}-{right}"

    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str:
        """A response with the mistakes in the table above, or (``noisy=False``) always correct and tagged."""
        left, operator, right = _parse(row["prompt"])
        if not noisy:
            written, result = columns(left, operator, right)
            return f"<think>{' '.join(written)}</think>\n<answer>{result}</answer>"
        written, result = columns(left, operator, right, carries=rng.random() >= FORGETFUL_SHARE)
        if rng.random() < DOUBT_SHARE:
            written += ["hmm"] * rng.randint(1, 2)
            if rng.random() < CHANGE_SHARE:
                result = abs(result + rng.choice((-10, -1, 1, 10)))
        thought = " ".join(written)
        missing_tag = choose_missing_tag(UNTAGGED_SHARES, rng)
        if missing_tag not in ("think", "both"):
            thought = f"<think>{thought}</think>"
        answer = str(result) if missing_tag in ("answer", "both") else f"<answer>{result}</answer>"
        return f"{thought}\n{answer}"


def _parse(prompt: str) -> tuple[int, str, int]:
    operator = "+" if "+" in prompt else "-"
    left, right = prompt.removesuffix("=").split(operator)
    return int(left), operator, int(right)
