"""Read the rows of a dataset: the Hub, a file, a saved folder, a built-in task, reasoning-gym. The only file that imports ``datasets``."""

import os
import re
from typing import Any

from grpo.config import DataConfig
from grpo.data.files import FORMATS, csv_error, describe_similar_files, parse_error
from grpo.hub import hub_answers
from grpo.system import first_line
from grpo.tasks import TASKS, gym, load_task

BUILTIN_PREFIX = "builtin:"


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
    return _read(setting, os.path.expanduser(dataset), config.config_name, split, limit)


def _read(setting: str, dataset: str, config_name: str | None, split: str, limit: int | None) -> list[dict[str, Any]]:
    """The rows of one split of a file, a folder or a Hub dataset. A ``ValueError`` is one line that begins with ``setting``."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are raised too, and reported below
    suffix = os.path.splitext(dataset)[1].lower()
    if not os.path.exists(dataset):
        if dataset.startswith((".", "/", "~")) or suffix in FORMATS:
            raise ValueError(f"{setting} does not exist{describe_similar_files(dataset)}")
        if not hub_answers():  # use the cache at once: the Hub's client would retry for 23 seconds
            datasets.config.HF_HUB_OFFLINE = True
    elif os.path.isfile(dataset):
        if suffix not in FORMATS:
            raise ValueError(f"{setting}: files must end in {', '.join(FORMATS)}")
        if os.path.getsize(dataset) == 0:
            raise ValueError(f"{setting} is empty")
    if suffix == ".csv" and os.path.isfile(dataset) and (mistake := csv_error(dataset)):
        raise ValueError(setting + mistake)
    try:
        rows = _load(dataset, suffix, config_name, split)
        return list(rows if limit is None else rows.select(range(min(limit, len(rows)))))
    except Exception as error:  # for a broken file, pandas, pyarrow and datasets raise exceptions without a common base
        if "corresponds to no data" in str(error):
            raise ValueError(f"{setting} has no rows (split {split!r})") from None
        if "Config name is missing" in str(error):
            names = re.findall(r"'([^']*)'", str(error).splitlines()[1])
            raise ValueError(f"{setting}: it has the configurations {', '.join(names)}: set data.config_name") from None
        if not os.path.exists(dataset) and not hub_answers():
            reason = "is no file or folder here, the Hub cannot be reached, and its cache has no copy of that name"
            raise ValueError(f"{setting} {reason}") from None
        reason = f" (split {split!r}) cannot be read: {first_line(error.__cause__ or error)}"
        if os.path.isdir(dataset):
            raise ValueError(f"{setting}{reason}; give a file, or a folder saved by datasets") from None
        mistake = parse_error(dataset, suffix) if os.path.isfile(dataset) else None
        raise ValueError(setting + (mistake or reason)) from None


def _load(dataset: str, suffix: str, config_name: str | None, split: str):
    import datasets

    if os.path.isfile(dataset):
        # Only empty cells of a CSV file are missing values. By default pandas would also turn the texts NA, None and null into None.
        options = {"keep_default_na": False, "na_values": [""]} if suffix == ".csv" else {}
        return datasets.load_dataset(FORMATS[suffix], data_files=dataset, split=split, **options)
    if os.path.isdir(dataset) and {"dataset_dict.json", "state.json"} & set(os.listdir(dataset)):
        return _load_saved_folder(dataset, split)
    return datasets.load_dataset(dataset, config_name, split=split)


def _load_saved_folder(folder: str, split: str):
    """A split such as ``train`` or ``train[:90%]`` of a folder written by ``save_to_disk``; ``load_from_disk`` takes no slice."""
    import datasets

    saved = datasets.load_from_disk(folder)
    name = split.split("[")[0]
    if isinstance(saved, datasets.DatasetDict):
        if name not in saved:
            raise ValueError(f'Unknown split "{name}". Should be one of {list(saved)}.')
        saved = saved[name]
    parts = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(saved)})
    rows = [i for part in parts for i in range(part.from_ or 0, len(saved) if part.to is None else part.to)]
    return saved.select(rows)
