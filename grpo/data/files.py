"""What is wrong with a data file, in words a person can act on: ``datasets`` names no line, and mends some mistakes silently."""

from __future__ import annotations

import csv
import difflib
import json
import os

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
"""Suffix -> the builder of ``datasets`` that reads it."""


def nearby(path: str) -> str:
    """What there is where a missing file was looked for."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"; there is no folder {folder}"
    names = sorted(os.listdir(folder))
    found = difflib.get_close_matches(os.path.basename(path), names, n=3)
    found = found or [name for name in names if os.path.splitext(name)[1].lower() in FORMATS][:4]
    return f"; {folder} has {', '.join(found)}" if found else ""


def check_csv(path: str) -> str | None:
    """``:3: 4 fields, ...``: pandas renames columns given twice and shifts rows longer than the header, silently."""
    csv.field_size_limit(2**31 - 1)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            twice = sorted({name for name in header if header.count(name) > 1})
            if twice:
                return f": column {', '.join(map(repr, twice))} is there more than once"
            for row in reader:
                if row and len(row) != len(header):
                    return f":{reader.line_num}: {len(row)} fields, but the header has {len(header)}"
    except UnicodeDecodeError:
        return first_mistake(path, ".csv")
    except csv.Error as error:
        return f":{reader.line_num}: not valid CSV: {error}"
    return None


def first_mistake(path: str, suffix: str) -> str | None:
    """``:7: not valid JSON: ...``, the line of a text file that does not parse; ``datasets`` does not say."""
    if suffix == ".parquet":
        return None
    if suffix == ".json":  # one document, or one a line
        try:
            with open(path, encoding="utf-8-sig") as file:
                json.load(file)
            return None
        except json.JSONDecodeError as broken:
            if broken.msg != "Extra data":
                return f":{broken.lineno}: not valid JSON: {broken.msg}"
        except (UnicodeDecodeError, RecursionError):
            pass  # the line is found below
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() and suffix != ".csv" else {}
            except UnicodeDecodeError as broken:
                return f":{number}: not valid UTF-8: {broken.reason}"
            except (ValueError, RecursionError) as broken:
                return f":{number}: not valid JSON: {getattr(broken, 'msg', broken)}"
            if suffix == ".jsonl" and not isinstance(row, dict):
                return f":{number}: expected a JSON object, got {type(row).__name__}"
    return None
