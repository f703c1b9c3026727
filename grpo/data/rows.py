"""Read the rows of a dataset: a file, a saved folder, the Hub, a task, Python objects.

The only file that imports ``datasets``, which does not read single JSON and CSV files because it changes their values:
texts that look like dates become dates, ``12`` beside an empty cell of a CSV file ``12.0``, and ``007`` becomes ``7``.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.algorithm.seeding import derive_seed
from grpo.data.tasks import gym_rows, load_task

if TYPE_CHECKING:  # the tiny model and the tasks are used without pydantic
    from grpo.config import DataConfig

BUILTIN_PREFIX, GYM_PREFIX = "builtin:", "reasoning_gym:"
ENVIRONMENT_ROWS = "environment:prompts"
"""In place of a dataset's name in the configuration: the prompts are those of an environment, and rows are seeds."""
NUM_PROMPTS = {"train": 4096, "eval": 128}
"""Of an environment, unless ``max_train_samples`` or ``max_eval_samples`` are set."""
PYTHON_ROWS = "python:rows"
"""In place of a dataset's name in the configuration: rows that a Python program passed to ``grpo.train``."""


class FileRow(dict):
    """A row of a JSON or CSV file that knows its place there, such as ``line 7``, whatever split it is in."""

    def __init__(self, values: Mapping[str, Any], place: str):
        super().__init__(values)
        self.place = place


def dataset_setting(config: DataConfig, train: bool) -> tuple[str, str]:
    """The configuration key that names the dataset of a split (``dataset`` or ``eval_dataset``), and its value."""
    if config.eval_dataset is not None and not train:
        return "eval_dataset", config.eval_dataset
    return "dataset", config.dataset


def read_rows(config: DataConfig, *, train: bool, seed: int) -> list[dict[str, Any]] | None:
    """The rows of a split, unchanged; None for an evaluation split that is not configured."""
    key, dataset = dataset_setting(config, train)
    limit = config.max_train_samples if train else config.max_eval_samples
    own_split = "train" if train else "eval"
    split = config.train_split if train else config.eval_split
    if split is None:
        return None
    if dataset.startswith(BUILTIN_PREFIX):
        task = load_task(dataset.removeprefix(BUILTIN_PREFIX))
        return task.rows(own_split, seed)[:limit]
    if dataset == ENVIRONMENT_ROWS:
        rows = []
        for number in range(limit or NUM_PROMPTS[own_split]):
            row_seed = derive_seed(seed, f"environment/{own_split}", number)
            # NumPy and most environments refuse larger seeds.
            row_seed %= 2**31
            rows.append({config.prompt_column: "", "seed": row_seed})
        return rows
    if dataset.startswith(GYM_PREFIX):
        arguments = config.config_name if isinstance(config.config_name, dict) else {}
        return gym_rows(dataset.removeprefix(GYM_PREFIX), own_split, seed, limit, arguments)
    if split == "auto" and not train:
        if config.eval_dataset is None:
            return None
        split = "train"  # the name that `datasets` gives the only split of a file
    if dataset == PYTHON_ROWS:
        # Another command asks for them, or the evaluation for a split of the rows of training.
        setting = f"data.{key}={dataset} (data.{own_split}_split={split})"
        remedy = "name a file or Hub dataset, pass `eval_dataset`, or set data.eval_split=none"
        raise ValueError(f"{setting} stands for rows passed to grpo.train(), without splits: {remedy}")
    text_columns = (config.prompt_column, config.answer_column)
    path = os.path.expanduser(dataset)
    try:
        rows = _read(path, config.config_name, split, text_columns)
        return list(itertools.islice(rows, limit))
    # For a broken file, csv, pyarrow and datasets raise exceptions without a common base.
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        setting = f"data.{key}={dataset} (data.{own_split}_split={split})"
        raise ValueError(f"{setting} cannot be read: {reason}") from error


def _read(
    dataset: str, config_name: str | None, split: str, text_columns: Sequence[str | None]
) -> Iterable[dict[str, Any]]:
    """The rows of one split of a file, a folder or a Hub dataset. ``text_columns`` of a CSV file are always text."""
    import datasets

    datasets.disable_progress_bars()
    suffix = os.path.splitext(dataset)[1].lower()
    if suffix in (".jsonl", ".json"):
        return _select({"train": _read_json(dataset)}, split)
    if suffix == ".csv":
        return _select({"train": _read_csv(dataset, text_columns)}, split)
    if suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=dataset, split=split)
    if os.path.isfile(dataset):
        raise ValueError("the name of a file must end in .jsonl, .json, .csv or .parquet")
    if os.path.isdir(dataset) and {"dataset_dict.json", "state.json"} & set(os.listdir(dataset)):
        saved = datasets.load_from_disk(dataset)  # this function takes no split
        return _select(saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}, split)
    rows = datasets.load_dataset(dataset, config_name, split=split)
    if rows.builder_name == "csv":
        if "__index_level_0__" in rows.column_names:
            raise ValueError("its rows have more fields than the header")
        options = {"features": datasets.Features(dict.fromkeys(rows.column_names, datasets.Value("string")))}
        options |= {"keep_default_na": False, "na_values": [""]}
        columns = datasets.load_dataset(dataset, config_name, split=split, **options).to_dict()
        return _csv_rows(columns, text_columns)
    for name in {*text_columns} & {*rows.column_names} if rows.builder_name == "json" else ():
        if getattr(rows.features[name], "dtype", "").startswith(("timestamp", "date", "time")):
            raise ValueError(f"datasets turned texts in column {name!r} into dates: name a single file")
    return rows


