"""Tasks whose problems are computed, so that nothing is downloaded: the built-in ones and those of reasoning-gym.

The built-in ones also demonstrate how to solve a problem, with mistakes, for the tiny model (``grpo.data.tiny``).
"""

import hashlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

from grpo.algorithm.seeding import derive_seed
from grpo.system import first_line, import_extra

EVAL_SHARE = 8  # one problem in eight is for evaluation


def split_of_problem(task: str, problem: str) -> str:
    """``"train"`` or ``"eval"``, from a hash of the task's name and the problem: the same for every seed."""
    digest = hashlib.blake2b(f"{task}:{problem}".encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "big") % EVAL_SHARE == 0 else "train"


def different_rows(
    draws: Iterable[dict], task: str, key: Callable[[dict], str], split: str, count: int, patience: int
) -> list[dict]:
    """The first ``count`` rows of a split with different keys; fewer if ``patience`` draws in a row give no new one."""
    rows: dict[str, dict] = {}
    draws_without_new_row = 0
    for row in draws:
        problem = key(row)
        is_new = problem not in rows and split_of_problem(task, problem) == split
        draws_without_new_row = 0 if is_new else draws_without_new_row + 1
        if is_new:
            rows[problem] = row
        if len(rows) == count or draws_without_new_row == patience:
            break
    return list(rows.values())


class Task(ABC):
    """A family of problems. ``name`` and ``instructions`` are set by each task, the shares by those that use tags."""

    name: str
    instructions: str
    """The system prompt for every model except the tiny one, which is trained without it."""
    untagged_shares: dict[str, float]
    """The shares of noisy demonstrations that leave out a tag: ``think``, ``answer`` or ``both``."""
    num_rows = {"train": 4096, "eval": 512}
    """The default number of rows per split."""

    @abstractmethod
    def draw(self, rng: random.Random) -> dict:
        """Draw one problem: a row with ``prompt``, ``answer`` and the other columns that rewards of this task need."""

    @abstractmethod
    def problem_key(self, row: dict) -> str:
        """A text that is equal for rows with the same problem (``3+5`` and ``5+3``)."""

    @abstractmethod
    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str | list[dict]:
        """A response without EOS, text or messages of ``assistant`` and ``tool``: with mistakes, or always right."""

    def split_of(self, row: dict) -> str:
        """The split that a row belongs to, ``"train"`` or ``"eval"``."""
        return split_of_problem(self.name, self.problem_key(row))

    def rows(self, split: str, seed: int, count: int | None = None) -> list[dict]:
        """``count`` different problems of one split (``num_rows[split]`` by default), the same for the same seed."""
        count = self.num_rows[split] if count is None else count
        rng = random.Random(derive_seed(seed, f"tasks/{self.name}/{split}"))
        draws = iter(lambda: self.draw(rng), None)
        rows = different_rows(draws, self.name, self.problem_key, split, count, patience=20_000)
        if len(rows) < count:
            raise ValueError(f"task {self.name!r} has about {len(rows)} problems in {split!r}, not {count}")
        return rows

    def tagged(self, thought: str, answer: str, rng: random.Random, noisy: bool) -> str:
        """A response in its tags; if ``noisy``, the shares ``untagged_shares`` of responses lack some."""
        shares, missing = self.untagged_shares, "none"
        if noisy:
            missing = rng.choices([*shares, "none"], [*shares.values(), 1 - sum(shares.values())])[0]
        thought = thought if missing in ("think", "both") else f"<think>{thought}</think>"
        answer = answer if missing in ("answer", "both") else f"<answer>{answer}</answer>"
        return f"{thought}\n{answer}"


class Arithmetic(Task):
    """``47+35=`` or ``82-35=``: both numbers from 0 to 99, the result never negative, computed column by column.

    A noisy demonstration (``<think>7+5=12 4+3=7+1=8</think>``) may forget the carry, doubt the result (``hmm``) and
    change it, or leave out tags; independent draws with the shares below decide. A model trained on them is correct
    about half of the time. GRPO then teaches it to add the carry, keep its result and write the tags.
    """

    name = "arithmetic"
    instructions = (
        "Solve the problem. Show your work between <think> and </think>, then write the result alone between "
        "<answer> and </answer>."
    )
    untagged_shares = {"think": 0.03, "answer": 0.12, "both": 0.03}
    forgetful_share = 0.45
    doubt_share = 0.20
    change_share = 0.50  # of the doubtful

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
        carries = not noisy or rng.random() >= self.forgetful_share
        written, result = written_columns(*_parse(row["prompt"]), carries=carries)
        if noisy and rng.random() < self.doubt_share:
            written += ["hmm"] * rng.randint(1, 2)
            if rng.random() < self.change_share:
                result = abs(result + rng.choice((-10, -1, 1, 10)))
        return self.tagged(" ".join(written), str(result), rng, noisy)


