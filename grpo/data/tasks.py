"""Tasks whose problems are computed, so that nothing is downloaded: the built-in ones and those of
reasoning-gym.

The built-in ones also demonstrate how to solve a problem, with mistakes, for the tiny model
(``grpo.data.tiny``)."""

import hashlib
import random
import re
from collections.abc import Iterator

from grpo.algorithm.seeding import derive_seed
from grpo.config import DataConfig
from grpo.system import first_line, import_extra

EVAL_SHARE = 8  # one problem in eight is for evaluation


class Task:
    """A family of problems. Each task has a name, ``instructions`` (the system prompt for every
    model except the tiny one, which is trained without it), in ``untagged_shares`` the shares of
    noisy demonstrations that leave out a tag (``think``, ``answer`` or ``both``), and these
    methods:

    - ``draw(rng: random.Random) -> dict``: draw one problem, a row with ``prompt``, ``answer`` and
      the other columns that its rewards need;
    - ``problem_key(row: dict) -> str``: a text that is equal for rows with the same problem
      (``3+5`` and ``5+3``);
    - ``demonstration(row: dict, rng: random.Random, noisy: bool) -> str | list[dict]``: a response
      without EOS, text or messages of ``assistant`` and ``tool``, with mistakes or always right.
    """

    num_rows = {"train": 4096, "eval": 512}
    """The largest number of rows per split."""

    def draws(self, split: str, seed: int) -> Iterator[dict]:
        """Rows of both splits, the same for the same seed."""
        rng = random.Random(derive_seed(seed, f"tasks/{self.name}/{split}"))
        while True:
            yield self.draw(rng)

    def split_of(self, row: dict) -> str:
        """``"train"`` or ``"eval"``, from a hash of the task's name and the problem: the same for
        every seed."""
        text = f"{self.name}:{self.problem_key(row)}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return "eval" if digest[-1] % EVAL_SHARE == 0 else "train"

    def rows(self, split: str, seed: int, count: int | None = None) -> list[dict]:
        """Different problems of one split, the same for the same seed: ``num_rows[split]``, or
        ``count`` if less.

        Fewer if the task has no more.
        """
        most = self.num_rows[split]
        count = min(count or most, most)
        rows = {}
        for row in self.draws(split, seed):
            if self.split_of(row) == split:
                rows.setdefault(self.problem_key(row), row)
            if len(rows) == count:
                break
        return list(rows.values())

    def tagged(self, thought: str, answer: str, rng: random.Random, noisy: bool) -> str:
        """A response in its tags; if ``noisy``, the shares ``untagged_shares`` of responses lack
        some."""
        missing = "none"
        if noisy:
            shares = self.untagged_shares
            complete = 1 - sum(shares.values())
            missing = rng.choices([*shares, "none"], [*shares.values(), complete])[0]
        if missing not in ("think", "both"):
            thought = f"<think>{thought}</think>"
        if missing not in ("answer", "both"):
            answer = f"<answer>{answer}</answer>"
        return f"{thought}\n{answer}"


class Arithmetic(Task):
    """``47+35=`` or ``82-35=``: both numbers from 0 to 99, the result never negative, computed
    column by column.

    A noisy demonstration (``<think>7+5=12 4+3=7+1=8</think>``) may forget the carry, doubt the
    result (``hmm``) and change it, or leave out tags; independent draws with the shares below
    decide. A model trained on them is correct about half of the time. GRPO then teaches it to add
    the carry, keep its result and write the tags."""

    name = "arithmetic"
    instructions = (
        "Solve the problem. Show your work between <think> and </think>, then write the result alone between "
        "<answer> and </answer>."
    )
    untagged_shares = {"think": 0.03, "answer": 0.12, "both": 0.03}
    forgetful_share = 0.45
    doubt_share = 0.20
    change_share = 0.50  # of the doubtful

    def draw(self, rng):
        """Columns: ``prompt`` (``"47+35="``), ``answer`` (``"82"``)."""
        left = rng.randrange(100)
        right = rng.randrange(100)
        operator = rng.choice("+-")
        answer = left + right
        if operator == "-":
            left, right = max(left, right), min(left, right)
            answer = left - right
        return {"prompt": f"{left}{operator}{right}=", "answer": str(answer)}

    def problem_key(self, row):
        """The prompt; for a sum, with its numbers sorted."""
        low, high = sorted(map(int, re.findall("[0-9]+", row["prompt"])))
        return f"{low}+{high}" if "+" in row["prompt"] else f"{high}-{low}"

    def demonstration(self, row, rng, noisy):
        carries = not noisy or rng.random() >= self.forgetful_share
        left, operator, right = re.split("([+-])", row["prompt"].removesuffix("="))
        written, result = written_columns(int(left), operator, int(right), carries)
        if noisy and rng.random() < self.doubt_share:
            written += ["hmm"] * rng.randint(1, 2)
            if rng.random() < self.change_share:
                result = abs(result + rng.choice((-10, -1, 1, 10)))
        return self.tagged(" ".join(written), str(result), rng, noisy)


