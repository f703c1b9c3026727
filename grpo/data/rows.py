"""Read the rows of a dataset: a file, a saved folder, the Hub, a task, Python objects.

This file alone imports ``datasets``. It reads JSON files itself, because ``datasets`` changes their
values: texts that look like dates become dates, and each object gets the keys of all others.
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo.algorithm.seeding import derive_seed
from grpo.config import DataConfig
from grpo.config.config import ENVIRONMENT_ROWS
from grpo.data.tasks import task_of

NUM_ENVIRONMENT_ROWS = {"train": 4096, "eval": 128}
"""Rows of an environment that makes its own prompts, unless ``max_train_samples`` or
``max_eval_samples`` is set."""
PYTHON_ROWS = "python:rows"
"""Name of a dataset in the configuration that stands for rows passed to ``grpo.train`` by a Python
program."""
TOO_MANY_FIELDS = "its rows have more fields than the header"


def read_rows(config: DataConfig, key: str, *, train: bool, seed: int) -> list[dict] | None:
    """The rows of a split, unchanged; None for an evaluation split that is not configured.

    ``key`` of the configuration names the dataset: ``dataset`` or ``eval_dataset``.

    Raises:
        ValueError: the dataset cannot be read.
    """
    dataset = getattr(config, key)
    if train:
        purpose = "train"
        split = config.train_split
        limit = config.max_train_samples
    else:
        purpose = "eval"
        split = config.eval_split
        limit = config.max_eval_samples
    if split is None:
        return None

    task = task_of(config, dataset)
    if task is not None:
        return task.rows(purpose, seed, limit)
    if dataset == ENVIRONMENT_ROWS:
        # Each row is a seed: `reset` makes a problem of it. The splits have different seeds, though
        # an environment may make the same problem of two.
        rows = []
        for number in range(limit or NUM_ENVIRONMENT_ROWS[purpose]):
            row_seed = derive_seed(seed, f"environment/{purpose}", number)
            # NumPy and most environments refuse larger seeds.
            rows.append({"seed": row_seed % 2**31})
        return rows
    if split == "auto" and not train:
        # The rows of training are no evaluation data, so without another dataset there is none.
        if config.eval_dataset is None:
            return None
        split = "train"  # the name that `datasets` gives the only split of a file

    setting = f"data.{key}={dataset} (data.{purpose}_split={split})"
    if dataset == PYTHON_ROWS:
        # The rows exist in that program alone. Another command reads its saved configuration, or
        # the configuration asks for a split of the training rows.
        raise ValueError(
            f"{setting} stands for rows passed to grpo.train(), without splits: name a dataset"
        )
    path = Path(dataset).expanduser()
    # `datasets` would take the name for one of the Hub, and try for a long time without a network.
    if dataset.startswith((".", "/", "~")) and not path.exists():
        raise ValueError(f"{setting}: there is no such file or folder")
    try:
        rows = _read_split(path, config.config_name, split)
        return list(itertools.islice(rows, limit))
    except Exception as error:
        # json, pyarrow, pandas and datasets raise exceptions without a common base.
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{setting} cannot be read: {reason}") from error


def _read_split(path: Path, config_name: str | None, split: str) -> Iterable[dict]:
    """The rows of one split, such as ``train`` or ``train[:90%]``, of a file, a folder or a Hub
    dataset."""
    import datasets

    datasets.disable_progress_bars()
    if path.suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=str(path), split=split)
    if path.suffix in (".jsonl", ".json"):
        splits = {"train": _read_json(path)}
    elif path.suffix == ".csv":
        splits = {"train": _read_csv(path)}
    elif any(path.rglob("state.json")):
        # Written by `save_to_disk`, which only `load_from_disk` reads.
        saved = datasets.load_from_disk(path)
        splits = saved if isinstance(saved, dict) else {"train": saved}
    else:
        return _load_data_files(str(path), config_name, split)

    # `datasets` parses the slices, so they mean the same for every source.
    sizes = {name: len(rows) for name, rows in splits.items()}
    instruction = datasets.ReadInstruction.from_spec(split)
    selected = []
    for part in instruction.to_absolute(sizes):
        selected += itertools.islice(splits[part.splitname], part.from_, part.to)
    return selected


def _load_data_files(name: str, config_name: str | None, split: str) -> Iterable[dict]:
    """Rows of the data files that ``datasets`` finds in a folder or on the Hub."""
    from datasets import Features, Value, load_dataset

    rows = load_dataset(name, config_name, split=split)
    if rows.builder_name != "csv":
        return rows
    if "__index_level_0__" in rows.column_names:
        raise ValueError(TOO_MANY_FIELDS)
    # CSV files are read once more, now that their columns are known, with cells as texts: like a
    # single CSV file.
    columns = dict.fromkeys(rows.column_names, Value("string"))
    return load_dataset(
        name,
        config_name,
        split=split,
        features=Features(columns),
        keep_default_na=False,
    )


def _read_csv(path: Path) -> list[dict]:
    """The rows of a file, each cell as text. As numbers, 007 and 1.50 would lose their form, and NA
    would be a missing value."""
    import pandas

    table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    # pandas takes a first field that has no name in the header for the name of its row.
    if not isinstance(table.index, pandas.RangeIndex):
        raise ValueError(TOO_MANY_FIELDS)
    return table.to_dict("records")


def _read_json(path: Path) -> list[dict]:
    """The rows of a file with one object per line, or with one list of objects."""
    text = path.read_text("utf-8-sig")
    if not text.lstrip().startswith("["):
        # Objects become a list, with a comma where a line ends between two of them: no string of
        # JSON contains the end of a line. Lines stay where they are, so errors name their number.
        text = "[" + re.sub(r"\}(\s*\n\s*)\{", r"},\1{", text) + "]"
    return with_all_columns(json.loads(text), "rows must be JSON objects")


def rows_from_table(table: Any, name: str, limit: int | None = None) -> list[dict]:
    """The rows of a list of mappings, a dataset of ``datasets`` or a pandas DataFrame.

    Args:
        name: the argument that held the table, for messages.
        limit: number of rows to read. Default: all.

    Raises:
        ValueError: the table is something else, or may be endless and has no limit.
    """
    if hasattr(table, "iloc"):
        from datasets import Dataset

        # Where a value is missing, pandas makes floats of integers, and 12.0 is another answer than
        # 12.
        table = Dataset.from_pandas(table.convert_dtypes(), preserve_index=False)
    if limit is None and not hasattr(table, "__len__"):
        raise ValueError(
            f"{name} has no length and may be endless: "
            "set data.max_train_samples and max_eval_samples"
        )
    rows = list(itertools.islice(table, limit))
    return with_all_columns(
        rows,
        f"{name} must be a list of mappings, a datasets.Dataset (one split) or a pandas DataFrame",
    )


def with_all_columns(rows: list[Any], expected: str) -> list[dict]:
    """The rows with the columns of all of them; values that a row lacks are None.

    NumPy's scalars and arrays become Python's numbers and lists.

    Args:
        expected: the beginning of the message if a row is no mapping.
    """
    # Rewards get columns with one value per completion, so every row needs a value in each.
    columns = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{expected}: row {number} is {row!r:.80}")
        columns |= dict.fromkeys(row)
    complete_rows = []
    for row in rows:
        complete_row = dict(columns)
        for name, value in row.items():
            complete_row[name] = value.tolist() if hasattr(value, "tolist") else value
        complete_rows.append(complete_row)
    return complete_rows