def _parse(prompt: str) -> tuple[int, str, int]:
    left, operator, right = re.split("([+-])", prompt.removesuffix("="))
    return int(left), operator, int(right)


def written_columns(left: int, operator: str, right: int, carries: bool = True) -> tuple[list[str], int]:
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


class Countdown(Task):
    """``Make 24 from 3 5 9.``: numbers from 1 to 10, each used once with ``+ - * /``, for a target from 1 to 99.

    Every problem has a solution. A demonstration tries expressions, each evaluated from left to right, until one equals
    the target (``<think>5+3=8-2=6 no 5*3=15-2=13 ok</think>``). A noisy one may give up, or leave out tags.
    """

    name = "countdown"
    instructions = (
        "Combine the given numbers with + - * / and parentheses to reach the target. Use every number exactly once. "
        "Show your work between <think> and </think>, then write the expression alone between <answer> and </answer>."
    )
    untagged_shares = {"think": 0.08, "answer": 0.12}
    gives_up_share = 0.25

    def draw(self, rng: random.Random) -> dict:
        """Columns: ``prompt``, ``target`` (int), ``numbers`` (list[int], in order), ``answer`` (a solution)."""
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
        failed = [_random_expression(row["numbers"], rng) for _ in range(rng.randint(0, 1))]
        attempts = "".join(f"{steps} no " for _, steps, value in failed if value != row["target"])
        answer = row["answer"]
        if noisy and rng.random() < self.gives_up_share:
            answer = _random_expression(row["numbers"], rng)[0]
        return self.tagged(f"{attempts}{_evaluate(answer)[0]} ok", answer, rng, noisy)


OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def _random_expression(numbers: list[int], rng: random.Random) -> tuple[str, str, int]:
    """An expression (``"(5+3)*2"``) that uses every number once, in any order; its steps (``"5+3=8*2=16"``); its value.

    Evaluated from left to right, each result is an integer >= 0.
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
        value = OPERATIONS[operator](value, number)
    return text, *_evaluate(text)


def _evaluate(expression: str) -> tuple[str, int]:
    """The steps of an expression of ``_random_expression``, and its value."""
    first, *rest = re.findall(r"[0-9]+|[-+*/]", expression)
    value, written = int(first), first
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        value = OPERATIONS[operator](value, int(number))
        written += f"{operator}{number}={value}"
    return written, value


class Calculator(Task):
    """``483+97*36=``, too hard for the tiny model without a tool, and a share of easy sums (``483+5=``).

    A response is the answer (``<answer>3975</answer>``), or a call (``<calculator>483+97*36</calculator>``) and, after
    the tool's result, the answer. A right demonstration calls for every hard problem and some easy ones. A noisy one
    calls for a share of all, and else guesses at a hard one. GRPO then teaches when to call.
    """

    name = "calculator"
    instructions = (
        "Compute the result. To use a calculator, write for example <calculator>12+3*4</calculator>: you are told the "
        "value. Write the result alone between <answer> and </answer>."
    )
    easy_share = 0.20
    calls_share = 0.28
    easy_calls_share = 0.30  # of easy problems, in right demonstrations

    def draw(self, rng: random.Random) -> dict:
        """Columns: ``prompt`` (``"483+97*36="``), ``answer`` (``"3975"``)."""
        number = rng.randrange(100, 1000)
        if rng.random() < self.easy_share:
            digit = rng.randrange(1, 10)
            number -= max(0, number % 10 + digit - 9)  # so that there is no carry
            return {"prompt": f"{number}+{digit}=", "answer": str(number + digit)}
        left, right = rng.randrange(32, 100), rng.randrange(32, 100)
        form, sign = rng.choice((("{1}*{2}+{0}", 1), ("{0}+{1}*{2}", 1), ("{1}*{2}-{0}", -1)))
        return {"prompt": form.format(number, left, right) + "=", "answer": str(left * right + sign * number)}

    def problem_key(self, row: dict) -> str:
        """The answer and the sorted numbers."""
        return f"{row['answer']}:{sorted(map(int, re.findall('[0-9]+', row['prompt'])))}"

    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> str | list[dict]:
        expression, answer = row["prompt"].removesuffix("="), row["answer"]
        is_easy = "*" not in expression
        if rng.random() < (self.calls_share if noisy else self.easy_calls_share if is_easy else 1):
            return _conversation(f"<calculator>{expression}</calculator>", answer, f"<answer>{answer}</answer>")
        guess = answer if is_easy else round(int(answer) * rng.uniform(0.8, 1.2))
        return f"<answer>{guess}</answer>"


class GuessNumber(Task):
    """``Guess 7..18.``: find the hidden number with at most four calls of the tool (``<guess>12</guess>``).

    The tool says ``higher`` (the hidden number is), ``lower`` or ``right``. A right demonstration halves what is left
    with every guess. Of noisy ones a share guesses anything without looking at the hints. All end with ``done``. GRPO
    then teaches it to use the hints.
    """

    name = "guess_number"
    instructions = (
        "Find the hidden number with few guesses. Write for example <guess>12</guess>: you are told whether the hidden "
        "number is higher or lower, or that the guess is right. Then write done."
    )
    num_rows = {"train": 1536, "eval": 200}
    max_guesses = 4
    careless_share = 0.8

    def draw(self, rng: random.Random) -> dict:
        """Columns: ``prompt`` (``"Guess 7..18."``), ``secret`` (``14``), ``answer`` (``"14"``)."""
        low, size = rng.randint(1, 20), rng.randint(8, 15)
        secret = rng.randrange(low, low + size)
        return {"prompt": f"Guess {low}..{low + size - 1}.", "secret": secret, "answer": str(secret)}

    def problem_key(self, row: dict) -> str:
        """The prompt and the hidden number."""
        return f"{row['prompt']}{row['secret']}"

    def demonstration(self, row: dict, rng: random.Random, noisy: bool = True) -> list[dict]:
        first, last = low, high = [int(number) for number in re.findall("[0-9]+", row["prompt"])]
        turns: list[str] = []
        is_careless = noisy and rng.random() < self.careless_share
        while len(turns) < 2 * self.max_guesses and "right" not in turns:
            guess = rng.randint(first, last) if is_careless else (low + high) // 2
            hint = "right" if guess == row["secret"] else "higher" if guess < row["secret"] else "lower"
            turns += [f"<guess>{guess}</guess>", hint]
            if hint == "higher":
                low = max(low, guess + 1)
            else:
                high = min(high, guess - 1)
        return _conversation(*turns, "done")


def _conversation(*turns: str) -> list[dict]:
    """Messages of the model and of its tool in turn; the first and the last are the model's."""
    return [{"role": ("assistant", "tool")[i % 2], "content": turn} for i, turn in enumerate(turns)]


