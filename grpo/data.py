"""Datasets to problems, and problems to each rank's share of a step."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from grpo.batch import Problem
from grpo.datafile import FORMATS, check_csv, first_mistake, nearby
from grpo.hub import hub_answers
from grpo.seeding import derive_seed, generator
from grpo.tasks import TASKS, load_task


@dataclass(frozen=True)
class ProblemSet:
    """The problems of one split and what was left out of them."""

    problems: list[Problem]
    num_too_long: int = 0
    """Rows whose prompt has more than ``max_prompt_length`` tokens."""
    num_without_answer: int = 0
    """Rows in which ``answer_pattern`` matched nothing; their answer is None."""


@dataclass(frozen=True)
class Rows:
    """One split, read and checked, before a tokenizer has seen it."""

    what: str
    """Key and value that named the source, for messages."""
    prompts: list[str | list[dict[str, str]]]
    columns: list[dict[str, Any]]
    system_prompt: str | None
    num_without_answer: int


def fingerprint(rows: Rows) -> str:
    """SHA-256 over prompts and columns in order: two files of one name are told apart by it."""
    digest = hashlib.sha256()
    for row in zip(rows.prompts, rows.columns, strict=True):
        # A value that JSON has no word for (an image) counts by its type alone.
        digest.update(json.dumps(row, sort_keys=True, default=lambda value: type(value).__name__).encode())
    return digest.hexdigest()


def load_rows(config, *, train: bool, seed: int) -> Rows | None:
    """The training or the evaluation rows of a ``DataConfig``; needs neither tokenizer nor model.

    Args:
        config: the ``data`` section.
        train: the training split, or the evaluation split.
        seed: of the built-in tasks.

    Returns:
        None if the config names no evaluation data.

    Raises:
        ValueError: on a missing file, split or column, an unreadable line, an empty dataset, or a pattern that matches nothing.
            One line each.
    """
    rows = read_rows(config, train=train, seed=seed)
    if rows is None:
        return None
    key, source = _source(config, train)
    what = f"data.{key}={source}"
    if not rows:
        raise ValueError(f"{what} has no rows")
    builtin = source.startswith("builtin:")
    answer_column = config.answer_column or ("answer" if builtin else None)
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", answer_column)):
        if column is not None and column not in rows[0]:
            raise ValueError(f"data.{key}={column}: {what} has no such column; it has {', '.join(rows[0])}")
    if answer_column is not None and all(row[answer_column] is None for row in rows):
        raise ValueError(f"data.answer_column={answer_column}: it is empty in every row of {what}")
    pattern = _compile(config.answer_pattern)
    if pattern is not None and answer_column is None:
        raise ValueError(
            f"data.answer_pattern={config.answer_pattern!r} needs data.answer_column: the column it looks in"
        )
    system_prompt = config.system_prompt
    if system_prompt is None and builtin:
        system_prompt = load_task(source.removeprefix("builtin:")).system_prompt

    prompts, columns, num_without_answer = [], [], 0
    for number, row in enumerate(rows, 1):
        prompts.append(_prompt_of(row[config.prompt_column], f"{what}, row {number}, column {config.prompt_column}"))
        others = {name: value for name, value in row.items() if name != config.prompt_column}
        if answer_column is not None:
            others["answer"] = extract(row[answer_column], pattern)
            num_without_answer += pattern is not None and others["answer"] is None
        columns.append(others)
    if num_without_answer == len(rows):
        raise ValueError(
            f"data.answer_pattern={config.answer_pattern!r} matches nothing in column {answer_column!r} of {what}; "
            f"its first value is {str(rows[0][answer_column])[:80]!r}"
        )
    return Rows(what, prompts, columns, system_prompt, num_without_answer)


def make_problems(rows: Rows, config, tokenizer: Any) -> ProblemSet:
    """Render and tokenize the prompts, and leave out (never truncate) those that are too long.

    Raises:
        ValueError: if none is left.
    """
    texts = [_rendered(number, rows, config, tokenizer) for number in range(1, len(rows.prompts) + 1)]
    # A chat template has put every special token where it belongs; without one the tokenizer adds its own (BOS).
    ids = tokenizer(texts, add_special_tokens=not tokenizer.chat_template, verbose=False)["input_ids"]
    if not tokenizer.chat_template:  # some tokenizers add an EOS too, after which there is nothing to say
        ids = [_without_added_end(row, text, tokenizer) for row, text in zip(ids, texts, strict=True)]
    problems = [
        Problem(index, prompt, tuple(prompt_ids), columns)
        for index, (prompt, prompt_ids, columns) in enumerate(zip(rows.prompts, ids, rows.columns, strict=True))
        if 0 < len(prompt_ids) <= config.max_prompt_length
    ]
    if not problems:
        raise ValueError(
            f"all {len(ids)} prompts of {rows.what} are longer than data.max_prompt_length={config.max_prompt_length} tokens "
            f"(or empty): the shortest has {min(map(len, ids))}"
        )
    return ProblemSet(problems, len(ids) - len(problems), rows.num_without_answer)


def _source(config, train: bool) -> tuple[str, str]:
    """The key that names the rows' source, and its value."""
    other = config.eval_dataset is not None and not train
    return ("eval_dataset", config.eval_dataset) if other else ("dataset", config.dataset)


