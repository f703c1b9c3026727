"""Reads the files that wandb writes offline, for which the package has no reader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any


def log_records(data: bytes) -> Iterator[bytes]:
    """Of a .wandb file, which has LevelDB's log format: blocks of 32 KiB; CRC, length and type
    before each part."""
    position, parts = 7, []  # a header of seven bytes
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield b"".join(parts)
            parts = []


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of wandb's own file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record