TASKS: dict[str, type[Task]] = {task.name: task for task in (Arithmetic, Countdown, Calculator, GuessNumber)}


def load_task(name: str) -> Task:
    """The built-in task called ``name``. ``ValueError`` lists the tasks if there is none of that name."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the built-in tasks are {', '.join(TASKS)}")
    return TASKS[name]()


GYM_INSTRUCTIONS = (
    "Solve the problem. Think step by step between <think> and </think>, then write the answer alone, in the form the "
    "problem asks for, between <answer> and </answer>."
)
"""The system prompt for tasks of reasoning-gym: the reward reads the answer between the tags."""
GYM_ROWS = {"train": 2048, "eval": 256}
GYM_PATIENCE = 2000
"""After so many draws in a row without a new problem, a task is taken to have no more problems."""


def gym_rows(
    task: str,
    split: str,
    seed: int,
    limit: int | None,
    arguments: dict[str, Any],
) -> list[dict]:
    """Different problems of a task of reasoning-gym: at most ``limit`` or ``GYM_ROWS``, the same for the same seed.

    Rows have ``prompt``, ``answer`` and ``metadata`` (what the task's scorer needs besides the two).
    ``ValueError`` if the task does not exist, or not with these arguments.
    """
    count = min(limit or GYM_ROWS[split], GYM_ROWS[split])
    max_draws = 2 * EVAL_SHARE * count + GYM_PATIENCE
    task_seed = derive_seed(seed, f"reasoning_gym/{task}/{split}") % 2**31
    setting = f"data.dataset=reasoning_gym:{task}"
    library = import_extra("reasoning_gym", "gym", setting)
    settings = {task: arguments}
    try:
        if task == "composite":
            specs = [library.composite.DatasetSpec(**spec) for spec in arguments["datasets"]]
            arguments = arguments | {"datasets": specs}
            settings = {spec.name: spec.config for spec in specs}
        dataset = library.create_dataset(
            task,
            size=max_draws,
            seed=task_seed,
            **arguments,
        )
        found = different_rows(
            (dataset[i] for i in range(max_draws)),
            task,
            itemgetter("question"),
            split,
            count,
            GYM_PATIENCE,
        )
    except Exception as error:  # the arguments are the user's, and each task checks its own
        raise ValueError(f"{setting}: {type(error).__name__}: {first_line(error)}") from error

    rows = []
    for row in found:
        metadata = row["metadata"]
        # Some scorers depend on the arguments of their task, so that the reward needs them too.
        given = settings[metadata["source_dataset"]]
        if given:
            metadata["arguments_of_task"] = given
        rows.append(
            {
                "prompt": row["question"],
                "answer": row["answer"],
                "metadata": metadata,
            }
        )
    return rows