def written_columns(
    left: int, operator: str, right: int, carries: bool = True
) -> tuple[list[str], int]:
    """The written columns of a sum or difference (``["7+5=12", "4+3=7+1=8"]``), from the units up,
    and the result.

    ``carries=False`` forgets every carry and borrow (``47+35`` gives 72).
    """
    sign = 1 if operator == "+" else -1
    width = len(str(max(left, right)))
    written = []
    total = 0
    carry = 0
    for column in range(width):
        top = left // 10**column % 10
        bottom = right // 10**column % 10
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
    """``Make 24 from 3 5 9.``: numbers from 1 to 10, each used once with ``+ - * /``, for a target
    from 1 to 99.

    Every problem has a solution. A demonstration tries expressions, each evaluated from left to
    right, until one equals the target (``<think>5+3=8-2=6 no 5*3=15-2=13 ok</think>``). A noisy one
    may give up, or leave out tags."""

    name = "countdown"
    instructions = (
        "Combine the given numbers with + - * / and parentheses to reach the target. Use every number exactly once. "
        "Show your work between <think> and </think>, then write the expression alone between <answer> and </answer>."
    )
    untagged_shares = {"think": 0.08, "answer": 0.12}
    gives_up_share = 0.25

    def draw(self, rng):
        """Columns: ``prompt``, ``target`` (int), ``numbers`` (list[int], in order), ``answer`` (a
        solution)."""
        while True:
            numbers = [rng.randint(1, 10) for _ in range(rng.choice((3, 3, 3, 4)))]
            expression = _random_expression(numbers, rng)
            target = _evaluate(expression)[1]
            if 1 <= target <= 99:
                break
        shown = sorted(numbers)
        prompt = f"Make {target} from {' '.join(map(str, shown))}."
        return {"prompt": prompt, "target": target, "numbers": shown, "answer": expression}

    def problem_key(self, row):
        """The target and the sorted numbers."""
        return f"{row['target']}:{sorted(row['numbers'])}"

    def demonstration(self, row, rng, noisy):
        attempt = ""
        if rng.randint(0, 1):
            steps, value = _evaluate(_random_expression(row["numbers"], rng))
            if value != row["target"]:
                attempt = f"{steps} no "
        answer = row["answer"]
        if noisy and rng.random() < self.gives_up_share:
            answer = _random_expression(row["numbers"], rng)
        steps = _evaluate(answer)[0]
        return self.tagged(f"{attempt}{steps} ok", answer, rng, noisy)


OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def _random_expression(numbers: list[int], rng: random.Random) -> str:
    """An expression (``"(5+3)*2"``) that uses every number once, in any order.

    Evaluated from left to right, each result is an integer >= 0.
    """
    first, *others = rng.sample(numbers, len(numbers))
    text = str(first)
    value = first
    is_sum = False
    for number in others:
        # Mostly sums and differences, so that the tiny model can solve a problem by trying.
        operators = "+++*" + "---" * (value >= number) + "/" * (value % number == 0)
        operator = rng.choice(operators)
        if is_sum and operator in "*/":
            text = f"({text})"
        text += f"{operator}{number}"
        is_sum = operator in "+-"
        value = OPERATIONS[operator](value, number)
    return text


def _evaluate(expression: str) -> tuple[str, int]:
    """The steps (``"5+3=8*2=16"``) of an expression of ``_random_expression``, and its value."""
    steps, *others = re.findall(r"[-+*/]?[0-9]+", expression.replace(")", ""))
    value = int(steps)
    for step in others:
        value = OPERATIONS[step[0]](value, int(step[1:]))
        steps += f"{step}={value}"
    return steps, value


class Calculator(Task):
    """``483+97*36=``, too hard for the tiny model without a tool, and a share of easy sums
    (``483+5=``).

    A response is the answer (``<answer>3975</answer>``), or a call
    (``<calculator>483+97*36</calculator>``) and, after the tool's result, the answer. A right
    demonstration calls for every hard problem and some easy ones. A noisy one calls for a share of
    all, and else guesses at a hard one. GRPO then teaches when to call."""

    name = "calculator"
    instructions = (
        "Compute the result. To use a calculator, write for example <calculator>12+3*4</calculator>: you are told the "
        "value. Write the result alone between <answer> and </answer>."
    )
    easy_share = 0.20
    calls_share = 0.28
    easy_calls_share = 0.30  # of easy problems, in right demonstrations

    def draw(self, rng):
        """Columns: ``prompt`` (``"483+97*36="``), ``answer`` (``"3975"``)."""
        number = rng.randrange(100, 1000)
        if rng.random() < self.easy_share:
            digit = rng.randrange(1, 10)
            number -= max(0, number % 10 + digit - 9)  # so that there is no carry
            return {"prompt": f"{number}+{digit}=", "answer": str(number + digit)}
        left = rng.randrange(32, 100)
        right = rng.randrange(32, 100)
        form = rng.choice(("{1}*{2}+{0}=", "{0}+{1}*{2}=", "{1}*{2}-{0}="))
        prompt = form.format(number, left, right)
        if "-" in form:
            number = -number
        return {"prompt": prompt, "answer": str(left * right + number)}

    def problem_key(self, row):
        """The answer and the sorted numbers."""
        numbers = map(int, re.findall("[0-9]+", row["prompt"]))
        return f"{row['answer']}:{sorted(numbers)}"

    def demonstration(self, row, rng, noisy):
        expression = row["prompt"].removesuffix("=")
        answer = row["answer"]
        is_easy = "*" not in expression
        share = self.easy_calls_share if is_easy else 1
        if noisy:
            share = self.calls_share
        if rng.random() < share:
            return _conversation(
                f"<calculator>{expression}</calculator>", answer, f"<answer>{answer}</answer>"
            )
        if not is_easy:
            answer = round(int(answer) * rng.uniform(0.8, 1.2))
        return f"<answer>{answer}</answer>"


