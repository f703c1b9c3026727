"""Read the rows of a dataset: a file, a saved folder, a dataset on the Hub, a task, or Python
objects.

No other file of the project imports ``datasets``. JSON files are read without ``datasets``, which
changes values: a text that looks like a date becomes a date, and each object gets the keys of all
other objects.
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
"""Number of rows of a split if an environment makes the prompts. ``max_train_samples`` or
``max_eval_samples`` replaces this number."""
PYTHON_ROWS = "python:rows"
"""Value of ``data.dataset`` or ``data.eval_dataset`` that stands for rows which a Python program
passes to ``grpo.train``."""
TOO_MANY_FIELDS = "its rows have more fields than the header"


def read_rows(config: DataConfig, key: str, *, train: bool, seed: int) -> list[dict] | None:
    """Return the rows of the training or the evaluation split, unchanged; None if no evaluation
    split is configured.

    Args:
        key: the key of ``config`` that names the dataset: ``dataset`` or ``eval_dataset``.

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
        # Each row is a seed, from which `reset` makes a problem. The two splits have different
        # seeds, but an environment may make the same problem from two seeds.
        rows = []
        for number in range(limit or NUM_ENVIRONMENT_ROWS[purpose]):
            row_seed = derive_seed(seed, f"environment/{purpose}", number)
            # NumPy and most environments refuse larger seeds.
            rows.append({"seed": row_seed % 2**31})
        return rows
    if split == "auto" and not train:
        # Training rows are no evaluation data, so without an evaluation dataset there is no
        # evaluation.
        if config.eval_dataset is None:
            return None
        split = "train"  # the name that `datasets` gives the only split of a file

    setting = f"data.{key}={dataset} (data.{purpose}_split={split})"
    if dataset == PYTHON_ROWS:
        # Only the Python program has these rows. This error is raised if another command reads the
        # saved configuration, or if the configuration asks for a split of the training rows.
        raise ValueError(
            f"{setting} stands for rows passed to grpo.train(), without splits: name a dataset"
        )
    path = Path(dataset).expanduser()
    # `datasets` would take the path for the name of a dataset on the Hub, and without a network
    # would retry for a long time.
    if dataset.startswith((".", "/", "~")) and not path.exists():
        raise ValueError(f"{setting}: there is no such file or folder")
    try:
        rows = _read_split(path, config.config_name, split)
        return list(itertools.islice(rows, limit))
    except Exception as error:
        # json, pyarrow, pandas and datasets raise exceptions without a common base class.
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{setting} cannot be read: {reason}") from error


def _read_split(path: Path, config_name: str | None, split: str) -> Iterable[dict]:
    """Return the rows of one split, such as ``train`` or ``train[:90%]``, of a file, a folder or a
    dataset on the Hub."""
    import datasets

    datasets.disable_progress_bars()
    if path.suffix == ".parquet":
        return datasets.load_dataset("parquet", data_files=str(path), split=split)
    if path.suffix in (".jsonl", ".json"):
        splits = {"train": _read_json(path)}
    elif path.suffix == ".csv":
        splits = {"train": _read_csv(path)}
    elif any(path.rglob("state.json")):
        # `save_to_disk` wrote this folder, and only `load_from_disk` reads it.
        saved = datasets.load_from_disk(path)
        splits = saved if isinstance(saved, dict) else {"train": saved}
    else:
        return _load_data_files(str(path), config_name, split)

    # `datasets` parses a slice such as [:90%], so that it means the same for every source.
    sizes = {name: len(rows) for name, rows in splits.items()}
    instruction = datasets.ReadInstruction.from_spec(split)
    selected = []
    for part in instruction.to_absolute(sizes):
        selected += itertools.islice(splits[part.splitname], part.from_, part.to)
    return selected


def _load_data_files(name: str, config_name: str | None, split: str) -> Iterable[dict]:
    """Return the rows of the data files that ``datasets`` finds in a folder or on the Hub."""
    from datasets import Features, Value, load_dataset

    rows = load_dataset(name, config_name, split=split)
    if rows.builder_name != "csv":
        return rows
    if "__index_level_0__" in rows.column_names:
        raise ValueError(TOO_MANY_FIELDS)
    # Now that the columns are known, CSV files are read again with every cell as text, as _read_csv
    # does.
    columns = dict.fromkeys(rows.column_names, Value("string"))
    return load_dataset(
        name,
        config_name,
        split=split,
        features=Features(columns),
        keep_default_na=False,
    )


def _read_csv(path: Path) -> list[dict]:
    """Return the rows of a CSV file, with each cell as text. Otherwise pandas would read 007 as 7,
    1.50 as 1.5, and NA as a missing value."""
    import pandas

    table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    # If rows have more fields than the header, pandas takes their first field for the row's name.
    if not isinstance(table.index, pandas.RangeIndex):
        raise ValueError(TOO_MANY_FIELDS)
    return table.to_dict("records")


def _read_json(path: Path) -> list[dict]:
    """Return the rows of a JSON file, which holds one object per line or one list of objects."""
    text = path.read_text("utf-8-sig")
    if not text.lstrip().startswith("["):
        # Objects on lines become one JSON list: a comma is inserted where a line ends between two
        # objects. JSON strings contain no line ends, so no value changes. The number of lines stays
        # the same, so errors name the right line.
        text = "[" + re.sub(r"\}(\s*\n\s*)\{", r"},\1{", text) + "]"
    return with_all_columns(json.loads(text), "rows must be JSON objects")


def rows_from_table(table: Any, name: str, limit: int | None) -> list[dict]:
    """Return the rows of a list of mappings, a dataset of ``datasets`` or a pandas DataFrame.

    Args:
        name: the argument that held the table, for messages.
        limit: largest number of rows to read. None: all rows are read.

    Raises:
        ValueError: the table has another type, or it has no length and no limit is given.
    """
    if hasattr(table, "iloc"):
        from datasets import Dataset

        # In a column with a missing value, pandas makes floats of integers. convert_dtypes restores
        # the integers, because 12.0 is not the same answer as 12.
        table = Dataset.from_pandas(table.convert_dtypes(), preserve_index=False)
    if limit is None and not hasattr(table, "__len__"):
        raise ValueError(
            f"{name} has no length and may be endless: "
            "set data.max_train_samples and max_eval_samples"
        )
    rows = list(itertools.islice(table, limit))
    return with_all_columns(
        rows,
        f"{name} must be a list of mappings, a split of a dataset (dataset['train']), a DataFrame",
    )


def with_all_columns(rows: list[Any], expected: str) -> list[dict]:
    """Return the rows, each with the columns of all rows. A value that a row lacks is None.

    NumPy's scalars and arrays become Python's numbers and lists.

    Args:
        expected: start of the error message for a row that is no mapping.
    """
    # Rewards get columns with one value per completion, so every row needs a value in each column.
    columns = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{expected}: row {number} is {row!r:.80}")
        columns |= dict.fromkeys(row)
    return [
        columns
        | {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in row.items()
        }
        for row in rows
    ]
