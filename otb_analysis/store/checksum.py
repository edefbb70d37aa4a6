"""A checksum inside every part and run.json, so that a changed bit is a sentence and never another number.

A part carries the CRC-32 of its name and of all its bytes as eight hexadecimal digits in the metadata of its footer;
those digits count as zeros. Parquet's own page checksums leave the footer out, and DuckDB does not look at them.
A `steps` part, written last, also names the other parts of its step with their checksums, so that one that is deleted
or exchanged is noticed. A file without a checksum, of an earlier version, is read as it is.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from sys import intern
from zlib import crc32

CHECKSUM = "otb_crc32"
"""The key in a footer; in run.json it is `checksum`."""
PARTS = "otb_parts"
"""The key of the other parts of its step in a `steps` part: JSON of table → name → checksum."""
COLUMNS = "otb_columns"
"""The key of what those parts hold, in the same `steps` part: JSON of table → name → columns as under `RECORDED`."""
RECORDED = "otb_recorded"
"""The key of the columns that hold any value, with commas between them; a column that is null throughout is not one."""
SCHEMA = "otb_schema"
"""The key of a checksum of a part's column names and types, so that those of thousands of parts are read once."""
ROW = "otb_row"
"""The key of a `steps` part's row as JSON without its nulls: reading it takes a tenth of reading 80 columns."""
LIGHT = "otb_light"
"""The key of the columns of a `rollouts` part that a page reads of all steps, as compressed JSON."""
BLANK = b"00000000"
CHANGED = "its checksum differs, so it has changed since it was written"

_KEY = CHECKSUM.encode() + b"\x18\x08"  # as Thrift writes it: then comes a text of 8 bytes
_MAGIC = b"PAR1"
_CHUNK = 1 << 22


def stamp(path: Path, part: memoryview) -> tuple[bytes, str]:
    """Return a part whose footer has `BLANK` under `CHECKSUM`, with its checksum there instead, and the checksum.

    Args:
        path: Where the part will lie; a part under another name is a changed one.
    """
    content = bytearray(part)
    place = content.rindex(_KEY) + len(_KEY)
    checksum = f"{crc32(content, _of_name(path)):08x}"
    content[place : place + len(BLANK)] = checksum.encode()
    return bytes(content), checksum


@dataclass(frozen=True)
class Sealed:
    """What a part says of itself, once its checksum is right; all are empty in parts of earlier versions."""

    checksum: str = ""
    schema: str = ""  # The same for parts with the same columns
    recorded: str = ""  # Columns that hold any value; see `RECORDED`
    parts: str = ""  # JSON of the other parts of its step
    columns: str = ""  # JSON of what those parts hold

    def named_parts(self, table: str) -> Mapping[str, str]:
        """Return the parts of a table that belong to the step, by name, with their checksums."""
        return _by_name(self.parts).get(table, {})

    def held_by(self, table: str) -> Mapping[str, str]:
        """Return the columns that hold any value in those parts, by name; see `RECORDED`."""
        return _by_name(self.columns).get(table, {})


@lru_cache(maxsize=20_000)
def _by_name(text: str) -> dict[str, dict[str, str]]:
    return json.loads(text) if text else {}


Signature = tuple[Path, int, int]
"""Path, time in nanoseconds and size: what changes when a part is written again."""

_SEALED: dict[Signature, Sealed] = {}
_MOST_SEALED = 200_000


def sealed(signature: Signature) -> Sealed:
    """Return what a part says of itself, once it was read to the end; one that is replaced has another signature.

    Raises:
        OSError: It cannot be read, or the checksum differs.
    """
    return verified(signature) or read_sealed(signature, ROW)[0]


def verified(signature: Signature) -> Sealed | None:
    """Return what a part says of itself if its checksum was compared before."""
    return _SEALED.get(signature)


def read_sealed(signature: Signature, key: str) -> tuple[Sealed, str]:
    """Read a part to the end, compare its checksum, and return what it says of itself and its text under a key.

    Raises:
        OSError: It cannot be read, or the checksum differs.
    """
    path = signature[0]
    with path.open("rb", buffering=0) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _CHUNK))
        end = file.read()  # most parts as a whole
        length = 8 + int.from_bytes(end[-8:-4], "little")
        if end[-4:] != _MAGIC or length > size:
            return Sealed(), ""  # no Parquet file: whoever reads it says why
        if length > len(end):
            file.seek(size - length)
            end = file.read()
        footer = bytearray(end[-length:])
        at = footer.rfind(_KEY)
        if at < 0:
            return Sealed(), ""
        written = bytes(footer[at + len(_KEY) :][: len(BLANK)])
        footer[at + len(_KEY) : at + len(_KEY) + len(BLANK)] = BLANK
        found, left = _of_name(path), size - length
        if len(end) == size:
            found = crc32(memoryview(end)[:left], found)
        else:
            file.seek(0)
            while left and (block := file.read(min(_CHUNK, left))):
                found, left = crc32(block, found), left - len(block)
    if written != f"{crc32(footer, found):08x}".encode():
        raise OSError(CHANGED)
    schema, recorded, parts, columns, text = (
        _text_of(footer, name) for name in (SCHEMA, RECORDED, PARTS, COLUMNS, key)
    )
    if len(_SEALED) > _MOST_SEALED:
        _SEALED.clear()
    said = _SEALED[signature] = Sealed(written.decode(), schema, intern(recorded), parts, columns)
    return said, text


def written_about(path: Path) -> tuple[str, str]:
    """Return the checksum that a part carries, without comparing it, and its `RECORDED`; empty where there is none.

    Raises:
        OSError: It cannot be read.
    """
    content = path.read_bytes()
    at = content.rfind(_KEY)
    return ("", "") if at < 0 else (content[at + len(_KEY) :][: len(BLANK)].decode(), _text_of(content, RECORDED))


def checksum_of(info: Mapping[str, object]) -> str:
    """Return the checksum of what run.json says, however it is laid out."""
    return f"{crc32(json.dumps(info, sort_keys=True, default=str).encode()):08x}"


def _of_name(path: Path) -> int:
    return crc32("/".join(os.fspath(path).split(os.sep)[-2:]).encode())


def _text_of(footer: bytes | bytearray, key: str) -> str:
    """Return a text of a footer's metadata; empty where there is none."""
    at = footer.rfind(key.encode() + b"\x18")
    if at < 0:
        return ""
    at, length, shift = at + len(key) + 1, 0, 0
    while True:  # Thrift's length of a text: 7 bits a byte, the lowest first
        length |= (footer[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if footer[at - 1] < 128:
            return footer[at : at + length].decode()