def _select(splits: Mapping[str, Iterable[dict[str, Any]]], split: str) -> list[dict[str, Any]]:
    """The rows of ``split``, such as ``train`` or ``train[:90%]``."""
    from datasets import ReadInstruction

    parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    return [row for part in parts for row in itertools.islice(splits[part.splitname], part.from_, part.to)]


def _read_json(path: str) -> list[dict[str, Any]]:
    """The rows of a file with one object per line, or with one list of objects."""
    text, decoder, space = Path(path).read_text("utf-8-sig"), json.JSONDecoder(), re.compile(r"\s*")
    values, places, position, last, line = [], [], 0, 0, 1
    while (start := space.match(text, position).end()) < len(text):
        line, last = line + text.count("\n", last, start), start
        try:
            value, position = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:  # found at its place, maybe lines after the mistake
            raise ValueError(f"the value that begins in line {line}: {error}") from None
        values.append(value)
        places.append(f"line {line}")
    if len(values) == 1 and isinstance(values[0], list):
        values, places = values[0], None
    return with_all_columns(values, "rows must be JSON objects", places)


def _read_csv(path: str, text_columns: Sequence[str | None]) -> list[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    text = Path(path).read_bytes().decode("utf-8-sig")
    reader, rows, places, last = csv.reader(io.StringIO(text, newline=""), strict=True), [], [], 0
    try:
        header, last = next(reader, []), reader.line_num
        if len(header) == 1 and re.search("[;\t]", header[0]) and text_columns[0] not in header:
            raise ValueError("its columns must be separated by commas, not by semicolons or tabs")
        if len(set(header)) < len(header):
            raise ValueError("line 1 names a column twice")
        for cells in reader:
            line, last = last + 1, reader.line_num  # the first and the last line: a cell may have several
            if not cells:  # an empty line
                continue
            if len(cells) != len(header):
                raise ValueError(f"line {line} has {len(cells)} fields, the header has {len(header)}")
            rows.append(cells)
            places.append(f"line {line}")
    except csv.Error as error:
        raise ValueError(f"line {last + 1}: {error}") from None
    values = _csv_rows({name: [row[i] for row in rows] for i, name in enumerate(header)}, text_columns)
    return [FileRow(row, place) for row, place in zip(values, places, strict=True)]


def _csv_rows(columns: Mapping[str, Sequence[str]], text_columns: Sequence[str | None]) -> list[dict[str, Any]]:
    """Rows from the texts of a CSV file. An empty cell is None.

    A column other than ``text_columns`` has numbers and booleans if each cell would be written the same way again:
    ``12``, ``0.5``, ``True``; not ``007``, ``1.50``, ``1e5``, ``true``.
    """
    values = []
    for name, cells in columns.items():
        texts = [cell if cell and cell.strip() else None for cell in cells]
        found = [cell and _number(cell) for cell in texts]
        same = name not in text_columns and [value if value is None else str(value) for value in found] == texts
        values.append(found if same else texts)
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _number(text: str) -> bool | int | float | None:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        with suppress(ValueError):
            if math.isfinite(number := kind(text)) and str(number) == text:
                return number
    return None


def rows_of(table: Any, name: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The first ``limit`` rows (None: all) of a list of mappings, a dataset of ``datasets`` or a pandas DataFrame.

    ``ValueError``, about the argument ``name``: it is something else, or may be endless and has no limit.
    """
    if hasattr(table, "columns") and hasattr(table, "notna"):
        # pandas writes a missing value as NaN, and then the integers of that column as floats.
        table = table.convert_dtypes(convert_string=False).astype(object).where(table.notna(), None).to_dict("records")
    if limit is None and not hasattr(table, "__len__"):
        sample = "data.max_train_samples" if name == "dataset" else "data.max_eval_samples"
        raise ValueError(f"{name} has no length and may be endless: set {sample}, or give a list")
    expected = f"{name} must be a list of mappings, a datasets.Dataset (one split) or a pandas DataFrame"
    rows = with_all_columns(list(itertools.islice(table, limit)), expected)
    for row in rows:
        for column, value in row.items():
            row[column] = _without_numpy(value)
    return rows


def _without_numpy(value: Any) -> Any:
    """A value as Python's own types: in a DataFrame, the lists of a Parquet file are NumPy arrays, at any depth."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _without_numpy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_numpy(item) for item in value]
    return value


def with_all_columns(rows: list[Any], expected: str, places: Sequence[str] | None = None) -> list[FileRow]:
    """The rows with the columns of all of them; values that a row lacks are None. ``expected``: for errors."""
    places = places or [f"row {number}" for number in range(1, len(rows) + 1)]
    for place, row in zip(places, rows, strict=True):
        if not isinstance(row, Mapping):
            raise ValueError(f"{expected}: {place} is {row!r:.80}")
    columns = dict.fromkeys(column for row in rows for column in row)
    for column in columns:
        if not isinstance(column, str):
            raise ValueError(f"the names of columns must be text, and one is {column!r}")
    return [FileRow({c: row.get(c) for c in columns}, place) for row, place in zip(rows, places, strict=True)]
