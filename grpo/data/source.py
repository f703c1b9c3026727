"""Read the rows of a dataset: the Hub, a file, a saved folder, a built-in task, reasoning-gym. The only file that imports ``datasets``."""

import glob
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo.config import DataConfig
from grpo.data import gym
from grpo.data.files import FORMATS, TEXT_FORMATS, FileMistake, csv_rows, describe_similar_files, read_text_file
from grpo.data.hub import hub_answers
from grpo.data.tasks import TASKS, load_task
from grpo.system import first_line

BUILTIN_PREFIX = "builtin:"
GIVEN_ROWS = "python:rows"
"""In place of a dataset's name in the configuration: rows that a Python program gave to ``grpo.train`` as an object."""


def dataset_setting(config: DataConfig, train: bool) -> tuple[str, str]:
    """The configuration key that names the dataset of a split (``dataset`` or ``eval_dataset``), and its value."""
    if config.eval_dataset is not None and not train:
        return "eval_dataset", config.eval_dataset
    return "dataset", config.dataset


def read_rows(config: DataConfig, *, train: bool, seed: int) -> list[dict[str, Any]] | None:
    """The rows of a split as dictionaries, unchanged. Arguments and errors are those of :func:`grpo.data.load_rows`."""
    key, dataset = dataset_setting(config, train)
    setting = f"data.{key}={dataset}"
    limit = config.max_train_samples if train else config.max_eval_samples
    if dataset == GIVEN_ROWS:
        if not train and config.eval_split is None and config.eval_dataset is None:
            return None
        raise ValueError(
            f"{setting}: these rows were given to grpo.train() as a Python object, which a configuration cannot hold: set data.{key} to "
            "a file or a Hub dataset with such rows"
        )
    if dataset.startswith(BUILTIN_PREFIX):
        name = dataset.removeprefix(BUILTIN_PREFIX)
        if name not in TASKS:
            raise ValueError(f"{setting}: the built-in tasks are {', '.join(BUILTIN_PREFIX + task for task in TASKS)}")
        return load_task(name).rows("train" if train else "eval", seed)[:limit]
    if dataset.startswith(gym.PREFIX):
        return gym.rows(setting, "train" if train else "eval", seed, limit)
    split = config.train_split if train else config.eval_split
    if split is None:
        if config.eval_dataset is None:
            return None
        split = "train"  # the name that `datasets` gives the only split of a file
    text_columns = (config.prompt_column, config.answer_column)
    return list(_read(setting, os.path.expanduser(dataset), config.config_name, split, text_columns, limit))


