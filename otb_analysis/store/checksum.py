"""A checksum inside every part and run.json, so that a changed bit is a sentence and never another number.

A part carries the CRC-32 of its name and of all its bytes as eight hexadecimal digits in the metadata of its footer;
those digits count as zeros. Parquet's own page checksums leave the footer out, and DuckDB does not look at them.
A file without a checksum, of an earlier version, is read as it is.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

CHECKSUM = "otb_crc32"
"""The key in a footer; in run.json it is `checksum`."""
BLANK = b"00000000"
CHANGED = "its checksum differs, so it has changed since it was written"

_KEY = CHECKSUM.encode() + b"\x18\x08"  # as Thrift writes it: then comes a text of 8 bytes
_MAGIC = b"PAR1"
_CHUNK = 1 << 22


def stamp(path: Path, part: memoryview) -> bytes:
    """Return a part whose footer has `BLANK` under `CHECKSUM`, with its checksum there instead.

    Args:
        path: Where the part will lie; a part under another name is a changed one.
    """
    content = bytearray(part)
    place = content.rindex(_KEY) + len(_KEY)
    content[place : place + len(BLANK)] = f"{crc32(content, _of_name(path)):08x}".encode()
    return bytes(content)


def check_part(path: Path) -> None:
    """Read a part to the end and compare its checksum, where it has one.

    Raises:
        OSError: It cannot be read, or the checksum differs.
    """
    with path.open("rb") as file:
        place = _place(file)
        if place is None:
            return
        file.seek(place)
        written, sum_ = file.read(len(BLANK)), _of_name(path)
        file.seek(0)
        while file.tell() < place:
            sum_ = crc32(file.read(min(_CHUNK, place - file.tell())), sum_)
        sum_ = crc32(BLANK, sum_)
        file.seek(place + len(BLANK))
        while chunk := file.read(_CHUNK):
            sum_ = crc32(chunk, sum_)
    if written != f"{sum_:08x}".encode():
        raise OSError(CHANGED)


def checksum_of(info: Mapping[str, object]) -> str:
    """Return the checksum of what run.json says, however it is laid out."""
    return f"{crc32(json.dumps(info, sort_keys=True, default=str).encode()):08x}"


def _of_name(path: Path) -> int:
    return crc32(f"{path.parent.name}/{path.name}".encode())


def _place(file: BinaryIO) -> int | None:
    """Return where a part's checksum stands; None where it has none, or is no Parquet file."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - 8))
    tail = file.read(8)
    start = end - 8 - int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or start < 0:
        return None
    file.seek(start)
    at = file.read(end - start).rfind(_KEY)
    return None if at < 0 else start + at + len(_KEY)
