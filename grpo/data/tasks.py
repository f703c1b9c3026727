"""Tasks whose problems are computed, so that nothing is downloaded: the built-in tasks and the
tasks of the package reasoning-gym.

The built-in tasks also demonstrate how to solve a problem, with and without mistakes, for the
training of the tiny model (``grpo.data.tiny``). The rows and demonstrations of a seed depend on the
order of all random draws below. This order must not change, because measured runs started from
these rows. Tests compare digests of rows and demonstrations.
"""

import hashlib
import random
import re
from collections.abc import Iterator

from grpo.algorithm.seeding import derive_seed
from grpo.config import DataConfig
from grpo.system import first_line, import_extra

NUM_SPLIT_BUCKETS = 8
"""Number of buckets into which problems are hashed. Problems of bucket 0 are for evaluation, all
others for training."""


class Task:
    """A family of problems.

    Each built-in task has these attributes and methods:

    - ``name``;
    - ``instructions``: the system prompt for every model except the tiny one, which is trained
      without it;
    - ``missing_tag_probabilities``, for tasks with tags: the probabilities that a noisy
      demonstration lacks the tags ``think``, ``answer`` or ``both``;
    - ``draw(rng: random.Random) -> dict``: draw one problem, a row with ``prompt``, ``answer`` and
      the other columns that its rewards need;
    - ``problem_key(row: dict) -> str``: a text that is equal for rows with the same problem
      (``3+5`` and ``5+3``);
    - ``demonstration(row: dict, rng: random.Random, noisy: bool) -> str | list[dict]``: a correct
      response, or with ``noisy`` a response that may have mistakes. It is text or a list of
      messages of ``assistant`` and ``tool``, without EOS.
    """

    num_rows = {"train": 4096, "eval": 512}
    """Largest number of rows of each split."""

    def draws(self, split: str, seed: int) -> Iterator[dict]:
        """Yield rows without end. The same arguments give the same rows.

        The rows may belong to either split: :meth:`rows` keeps only the rows of ``split``.
        """
        rng = random.Random(derive_seed(seed, f"tasks/{self.name}/{split}"))
        while True:
            yield self.draw(rng)

    def split_of(self, row: dict) -> str:
        """Return the split of a row, ``"train"`` or ``"eval"``, from a hash of the task's name and
        the problem."""
        # The split does not depend on a seed. So a model that was trained with another seed, such
        # as the tiny model, has not seen the evaluation problems either.
        text = f"{self.name}:{self.problem_key(row)}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        bucket = digest[-1] % NUM_SPLIT_BUCKETS
        return "eval" if bucket == 0 else "train"

    def rows(self, split: str, seed: int, count: int | None = None) -> list[dict]:
        """Return rows of one split with different problems. The same seed gives the same rows.

        The number of rows is ``num_rows[split]``, or ``count`` if that is smaller. A task of
        reasoning-gym that repeats its problems gives fewer rows.
        """
        limit = self.num_rows[split]
        count = min(count or limit, limit)
        # The key is the problem, so that a problem that is drawn again gives no second row.
        rows = {}
        for row in self.draws(split, seed):
            if self.split_of(row) == split:
                rows.setdefault(self.problem_key(row), row)
            if len(rows) == count:
                break
        return list(rows.values())

    def tagged(self, thought: str, answer: str, rng: random.Random, noisy: bool) -> str:
        """Return a response with think and answer tags. If ``noisy``, tags are left out with the
        probabilities ``missing_tag_probabilities``."""
        missing = "none"
        if noisy:
            probabilities = self.missing_tag_probabilities
            complete = 1 - sum(probabilities.values())
            weights = [*probabilities.values(), complete]
            missing = rng.choices([*probabilities, "none"], weights)[0]
        if missing not in ("think", "both"):
            thought = f"<think>{thought}</think>"
        if missing not in ("answer", "both"):
            answer = f"<answer>{answer}</answer>"
        return f"{thought}\n{answer}"


def _numbers_of_prompt(row: dict) -> list[int]:
    return [int(digits) for digits in re.findall("[0-9]+", row["prompt"])]


