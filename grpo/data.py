"""Datasets to problems, and problems to each rank's share of a step."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from grpo.batch import Problem
from grpo.seeding import derive_seed, generator
from grpo.tasks import load_task

_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


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
    other = config.eval_dataset is not None and not train
    source = config.eval_dataset if other else config.dataset
    what = f"data.{'eval_dataset' if other else 'dataset'}={source}"
    if not rows:
        raise ValueError(f"{what} has no rows")
    builtin = source.startswith("builtin:")
    answer_column = config.answer_column or ("answer" if builtin else None)
    for key, column in (("prompt_column", config.prompt_column), ("answer_column", answer_column)):
        if column is not None and column not in rows[0]:
            raise ValueError(f"data.{key}={column}: {what} has no such column; it has {', '.join(rows[0])}")
    pattern = _compile(config.answer_pattern)
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
    texts = [render(prompt, tokenizer, rows.system_prompt, config.few_shot) for prompt in rows.prompts]
    # A chat template has put every special token where it belongs; without one the tokenizer adds its own (BOS).
    ids = tokenizer(texts, add_special_tokens=not tokenizer.chat_template)["input_ids"]
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


def read_rows(config, *, train: bool, seed: int) -> list[dict[str, Any]] | None:
    """The raw rows, as dictionaries. See :func:`load_rows`."""
    source = config.dataset if train or config.eval_dataset is None else config.eval_dataset
    limit = config.max_train_samples if train else config.max_eval_samples
    if source.startswith("builtin:"):
        return load_task(source.removeprefix("builtin:")).rows("train" if train else "eval", seed)[:limit]
    split = config.train_split if train else config.eval_split
    if split is None:
        if config.eval_dataset is None:
            return None
        split = "train"  # what `datasets` calls the only split of a plain file
    dataset = _open(source, config.config_name, split)
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    return list(dataset)


def _open(source: str, config_name: str | None, split: str):
    import datasets

    datasets.disable_progress_bars()
    suffix = os.path.splitext(source)[1].lower()
    looks_local = source.startswith((".", "/", "~")) or suffix in _FORMATS
    if looks_local and not os.path.exists(source):
        raise ValueError(f"data.dataset={source} does not exist")
    try:
        if os.path.isfile(source):
            if suffix not in _FORMATS:
                raise ValueError(f"data.dataset={source}: files must end in {', '.join(_FORMATS)}")
            if os.path.getsize(source) == 0:
                raise ValueError(f"data.dataset={source} is empty")
            return datasets.load_dataset(_FORMATS[suffix], data_files=source, split=split)
        if os.path.isdir(source) and {"dataset_dict.json", "state.json"} & set(os.listdir(source)):
            return _slice_of_saved(datasets.load_from_disk(source), split, source)
        return datasets.load_dataset(source, config_name, split=split)
    except (datasets.exceptions.DatasetGenerationError, UnicodeDecodeError) as error:
        raise ValueError(_explain_broken_file(source, suffix, error)) from None
    except (OSError, ValueError, ConnectionError) as error:
        if str(error).startswith("data."):
            raise
        message = str(error).strip().splitlines()[0]
        raise ValueError(f"data.dataset={source}, split {split!r}: {message}") from None


def _slice_of_saved(saved, split: str, source: str):
    """``train`` or ``train[:90%]`` of a folder saved by ``save_to_disk``, which knows no slices itself."""
    import datasets

    name = split.split("[")[0]
    if isinstance(saved, datasets.DatasetDict):
        if name not in saved:
            raise ValueError(f"data.dataset={source} has no split {name!r}; it has {', '.join(saved)}")
        saved = saved[name]
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(saved)})
    rows = [i for part in parts for i in range(part.from_ or 0, len(saved) if part.to is None else part.to)]
    return saved.select(rows)


def _explain_broken_file(source: str, suffix: str, error: Exception) -> str:
    """The line of a JSONL file that does not parse; ``datasets`` does not say."""
    if suffix in (".jsonl", ".json"):
        with open(source, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line) if line.strip() else {}
                except (ValueError, RecursionError) as broken:
                    reason = getattr(broken, "msg", None) or getattr(broken, "reason", None) or str(broken)
                    return f"data.dataset={source}:{number}: not valid JSON: {reason}"
                if suffix == ".jsonl" and not isinstance(row, dict):
                    return f"data.dataset={source}:{number}: expected a JSON object, got {type(row).__name__}"
    cause = error.__cause__ or error
    return f"data.dataset={source} cannot be read: {str(cause).strip().splitlines()[0]}"


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
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        return [{"role": m["role"], "content": m["content"]} for m in value]
    raise ValueError(f"{where}: expected text or a list of {{role, content}} messages, got {str(value)[:80]!r}")


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


class Schedule:
    """Which problems a rank works on at which step: a pure function of the step, so that a resumed run needs no state."""

    def __init__(
        self, problems: Sequence[Problem], *, prompts_per_step: int, seed: int, rank: int = 0, world_size: int = 1
    ):
        if len(problems) < prompts_per_step:
            raise ValueError(
                f"{len(problems)} training problems are fewer than rollout.prompts_per_step={prompts_per_step}: "
                f"use prompts_per_step={len(problems) // world_size * world_size or world_size} or more data"
            )
        self.problems, self.prompts_per_step, self.seed = problems, prompts_per_step, seed
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = len(problems) // prompts_per_step
        self._cached: tuple[Any, list[int]] = (None, [])

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
        taken = {problem.index for problem in self._deal(step, 0, 1)}
        order = torch.randperm(len(self.problems), generator=generator(self.seed, "substitutes", step)).tolist()
        free = [i for i in order if self.problems[i].index not in taken]
        where = attempt * self.prompts_per_step + place * self.world_size + self.rank
        return self.problems[free[where]] if where < len(free) else None

    def _deal(self, step: int, rank: int, world_size: int) -> list[Problem]:
        epoch, position = divmod(step, self.steps_per_epoch)
        key = (epoch, rank, world_size)
        if self._cached[0] != key:
            sampler = DistributedSampler(
                self.problems,
                num_replicas=world_size,
                rank=rank,
                shuffle=True,
                seed=derive_seed(self.seed, "data order"),
                drop_last=True,
            )
            sampler.set_epoch(epoch)
            self._cached = (key, list(sampler))
        n = self.prompts_per_step // world_size
        return [self.problems[i] for i in self._cached[1][position * n : (position + 1) * n]]


def count_shared(train: Sequence[Problem], evaluation: Sequence[Problem]) -> int:
    """Evaluation problems whose prompt is also a training prompt."""
    seen = {problem.prompt_ids for problem in train}
    return sum(problem.prompt_ids in seen for problem in evaluation)
