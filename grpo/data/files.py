"""Read ``.jsonl``, ``.json`` and ``.csv`` files without changing any value.

``datasets``, which reads other sources, turns texts that look like dates into dates, and does not name the line of an error.
"""

import contextlib
import csv
import difflib
import itertools
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

TEXT_FORMATS = (".jsonl", ".json", ".csv")
"""Suffixes of the files that :func:`read_text_file` reads."""
FORMATS = (*TEXT_FORMATS, ".parquet")


class FileMistake(ValueError):
    """A mistake in a file. The message continues one that begins with the path: ``:7: not valid JSON: ...``."""


def describe_similar_files(path: str) -> str:
    """The end of an error message about a missing file: ``; FOLDER has a.jsonl, b.csv``, files with similar names or data files."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"; there is no folder {folder}"
    names = sorted(os.listdir(folder))
    found = difflib.get_close_matches(os.path.basename(path), names, n=3)
    found = found or [name for name in names if os.path.splitext(name)[1].lower() in FORMATS][:4]
    return f"; {folder} has {', '.join(found)}" if found else ""


def read_text_file(
    path: str, text_columns: Collection[str | None] = (), limit: int | None = None
) -> list[dict[str, Any]]:
    """The first ``limit`` rows (None: all) of a ``.jsonl``, ``.json`` or ``.csv`` file. All rows have the same columns; a value that is not in the file is None.

    Args:
        text_columns: the columns of a CSV file that are text also where every cell is a number.

    Raises:
        FileMistake: if a line cannot be read, or would not be read as it is written.
    """
    suffix = os.path.splitext(path)[1].lower()
    rows = _read_csv(path, text_columns) if suffix == ".csv" else _read_json(path, suffix)
    rows = list(itertools.islice(rows, limit))
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _lines(path: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise FileMistake(f":{number}: not valid UTF-8: {error.reason}") from None


def _read_csv(path: str, text_columns: Collection[str | None]) -> list[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(_lines(path))
    try:
        header = next(reader, [])
        repeated = sorted({name for name in header if header.count(name) > 1})
        if repeated:
            raise FileMistake(f": column {', '.join(map(repr, repeated))} is there more than once")
        rows = []
        for row in filter(None, reader):
            if len(row) != len(header):
                raise FileMistake(f":{reader.line_num}: {len(row)} fields, but the header has {len(header)}")
            rows.append(row)
    except csv.Error as error:
        raise FileMistake(f":{reader.line_num}: not valid CSV: {error}") from None
    columns = zip(*rows, strict=True) if rows else [[] for _ in header]
    return csv_rows(dict(zip(header, columns, strict=True)), text_columns)


def csv_rows(
    columns: Mapping[str, Sequence[str | None]], text_columns: Collection[str | None] = ()
) -> list[dict[str, Any]]:
    """The rows of a CSV file, from the texts of its columns. The arguments are those of :func:`read_text_file`."""
    values = [_column_values(cells, as_text=name in text_columns) for name, cells in columns.items()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _column_values(cells: Sequence[str | None], *, as_text: bool) -> list[Any]:
    """The values of a CSV column: numbers where this changes no cell (``12``, ``0.5``; not ``007``, ``1.50``, ``1e5``), booleans, else texts.

    An empty cell is None, and does not count.
    """
    texts = [cell or None for cell in cells]
    values = texts if as_text else [text and _value(text) for text in texts]
    return texts if any(value is None and text for value, text in zip(values, texts, strict=True)) else values


def _value(text: str) -> bool | int | float | None:
    """True, False or the finite number that is written as ``text``; None if there is none, or if it would be written differently."""
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            if str(number) == text and math.isfinite(number):
                return number
    return None


def _read_json(path: str, suffix: str) -> Iterator[dict[str, Any]]:
    """One object per line, or with the suffix ``.json`` also one document: a list of rows, or a single row."""
    if suffix == ".json":
        text = "".join(_lines(path))
        try:
            document = _parse(text)
            for row in document if isinstance(document, list) else [document]:
                yield row if isinstance(row, dict) else {"text": row}
            return
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # another document after the first: one per line
                raise FileMistake(f":{error.lineno}: not valid JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise FileMistake(f": {_reason(error)}") from None
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = _parse(line)
        except (ValueError, RecursionError) as error:
            raise FileMistake(f":{number}: {_reason(error)}") from None
        if not isinstance(row, dict):
            raise FileMistake(f":{number}: expected a JSON object, got {type(row).__name__}")
        yield row


def _parse(text: str) -> Any:
    value = json.loads(text, object_pairs_hook=_object_without_repetition)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair (\ud83d) is no text: ValueError
    return value


def _object_without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice in one object")
    return made


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep to be read"
    return f"not valid JSON: {getattr(error, 'msg', error)}"