class Arithmetic(Task):
    """Sums and differences (``47+35=``, ``82-35=``) of two numbers from 0 to 99, without negative
    results.

    A demonstration computes column by column (``<think>7+5=12 4+3=7+1=8</think>``). A noisy
    demonstration may forget the carry, doubt the result (``hmm``) and change it, or leave out tags.
    Each of these mistakes is drawn at random, with the probabilities below. A model trained on
    noisy demonstrations is correct about half of the time. GRPO then teaches the model to add the
    carry, keep its result and write the tags.
    """

    name = "arithmetic"
    instructions = (
        "Solve the problem. Show your work between <think> and </think>, "
        "then write the result alone between <answer> and </answer>."
    )
    missing_tag_probabilities = {"think": 0.03, "answer": 0.12, "both": 0.03}
    forget_probability = 0.45
    doubt_probability = 0.20
    change_probability = 0.50
    """Probability that a doubted result is changed."""

    def draw(self, rng):
        """Draw a row with the columns ``prompt`` (``"47+35="``) and ``answer`` (``"82"``)."""
        left = rng.randrange(100)
        right = rng.randrange(100)
        operator = rng.choice("+-")
        answer = left + right
        if operator == "-":
            # The larger number comes first: a negative result cannot be written by columns.
            right, left = sorted((left, right))
            answer = left - right
        return {"prompt": f"{left}{operator}{right}=", "answer": str(answer)}

    def problem_key(self, row):
        """Return the prompt without ``=``. The numbers of a sum are sorted, so ``3+5`` and ``5+3``
        are the same problem."""
        low, high = sorted(_numbers_of_prompt(row))
        return f"{low}+{high}" if "+" in row["prompt"] else f"{high}-{low}"

    def demonstration(self, row, rng, noisy):
        carries = not noisy or rng.random() >= self.forget_probability
        left, operator, right = re.split("([+-])", row["prompt"].removesuffix("="))
        written, result = written_columns(int(left), operator, int(right), carries)
        # A doubted result is right as often as any other, so changing it does harm on average. GRPO
        # can unlearn the doubt: then `hmm` disappears from the completions.
        if noisy and rng.random() < self.doubt_probability:
            written += ["hmm"] * rng.randint(1, 2)
            if rng.random() < self.change_probability:
                result = abs(result + rng.choice((-10, -1, 1, 10)))
        return self.tagged(" ".join(written), str(result), rng, noisy)


