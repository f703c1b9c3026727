"""Sums and differences of two numbers below 100, worked column by column.

A demonstration is written by someone who knows how to do it and often does not bother. Independent draws decide how:

| habit | share | looks like, for 47+35 | is right |
|---|---|---|---|
| minds the carry | 55% | ``<think>7+5=12 4+3=7+1=8</think>`` | yes |
| forgets it | 45% | ``<think>7+5=12 4+3=7</think>`` | when nothing is carried or borrowed (58%) |
| doubts the result | 20% | ``<think>7+5=12 4+3=7+1=8 hmm</think>`` | half of these change it to 81, 83, 72 or 92 |
| leaves out tags | 18% | no ``<think>`` or ``<answer>``, or neither | to a strict reader only with ``<answer>`` |

So a model that imitates them is right about half of the time, and knows all it needs to be nearly always right.
What is left to learn from rewards: mind the carry, trust the work, keep to the format.
"""

import random

from grpo.tasks.task import Task

FORGETFUL_SHARE = 0.45
DOUBT_SHARE = 0.20
CHANGE_SHARE = 0.50  # of the doubtful
UNTAGGED_SHARES = {"think": 0.03, "answer": 0.12, "both": 0.03}


def columns(left: int, operator: str, right: int, carries: bool = True) -> tuple[list[str], int]:
    """Work a sum or difference from the units up.

    Args:
        carries: False to forget every carry and borrow (``47+35`` gives 72).

    Returns:
        The written columns (``["7+5=12", "4+3=7+1=8"]``) and the result they lead to.
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

    def canonical(self, row: dict) -> str:
        """The prompt, with the numbers of a sum in order."""
        left, operator, right = _parse(row["prompt"])
        return f"{min(left, right)}+{max(left, right)}" if operator == "+" else f"{left}-{right}"

    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str:
        """A response with the noise of the table above, or (``noisy=False``) always worked, right and tagged."""
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
        tags = [*UNTAGGED_SHARES, "none"]
        left_out = rng.choices(tags, [*UNTAGGED_SHARES.values(), 1 - sum(UNTAGGED_SHARES.values())])[0]
        if left_out not in ("think", "both"):
            thought = f"<think>{thought}</think>"
        answer = str(result) if left_out in ("answer", "both") else f"<answer>{result}</answer>"
        return f"{thought}\n{answer}"


def _parse(prompt: str) -> tuple[int, str, int]:
    operator = "+" if "+" in prompt else "-"
    left, right = prompt.removesuffix("=").split(operator)
    return int(left), operator, int(right)
