"""Where rows come from: the Hub, a file, a saved folder, a built-in task, reasoning-gym. The only file that imports ``datasets``."""

from __future__ import annotations

import os
import re
from typing import Any

from grpo.data.files import FORMATS, check_csv, first_mistake, nearby
from grpo.hub import hub_answers
from grpo.tasks import TASKS, gym, load_task


def source_of(config, train: bool) -> tuple[str, str]:
    """The key that names the rows' source, and its value."""
    other = config.eval_dataset is not None and not train
    return ("eval_dataset", config.eval_dataset) if other else ("dataset", config.dataset)


def read_rows(config, *, train: bool, seed: int) -> list[dict[str, Any]] | None:
    """The raw rows, as dictionaries. See :func:`load_rows`."""
    key, source = source_of(config, train)
    limit = config.max_train_samples if train else config.max_eval_samples
    if source.startswith("builtin:"):
        name = source.removeprefix("builtin:")
        if name not in TASKS:
            raise ValueError(f"data.{key}={source}: the built-in tasks are {', '.join(f'builtin:{t}' for t in TASKS)}")
        return load_task(name).rows("train" if train else "eval", seed)[:limit]
    if source.startswith(gym.PREFIX):
        return gym.rows(f"data.{key}={source}", "train" if train else "eval", seed, limit)
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
        if "Config name is missing" in str(error):
            names = re.findall(r"'([^']*)'", str(error).splitlines()[1])
            raise ValueError(f"{what}: it has the configurations {', '.join(names)}: set data.config_name") from None
        if not os.path.exists(source) and not hub_answers():
            raise ValueError(
                f"{what} is no file or folder here, the Hub cannot be reached, and its cache has no copy of that name"
            ) from None
        if os.path.isdir(source):
            raise ValueError(
                f"{what} (split {split!r}) cannot be read: {one_line(error)}; give a file, or a folder saved by datasets"
            ) from None
        mistake = first_mistake(source, suffix) if os.path.isfile(source) else None
        raise ValueError(what + (mistake or f" (split {split!r}) cannot be read: {one_line(error)}")) from None


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


def one_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