def written_columns(
    left: int,
    operator: str,
    right: int,
    carries: bool,
) -> tuple[list[str], int]:
    """Compute a sum or difference column by column, from the units up.

    Returns the written columns (``["7+5=12", "4+3=7+1=8"]``) and the result. ``carries=False``
    forgets every carry and borrow (``47+35`` gives 72).
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
            top += 10  # borrowed from the next column, which subtracts 1 as its carry
        value = top + sign * bottom
        text = f"{top}{operator}{bottom}={value}"
        if carry:
            value += sign
            text += f"{operator}1={value}"
        written.append(text)
        # The last column keeps its tens: there is no column to the left for the carry.
        digit = value if is_last else value % 10
        total += digit * 10**column
        # A sum carries if its value has two digits. A difference borrows if its top number has two
        # digits.
        carry = int(carries and max(top, value) >= 10)
    return written, total


class Countdown(Task):
    """Problems such as ``Make 24 from 3 5 9.``: reach a target from 1 to 99 with ``+ - * /`` and
    numbers from 1 to 10, using each number once.

    Every problem has a solution. Expressions are evaluated from left to right. A demonstration
    writes a solution with its intermediate results, in some cases after a failed attempt:
    ``<think>5+3=8-2=6 no 5*3=15-2=13 ok</think>`` finds 13 = 5*3-2. A noisy demonstration may end
    with a random expression instead of a solution, or leave out tags."""

    name = "countdown"
    instructions = (
        "Combine the given numbers with + - * / and parentheses to reach the target. "
        "Use every number exactly once. Show your work between <think> and </think>, "
        "then write the expression alone between <answer> and </answer>."
    )
    missing_tag_probabilities = {"think": 0.08, "answer": 0.12}
    give_up_probability = 0.25

    def draw(self, rng):
        """Draw a row with the columns ``prompt``, ``target`` (int), ``numbers`` (list[int],
        ascending) and ``answer`` (a solution)."""
        while True:
            count = rng.choice((3, 3, 3, 4))
            numbers = [rng.randint(1, 10) for _ in range(count)]
            # The target is the value of an expression, so every problem has a solution.
            expression = _random_expression(numbers, rng)
            _, target = _evaluate(expression)
            if 1 <= target <= 99:
                break
        # The numbers are sorted, so that the same problem always has the same prompt.
        numbers.sort()
        prompt = f"Make {target} from {' '.join(map(str, numbers))}."
        return {"prompt": prompt, "target": target, "numbers": numbers, "answer": expression}

    def problem_key(self, row):
        """Return the target and the sorted numbers."""
        return f"{row['target']}:{row['numbers']}"

    def demonstration(self, row, rng, noisy):
        # A failed attempt in half of the responses teaches the model to go on after a failure.
        attempt = ""
        if rng.randint(0, 1):
            steps, value = _evaluate(_random_expression(row["numbers"], rng))
            if value != row["target"]:
                attempt = f"{steps} no "
        answer = row["answer"]
        if noisy and rng.random() < self.give_up_probability:
            answer = _random_expression(row["numbers"], rng)
        steps, _ = _evaluate(answer)
        return self.tagged(f"{attempt}{steps} ok", answer, rng, noisy)


OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}


def _random_expression(numbers: list[int], rng: random.Random) -> str:
    """Return a random expression (``"(5+3)*2"``) that uses every number once, in any order.

    If the expression is evaluated from left to right, each intermediate result is an integer >= 0.
    """
    first, *others = rng.sample(numbers, len(numbers))
    text = str(first)
    value = first
    is_sum = False
    for number in others:
        # Mostly sums and differences, so that the tiny model can solve a problem by trying.
        operators = "+++*"
        if value >= number:
            operators += "---"
        if value % number == 0:
            operators += "/"
        operator = rng.choice(operators)

        # The value is computed from left to right. By operator precedence, * and / would come
        # before a sum to their left, so such a sum gets parentheses.
        if is_sum and operator in "*/":
            text = f"({text})"
        text += f"{operator}{number}"
        is_sum = operator in "+-"
        value = OPERATIONS[operator](value, number)
    return text


def _evaluate(expression: str) -> tuple[str, int]:
    """Return the steps (``"5+3=8*2=16"``) and the value of an expression of
    ``_random_expression``."""
    steps, *others = re.findall(r"[-+*/]?[0-9]+", expression.replace(")", ""))
    value = int(steps)
    for step in others:
        value = OPERATIONS[step[0]](value, int(step[1:]))
        steps += f"{step}={value}"
    return steps, value


class Calculator(Task):
    """Hard problems (``483+97*36=``), which the tiny model cannot solve without a tool, and some
    easy sums (``483+5=``).

    A response is the answer (``<answer>3975</answer>``), or a call of the tool
    (``<calculator>483+97*36</calculator>``) and, after the tool's result, the answer. A correct
    demonstration calls the tool for every hard problem and for some easy sums. A noisy
    demonstration calls the tool with the same probability for hard and easy problems. Without a
    call, it guesses the answer of a hard problem. GRPO then teaches the model when to call the
    tool.
    """

    name = "calculator"
    instructions = (
        "Compute the result. To use a calculator, write for example "
        "<calculator>12+3*4</calculator>: you are told the value. "
        "Write the result alone between <answer> and </answer>."
    )
    easy_probability = 0.20
    call_probability = 0.28
    """Probability that a noisy demonstration calls the tool."""
    easy_call_probability = 0.30
    """Probability that a correct demonstration calls the tool for an easy sum."""

    def draw(self, rng):
        """Draw a row with the columns ``prompt`` (``"483+97*36="``) and ``answer`` (``"3975"``)."""
        number = rng.randrange(100, 1000)
        if rng.random() < self.easy_probability:
            digit = rng.randrange(1, 10)
            number -= max(0, number % 10 + digit - 9)  # so that there is no carry
            return {"prompt": f"{number}+{digit}=", "answer": str(number + digit)}

        # A product is at least 32 * 32 = 1024, so that a difference is never negative.
        left = rng.randrange(32, 100)
        right = rng.randrange(32, 100)
        form = rng.choice(("{1}*{2}+{0}=", "{0}+{1}*{2}=", "{1}*{2}-{0}="))
        prompt = form.format(number, left, right)
        if "-" in form:
            number = -number
        return {"prompt": prompt, "answer": str(left * right + number)}

    def problem_key(self, row):
        """Return the answer and the sorted numbers of the prompt."""
        numbers = sorted(_numbers_of_prompt(row))
        return f"{row['answer']}:{numbers}"

    def demonstration(self, row, rng, noisy):
        expression = row["prompt"].removesuffix("=")
        answer = row["answer"]
        is_easy = "*" not in expression
        probability = self.easy_call_probability if is_easy else 1
        if noisy:
            probability = self.call_probability
        if rng.random() < probability:
            return _conversation(
                f"<calculator>{expression}</calculator>", answer, f"<answer>{answer}</answer>"
            )
        # A guess is near the answer but hardly ever right, so on hard problems a call earns a
        # higher reward.
        if not is_easy:
            answer = round(int(answer) * rng.uniform(0.8, 1.2))
        return f"<answer>{answer}</answer>"


class GuessNumber(Task):
    """Problems such as ``Guess 7..18.``: find the hidden number with at most four calls of a tool
    (``<guess>12</guess>``).

    The tool says ``right``, or whether the hidden number is ``higher`` or ``lower`` than the guess.
    A correct demonstration halves the remaining range with every guess. A noisy demonstration may
    ignore the hints and guess any number of the original range each time. All demonstrations end
    with ``done``. GRPO then teaches the model to use the hints.
    """

    name = "guess_number"
    instructions = (
        "Find the hidden number with few guesses. Write for example <guess>12</guess>: "
        "you are told whether the hidden number is higher or lower, or that the guess is right. "
        "Then write done."
    )
    num_rows = {"train": 1536, "eval": 200}
    max_guesses = 4
    careless_probability = 0.8

    def draw(self, rng):
        """Draw a row with the columns ``prompt`` (``"Guess 7..18."``), ``secret`` (``14``) and
        ``answer`` (``"14"``)."""
        # Among at most 15 numbers, four guesses by halves always find the hidden one.
        low = rng.randint(1, 20)
        end = low + rng.randint(8, 15)
        secret = rng.randrange(low, end)
        return {"prompt": f"Guess {low}..{end - 1}.", "secret": secret, "answer": str(secret)}

    def problem_key(self, row):
        """Return the prompt and the hidden number."""
        return f"{row['prompt']}{row['secret']}"

    def demonstration(self, row, rng, noisy):
        first, last = _numbers_of_prompt(row)
        low = first
        high = last
        turns = []
        is_careless = noisy and rng.random() < self.careless_probability
        # Each guess gives two messages: the call of the model and the hint of the tool.
        while len(turns) < 2 * self.max_guesses and "right" not in turns:
            guess = rng.randint(first, last) if is_careless else (low + high) // 2
            if guess == row["secret"]:
                hint = "right"
            elif guess < row["secret"]:
                hint = "higher"
                low = guess + 1
            else:
                hint = "lower"
                high = guess - 1
            turns += [f"<guess>{guess}</guess>", hint]
        return _conversation(*turns, "done")


def _conversation(*turns: str) -> list[dict]:
    """Return messages of the model and of its tool, which alternate. The first message is the
    model's."""
    messages = []
    for number, turn in enumerate(turns):
        role = "tool" if number % 2 else "assistant"
        messages.append({"role": role, "content": turn})
    return messages


