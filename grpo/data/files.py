"""Find what is wrong with a data file. ``datasets`` does not name the line, and repairs some mistakes silently."""

import csv
import difflib
import json
import os

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""File suffix -> the name of the builder of ``datasets`` that reads such files."""


def describe_similar_files(path: str) -> str:
    """The end of an error message about a missing file: ``; FOLDER has a.jsonl, b.csv``, files with similar names or data files."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"; there is no folder {folder}"
    names = sorted(os.listdir(folder))
    found = difflib.get_close_matches(os.path.basename(path), names, n=3)
    found = found or [name for name in names if os.path.splitext(name)[1].lower() in FORMATS][:4]
    return f"; {folder} has {', '.join(found)}" if found else ""


def csv_error(path: str) -> str | None:
    """The first mistake in a CSV file, as ``:3: 4 fields, ...``; None if there is none.

    pandas renames columns that occur twice, and shifts the fields of rows that are longer than the header, both without an error.
    """
    csv.field_size_limit(2**31 - 1)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            repeated = sorted({name for name in header if header.count(name) > 1})
            if repeated:
                return f": column {', '.join(map(repr, repeated))} is there more than once"
            for row in reader:
                if row and len(row) != len(header):
                    return f":{reader.line_num}: {len(row)} fields, but the header has {len(header)}"
    except UnicodeDecodeError:
        return parse_error(path, ".csv")
    except csv.Error as error:
        return f":{reader.line_num}: not valid CSV: {error}"
    return None


def parse_error(path: str, suffix: str) -> str | None:
    """The first line of a text file that cannot be parsed, as ``:7: not valid JSON: ...``; None if there is none.

    Only the encoding of a ``.csv`` file is checked, and nothing of a ``.parquet`` file.
    """
    if suffix == ".parquet":
        return None
    if suffix == ".json":  # one document, or one document per line
        try:
            with open(path, encoding="utf-8-sig") as file:
                json.load(file)
            return None
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":
                return f":{error.lineno}: not valid JSON: {error.msg}"
        except (UnicodeDecodeError, RecursionError):
            pass  # the loop below finds the line
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() and suffix != ".csv" else {}
            except UnicodeDecodeError as error:
                return f":{number}: not valid UTF-8: {error.reason}"
            except (ValueError, RecursionError) as error:
                return f":{number}: not valid JSON: {getattr(error, 'msg', error)}"
            if suffix == ".jsonl" and not isinstance(row, dict):
                return f":{number}: expected a JSON object, got {type(row).__name__}"
    return None