def read_rows(config, *, train: bool, seed: int) -> list[dict[str, Any]] | None:
    """The raw rows, as dictionaries. See :func:`load_rows`."""
    key, source = _source(config, train)
    limit = config.max_train_samples if train else config.max_eval_samples
    if source.startswith("builtin:"):
        name = source.removeprefix("builtin:")
        if name not in TASKS:
            raise ValueError(f"data.{key}={source}: the built-in tasks are {', '.join(f'builtin:{t}' for t in TASKS)}")
        return load_task(name).rows("train" if train else "eval", seed)[:limit]
    split = config.train_split if train else config.eval_split
    if split is None:
        if config.eval_dataset is None:
            return None
        split = "train"  # what `datasets` calls the only split of a plain file
    return _read(f"data.{key}={source}", os.path.expanduser(source), config.config_name, split, limit)


def _read(what: str, source: str, config_name: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    """The rows of one split of a file, a folder or a Hub dataset; whatever is wrong with it, in one line."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises; one line is enough
    suffix = os.path.splitext(source)[1].lower()
    looks_local = source.startswith((".", "/", "~")) or suffix in FORMATS
    if not os.path.exists(source):
        if looks_local:
            raise ValueError(f"{what} does not exist{nearby(source)}")
        if not hub_answers():  # its client would retry for 23 seconds; a copy in the cache is used
            datasets.config.HF_HUB_OFFLINE = True
    elif os.path.isfile(source):
        if suffix not in FORMATS:
            raise ValueError(f"{what}: files must end in {', '.join(FORMATS)}")
        if os.path.getsize(source) == 0:
            raise ValueError(f"{what} is empty")
    if suffix == ".csv" and os.path.isfile(source):
        mistake = check_csv(source)
        if mistake:
            raise ValueError(what + mistake)
    try:
        dataset = _open(source, suffix, config_name, split)
        return list(dataset if limit is None else dataset.select(range(min(limit, len(dataset)))))
    except Exception as error:  # a user's file can break pandas, pyarrow and datasets in every way they know
        if "corresponds to no data" in str(error):
            raise ValueError(f"{what} has no rows (split {split!r})") from None
        if not os.path.exists(source) and not hub_answers():
            raise ValueError(
                f"{what} is no file or folder here, the Hub cannot be reached, and its cache has no copy of that name"
            ) from None
        if os.path.isdir(source):
            raise ValueError(
                f"{what} (split {split!r}) cannot be read: {_one_line(error)}; give a file, or a folder saved by datasets"
            ) from None
        mistake = first_mistake(source, suffix) if os.path.isfile(source) else None
        raise ValueError(what + (mistake or f" (split {split!r}) cannot be read: {_one_line(error)}")) from None


def _open(source: str, suffix: str, config_name: str | None, split: str):
    import datasets

    if os.path.isfile(source):
        # In a CSV file only the empty cell is missing: pandas would also make None of the texts NA, None and null.
        options = {"keep_default_na": False, "na_values": [""]} if suffix == ".csv" else {}
        return datasets.load_dataset(FORMATS[suffix], data_files=source, split=split, **options)
    if os.path.isdir(source) and {"dataset_dict.json", "state.json"} & set(os.listdir(source)):
        return _slice_of_saved(datasets.load_from_disk(source), split)
    return datasets.load_dataset(source, config_name, split=split)


def _slice_of_saved(saved, split: str):
    """``train`` or ``train[:90%]`` of a folder saved by ``save_to_disk``, which knows no slices itself."""
    import datasets

    name = split.split("[")[0]
    if isinstance(saved, datasets.DatasetDict):
        if name not in saved:
            raise ValueError(f'Unknown split "{name}". Should be one of {list(saved)}.')
        saved = saved[name]
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(saved)})
    rows = [i for part in parts for i in range(part.from_ or 0, len(saved) if part.to is None else part.to)]
    return saved.select(rows)


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]


def _compile(pattern: str | None) -> re.Pattern | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"data.answer_pattern={pattern!r} is not a regular expression: {error}") from None


def extract(answer: Any, pattern: re.Pattern | None) -> Any:
    """The first group (or whole match) of ``pattern`` in an answer, stripped; the answer itself without a pattern."""
    if pattern is None or answer is None:
        return answer
    match = pattern.search(str(answer))
    if match is None:
        return None
    return (match.group(1) if pattern.groups else match.group(0)).strip()


def _prompt_of(value: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(f"{where}: expected text or a list of {{role, content}} messages, got {str(value)[:80]!r}")
    if value[-1]["role"] in ("system", "assistant"):
        raise ValueError(f"{where}: the last message is of role {value[-1]['role']!r}; a prompt ends with the user's")
    return [{"role": m["role"], "content": m["content"]} for m in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _rendered(number: int, rows: Rows, config, tokenizer: Any) -> str:
    try:
        return render(rows.prompts[number - 1], tokenizer, rows.system_prompt, config.few_shot)
    except Exception as error:  # a chat template is a program that came with the model
        raise ValueError(
            f"the model's chat template does not work on row {number} of {rows.what}: {_one_line(error)}"
        ) from None


def _without_added_end(ids: list[int], text: str, tokenizer: Any) -> list[int]:
    added = ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if added and len(ids) > 1 else ids


def render(
    prompt: str | list[dict[str, str]], tokenizer: Any, system_prompt: str | None, few_shot: Sequence[dict[str, str]]
) -> str:
    """The text the model sees: system prompt, worked examples, question, and the generation prompt of the chat template.

    A tokenizer without a chat template gets the same parts as plain text.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    lead = []
    if turns[0]["role"] == "system":  # a row's own system prompt wins
        lead, turns = turns[:1], turns[1:]
    elif system_prompt:
        lead = [{"role": "system", "content": system_prompt}]
    for example in few_shot:
        lead.append({"role": "user", "content": example["prompt"]})
        lead.append({"role": "assistant", "content": example["completion"]})
    messages = lead + turns
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    *before, last = [message["content"] for message in messages]
    return "".join(text + "\n\n" for text in before) + last


def check_enough(num_problems: int, prompts_per_step: int, *, unit: int = 1) -> None:
    """Refuse a training set that is smaller than one step.

    Args:
        unit: what ``prompts_per_step`` must be a multiple of (ranks, times minibatches).
    """
    if num_problems < prompts_per_step:
        fits = num_problems // unit * unit
        works = f"use prompts_per_step={fits}, or more data" if fits else f"at least {unit} are needed"
        raise ValueError(
            f"{num_problems} training problems are fewer than rollout.prompts_per_step={prompts_per_step}: {works}"
        )


class Schedule:
    """Which problems a rank works on at which step: a pure function of the step, so that a resumed run needs no state."""

    def __init__(
        self, problems: Sequence[Problem], *, prompts_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ):
        check_enough(len(problems), prompts_per_step, unit=world_size)
        self.problems, self.prompts_per_step, self.seed = problems, prompts_per_step, seed
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = len(problems) // prompts_per_step
        self._orders: dict[tuple[int, int, int], list[int]] = {}
        self._free: tuple[int, list[int]] = (-1, [])

    def at(self, step: int) -> list[Problem]:
        """This rank's ``prompts_per_step / world_size`` problems of a step.

        DistributedSampler deals out the epoch's permutation like cards, so that the global batch of a step is the same set
        for every world size: card ``i`` of it goes to rank ``i % world_size``.
        """
        return self._deal(step, self.rank, self.world_size)

    def substitute(self, step: int, place: int, attempt: int) -> Problem | None:
        """The problem that takes over place ``place`` of this rank's share at the given attempt (0, 1, ...), for dynamic sampling.

        Drawn from the problems that are not in the step's global batch, each at most once in a step, whatever the world size;
        None when they are used up.
        """
        if self._free[0] != step:
            taken = {problem.index for problem in self._deal(step, 0, 1)}
            order = torch.randperm(len(self.problems), generator=generator(self.seed, "substitutes", step)).tolist()
            self._free = (step, [i for i in order if self.problems[i].index not in taken])
        free = self._free[1]
        where = attempt * self.prompts_per_step + place * self.world_size + self.rank
        return self.problems[free[where]] if where < len(free) else None

    def _deal(self, step: int, rank: int, world_size: int) -> list[Problem]:
        epoch, position = divmod(step, self.steps_per_epoch)
        key = (epoch, rank, world_size)
        if key not in self._orders:
            sampler = DistributedSampler(
                self.problems,
                num_replicas=world_size,
                rank=rank,
                shuffle=True,
                seed=derive_seed(self.seed, "data order"),
                drop_last=True,
            )
            sampler.set_epoch(epoch)
            self._orders = {k: order for k, order in self._orders.items() if k[0] == epoch}  # one epoch is kept
            self._orders[key] = list(sampler)
        n = self.prompts_per_step // world_size
        return [self.problems[i] for i in self._orders[key][position * n : (position + 1) * n]]


def count_shared(train: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """Evaluation problems whose prompt is also a training prompt."""
    seen = {problem.prompt_ids for problem in train}
    return sum(problem.prompt_ids in seen for problem in evaluation)