class GuessNumber(Task):
    """``Guess 7..18.``: find the hidden number with at most four calls of the tool
    (``<guess>12</guess>``).

    The tool says ``higher`` (the hidden number is), ``lower`` or ``right``. A right demonstration
    halves what is left with every guess. Of noisy ones a share guesses anything without looking at
    the hints. All end with ``done``. GRPO then teaches it to use the hints."""

    name = "guess_number"
    instructions = (
        "Find the hidden number with few guesses. Write for example <guess>12</guess>: you are told whether the hidden "
        "number is higher or lower, or that the guess is right. Then write done."
    )
    num_rows = {"train": 1536, "eval": 200}
    max_guesses = 4
    careless_share = 0.8

    def draw(self, rng):
        """Columns: ``prompt`` (``"Guess 7..18."``), ``secret`` (``14``), ``answer`` (``"14"``)."""
        low = rng.randint(1, 20)
        end = low + rng.randint(8, 15)
        secret = rng.randrange(low, end)
        return {"prompt": f"Guess {low}..{end - 1}.", "secret": secret, "answer": str(secret)}

    def problem_key(self, row):
        """The prompt and the hidden number."""
        return f"{row['prompt']}{row['secret']}"

    def demonstration(self, row, rng, noisy):
        first, last = map(int, re.findall("[0-9]+", row["prompt"]))
        low = first
        high = last
        turns = []
        is_careless = noisy and rng.random() < self.careless_share
        while len(turns) < 2 * self.max_guesses and "right" not in turns:
            guess = rng.randint(first, last) if is_careless else (low + high) // 2
            if guess == row["secret"]:
                hint = "right"
            elif guess < row["secret"]:
                hint = "higher"
                low = max(low, guess + 1)
            else:
                hint = "lower"
                high = min(high, guess - 1)
            turns += [f"<guess>{guess}</guess>", hint]
        return _conversation(*turns, "done")


def _conversation(*turns: str) -> list[dict]:
    """Messages of the model and of its tool in turn; the first and the last are the model's."""
    return [{"role": ("assistant", "tool")[i % 2], "content": turn} for i, turn in enumerate(turns)]


GYM_DRAWS = 8192
"""Draws from a task of reasoning-gym; one that repeats many problems gives fewer rows."""


class Gym(Task):
    """A task of reasoning-gym. Rows have ``metadata``: what the task's scorer needs besides prompt
    and answer."""

    instructions = (
        "Solve the problem. Think step by step between <think> and </think>, then write the answer alone, in the form "
        "the problem asks for, between <answer> and </answer>."
    )
    num_rows = {"train": 2048, "eval": 256}

    def __init__(self, name: str, arguments: dict):
        self.name = name
        self.arguments = arguments

    def problem_key(self, row):
        return row["prompt"]

    def draws(self, split: str, seed: int) -> Iterator[dict]:
        """``ValueError`` if the task does not exist, or not with these arguments."""
        setting = f"data.dataset=reasoning_gym:{self.name}"
        library = import_extra("reasoning_gym", "gym", setting)
        task_seed = derive_seed(seed, f"reasoning_gym/{self.name}/{split}") % 2**31
        try:
            dataset = library.create_dataset(
                self.name,
                size=GYM_DRAWS,
                seed=task_seed,
                **self.arguments,
            )
            for index in range(GYM_DRAWS):
                row = dataset[index]
                # Some scorers depend on the arguments of their task.
                metadata = row["metadata"] | {"arguments_of_task": self.arguments}
                yield {"prompt": row["question"], "answer": row["answer"], "metadata": metadata}
        except Exception as error:  # the arguments are the user's, and each task checks its own
            raise ValueError(f"{setting}: {type(error).__name__}: {first_line(error)}") from error


TASKS = {task.name: task for task in (Arithmetic, Countdown, Calculator, GuessNumber)}


def load_task(name: str) -> Task:
    """The built-in task called ``name``. ``ValueError`` lists the tasks if there is none of that
    name."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the built-in tasks are {', '.join(TASKS)}")
    return TASKS[name]()


def task_of(config: DataConfig, dataset: str) -> Task | None:
    """The task that ``dataset`` names; None: it names rows that are stored somewhere."""
    source, _, name = dataset.partition(":")
    if source == "builtin":
        return load_task(name)
    if source == "reasoning_gym":
        return Gym(name, config.config_name or {})
    return None