GYM_DRAWS = 8192
"""Largest number of problems drawn for one split of a reasoning-gym task. A task that repeats many
problems therefore gives fewer rows than ``Gym.num_rows``."""


class Gym(Task):
    """A task of reasoning-gym. Its rows have the column ``metadata``, which the task's scorer needs
    besides prompt and answer."""

    instructions = (
        "Solve the problem. Think step by step between <think> and </think>, "
        "then write the answer alone, in the form the problem asks for, "
        "between <answer> and </answer>."
    )
    num_rows = {"train": 2048, "eval": 256}

    def __init__(self, name: str, arguments: dict):
        self.name = name
        self.arguments = arguments

    def problem_key(self, row):
        return row["prompt"]

    def draws(self, split: str, seed: int) -> Iterator[dict]:
        """Yield at most ``GYM_DRAWS`` rows, which may belong to either split.

        Raises:
            ValueError: the package is not installed, has no such task, or refuses the arguments.
        """
        setting = f"data.dataset=reasoning_gym:{self.name}"
        library = import_extra("reasoning_gym", "gym", setting)
        # A task may use NumPy's random generator, which refuses larger seeds.
        task_seed = derive_seed(seed, f"reasoning_gym/{self.name}/{split}") % 2**31
        try:
            dataset = library.create_dataset(
                self.name,
                size=GYM_DRAWS,
                seed=task_seed,
                **self.arguments,
            )
            for row in dataset:
                # Some scorers need the arguments of their task.
                metadata = row["metadata"] | {"arguments_of_task": self.arguments}
                yield {"prompt": row["question"], "answer": row["answer"], "metadata": metadata}
        except Exception as error:
            # The user chose the arguments, and each task checks its arguments with other
            # exceptions.
            raise ValueError(f"{setting}: {type(error).__name__}: {first_line(error)}") from error


TASKS = {task.name: task for task in (Arithmetic, Countdown, Calculator, GuessNumber)}


def load_task(name: str) -> Task:
    """Return the built-in task called ``name``.

    Raises:
        ValueError: there is no such task; the message lists the tasks.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the built-in tasks are {', '.join(TASKS)}")
    return TASKS[name]()


def task_of(config: DataConfig, dataset: str) -> Task | None:
    """Return the task that ``dataset`` names (``builtin:arithmetic``); None if it names no task."""
    source, _, name = dataset.partition(":")
    if source == "builtin":
        return load_task(name)
    if source == "reasoning_gym":
        return Gym(name, config.config_name or {})
    return None