def rows_of(given: Any, name: str) -> list[dict[str, Any]]:
    """The rows of an object: a list of mappings, a ``datasets.Dataset`` or a pandas DataFrame. Values that a row lacks are None.

    ``ValueError``, in one line that begins with ``name``, for anything else.
    """
    if hasattr(given, "columns") and hasattr(given, "notna"):  # NaN stands for a missing value
        given = given.astype(object).where(given.notna(), None).to_dict("records")
    if isinstance(given, Mapping):
        example, parts = next(iter(given), None), ", ".join(map(str, given))
        what = f"the splits {parts}: give one of them, {name}=...[{example!r}]"
        if not all(hasattr(split, "column_names") for split in given.values()):
            what = f"the keys {parts}: give a list with one mapping per row, or datasets.Dataset.from_dict(...)"
        raise ValueError(f"{name} is a {type(given).__name__} with {what}")
    if isinstance(given, str) or not hasattr(given, "__iter__") or not hasattr(given, "__len__"):
        raise ValueError(
            f"{name} is of type {type(given).__name__}: give a list of mappings, a datasets.Dataset or a pandas DataFrame"
        )
    rows = list(given)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
            raise ValueError(
                f"{name}, row {number}: expected a mapping from column names to values, got {str(row)[:80]!r}"
            )
    columns = dict.fromkeys(column for row in rows for column in row)
    rows = [{column: _without_numpy(row.get(column)) for column in columns} for row in rows]
    for number, row in enumerate(rows, 1):
        try:  # as the rows of a file; a value of another type (an image) is left as it is
            json.dumps(row, sort_keys=True, default=lambda value: None, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            expected = "keys inside a column must be text, and text must be valid Unicode"
            raise ValueError(
                f"{name}, row {number} cannot be written as JSON: {first_line(error)}; {expected}"
            ) from None
    return rows


def _without_numpy(value: Any) -> Any:
    """Arrays as lists, in which pandas has the lists of a Parquet file as arrays; numbers as Python's."""
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def _read(
    setting: str,
    dataset: str,
    config_name: str | None,
    split: str,
    text_columns: Sequence[str | None],
    limit: int | None,
) -> Iterable[dict[str, Any]]:
    """The first ``limit`` rows (None: all) of one split of a file, a folder or a Hub dataset. A ``ValueError`` is one line that begins with ``setting``.

    ``text_columns`` stay text in a CSV file, also where every cell is a number.
    """
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised too, and reported below
    suffix = os.path.splitext(dataset)[1].lower()
    if not os.path.exists(dataset):
        if set(dataset) & set("*?["):
            found = ", ".join(sorted(glob.glob(dataset))[:4]) or "nothing"
            raise ValueError(
                f"{setting} is a pattern, and a dataset is one file or folder; the pattern matches {found}"
            )
        if dataset.startswith((".", "/", "~")) or suffix in FORMATS:
            raise ValueError(f"{setting} does not exist{describe_similar_files(dataset)}")
        if not hub_answers():  # use the cache at once: the Hub's client would retry for 23 seconds
            datasets.config.HF_HUB_OFFLINE = True
    elif os.path.isfile(dataset):
        if suffix not in FORMATS:
            raise ValueError(f"{setting}: files must end in {', '.join(FORMATS)}")
        if os.path.getsize(dataset) == 0:
            raise ValueError(f"{setting} is empty")
    try:
        rows = _load(dataset, suffix, config_name, split, text_columns, limit)
    except FileMistake as error:
        raise ValueError(f"{setting}{error}") from None
    except Exception as error:  # for a broken file, pandas, pyarrow and datasets raise exceptions without a common base
        if "corresponds to no data" in str(error):
            raise ValueError(f"{setting} has no rows (split {split!r})") from None
        if "Config name is missing" in str(error):
            names = re.findall(r"'([^']*)'", str(error).splitlines()[1])
            raise ValueError(f"{setting}: it has the configurations {', '.join(names)}: set data.config_name") from None
        if not os.path.exists(dataset) and not hub_answers():
            reason = "is no local file or folder, the Hub cannot be reached, and its cache has no copy of that name"
            raise ValueError(f"{setting} {reason}") from None
        reason = f" (split {split!r}) cannot be read: {first_line(error.__cause__ or error)}"
        if os.path.isdir(dataset):
            raise ValueError(f"{setting}{reason}; give a file, or a folder saved by datasets") from None
        raise ValueError(setting + reason) from None
    if not len(rows):
        raise ValueError(f"{setting} has no rows (split {split!r})")
    return itertools.islice(rows, limit)


def _load(
    dataset: str,
    suffix: str,
    config_name: str | None,
    split: str,
    text_columns: Sequence[str | None],
    limit: int | None,
) -> Sequence[dict[str, Any]]:
    """The rows of one split; of a file with a single split, those behind the first ``limit`` need not be read."""
    import datasets

    if os.path.isfile(dataset):
        if suffix in TEXT_FORMATS:
            rows = read_text_file(dataset, text_columns, limit if split == "train" else None)
            return [rows[i] for i in _indices(split, "train", len(rows))]
        return datasets.load_dataset("parquet", data_files=dataset, split=split)
    if os.path.isdir(dataset) and {"dataset_dict.json", "state.json"} & set(os.listdir(dataset)):
        return _load_saved_folder(dataset, split)
    rows = datasets.load_dataset(dataset, config_name, split=split)
    if rows.builder_name == "csv":
        # Again, as text. With the types that pandas infers, 12 beside an empty cell would be 12.0.
        features = datasets.Features({name: datasets.Value("string") for name in rows.column_names})
        options = {"features": features, "keep_default_na": False, "na_values": [""]}
        return csv_rows(datasets.load_dataset(dataset, config_name, split=split, **options).to_dict(), text_columns)
    if rows.builder_name == "json":
        for name in {*text_columns} & {*rows.column_names}:
            if str(getattr(rows.features[name], "dtype", "")).startswith(("timestamp", "date", "time")):
                raise ValueError(f"its texts in column {name!r} look like dates, and datasets turned them into dates")
    return rows


def _load_saved_folder(folder: str, split: str):
    """A split such as ``train`` or ``train[:90%]`` of a folder written by ``save_to_disk``; ``load_from_disk`` takes no slice."""
    import datasets

    saved = datasets.load_from_disk(folder)
    name = split.split("[")[0]
    if isinstance(saved, datasets.DatasetDict):
        if name not in saved:
            raise ValueError(f'Unknown split "{name}". Should be one of {list(saved)}.')
        saved = saved[name]
    return saved.select(_indices(split, name, len(saved)))


def _indices(split: str, name: str, num_rows: int) -> list[int]:
    """The rows that ``split`` selects, such as ``train[:90%]``, of ``num_rows`` rows that are split ``name``."""
    import datasets

    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: num_rows})
    return [i for part in parts for i in range(part.from_ or 0, num_rows if part.to is None else part.to)]
