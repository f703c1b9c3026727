"""Read the rows of a dataset: a file, a saved folder, the Hub, a task, Python objects.

The only file that imports ``datasets``, which does not read single JSON files because it changes
their values: texts that look like dates become dates, and each object gets the keys of all others.
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

NUM_PROMPTS = {"train": 4096, "eval": 128}
"""Of an environment, unless ``max_train_samples`` or ``max_eval_samples`` are set."""
PYTHON_ROWS = "python:rows"
"""In place of a dataset's name in the configuration: rows that a Python program passed to
``grpo.train``."""
MORE_FIELDS = "its rows have more fields than the header"


def read_rows(config: DataConfig, key: str, *, train: bool, seed: int) -> list[dict] | None:
    """The rows of a split, unchanged; None for an evaluation split that is not configured.

    ``key`` of the configuration names the dataset: ``dataset`` or ``eval_dataset``.
    """
    dataset = getattr(config, key)
    limit = config.max_train_samples if train else config.max_eval_samples
    own_split = "train" if train else "eval"
    split = config.train_split if train else config.eval_split
    if split is None:
        return None
    task = task_of(config, dataset)
    if task is not None:
        return task.rows(own_split, seed, limit)
    if dataset == ENVIRONMENT_ROWS:
        rows = []
        for number in range(limit or NUM_PROMPTS[own_split]):
            row_seed = derive_seed(seed, f"environment/{own_split}", number)
            # NumPy and most environments refuse larger seeds.
            rows.append({"seed": row_seed % 2**31})
        return rows
    if split == "auto" and not train:
        if config.eval_dataset is None:
            return None
        split = "train"  # the name that `datasets` gives the only split of a file
    setting = f"data.{key}={dataset} (data.{own_split}_split={split})"
    if dataset == PYTHON_ROWS:
        # Another command asks for them, or the evaluation for a split of the rows of training.
        raise ValueError(
            f"{setting} stands for rows passed to grpo.train(), without splits: name a dataset"
        )
    path = Path(dataset).expanduser()
    # The Hub would be asked for it, for a long time where there is no network.
    if dataset.startswith((".", "/", "~")) and not path.exists():
        raise ValueError(f"{setting}: there is no such file or folder")
    try:
        rows = _read(path, config.config_name, split)
        return list(itertools.islice(rows, limit))
    # For a broken file, json, pyarrow and datasets raise exceptions without a common base.
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{setting} cannot be read: {reason}") from error


def _read(path: Path, config_name: str | None, split: str) -> Iterable[dict]:
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
        saved = datasets.load_from_disk(path)
        splits = saved if isinstance(saved, dict) else {"train": saved}
    else:
        return _read_files(str(path), config_name, split)

    sizes = {name: len(rows) for name, rows in splits.items()}
    selected = []
    for part in datasets.ReadInstruction.from_spec(split).to_absolute(sizes):
        selected += itertools.islice(splits[part.splitname], part.from_, part.to)
    return selected


def _read_files(name: str, config_name: str | None, split: str) -> Iterable[dict]:
    """Rows of the files that ``datasets`` finds in a folder or on the Hub."""
    from datasets import Features, Value, load_dataset

    rows = load_dataset(name, config_name, split=split)
    if rows.builder_name != "csv":
        return rows
    if "__index_level_0__" in rows.column_names:
        raise ValueError(MORE_FIELDS)
    # Texts, as from a single file.
    columns = dict.fromkeys(rows.column_names, Value("string"))
    return load_dataset(
        name,
        config_name,
        split=split,
        features=Features(columns),
        keep_default_na=False,
    )


def _read_csv(path: Path) -> list[dict]:
    """Rows of texts: as other types, 007 and 1.50 would lose their form, and NA would be a missing
    value."""
    import pandas

    table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    # pandas takes a first field that has no name in the header for the name of its row.
    if not isinstance(table.index, pandas.RangeIndex):
        raise ValueError(MORE_FIELDS)
    return table.to_dict("records")


def _read_json(path: Path) -> list[dict]:
    """The rows of a file with one object per line, or with one list of objects."""
    text = path.read_text("utf-8-sig")
    if not text.lstrip().startswith("["):
        # A line ends inside of no string of JSON. Lines stay lines, so that errors name those of
        # the file.
        text = "[" + re.sub(r"\}(\s*\n\s*)\{", r"},\1{", text) + "]"
    return with_all_columns(json.loads(text), "rows must be JSON objects")


def rows_of(table: Any, name: str, limit: int | None = None) -> list[dict]:
    """The first ``limit`` rows (None: all) of a list of mappings, a dataset of ``datasets`` or a
    pandas DataFrame.

    ``ValueError``, about the argument ``name``: it is something else, or may be endless and has no
    limit."""
    if hasattr(table, "iloc"):
        from datasets import Dataset

        # Where a value is missing pandas makes floats of integers, and 12.0 is another answer than
        # 12.
        table = Dataset.from_pandas(table.convert_dtypes(), preserve_index=False)
    if limit is None and not hasattr(table, "__len__"):
        raise ValueError(
            f"{name} has no length and may be endless: set data.max_train_samples and max_eval_samples"
        )
    expected = (
        f"{name} must be a list of mappings, a datasets.Dataset (one split) or a pandas DataFrame"
    )
    return with_all_columns(list(itertools.islice(table, limit)), expected)


def with_all_columns(rows: list[Any], expected: str) -> list[dict]:
    """The rows with the columns of all of them; values that a row lacks are None. ``expected``: for
    errors.

    NumPy's scalars and arrays become Python's numbers and lists.
    """
    columns = {}
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{expected}: row {number} is {row!r:.80}")
        columns |= dict.fromkeys(row)
    found = []
    for row in rows:
        plain = {
            name: value.tolist() if hasattr(value, "tolist") else value
            for name, value in row.items()
        }
        found.append({**columns, **plain})
    return found
