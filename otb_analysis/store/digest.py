"""Copies of the footers of `steps` and `rollouts`, a line for each part: a list of 24 runs opens 24 files, not 4,800.

The parts are the truth. A line counts only while its own checksum is right, and only for the very file that it was
written about: the same name, time and size. A digest may be lost, cut short or out of date; then the parts are read.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from sys import intern
from zlib import crc32

from otb_analysis.store.checksum import LIGHT, ROW, Sealed, Signature, read_sealed, verified

TEXTS = {"steps": ROW, "rollouts": LIGHT}
"""The tables that have a digest, and the text of a footer that it repeats."""
FEW = 16
"""Parts up to which reading them is faster than reading a digest."""

Noted = dict[tuple[str, int, int], tuple[Sealed, str]]
"""What parts say of themselves, and a text of their footers, by name, time in nanoseconds and size."""

_SAID: dict[Signature, Sealed] = {}
_MOST_SAID = 200_000


def digest_path(run_dir: Path, table: str, rank: int) -> Path:
    """Return where a process writes what its parts of a table say."""
    return run_dir / f"{table}-r{rank}.digest"


def note(run_dir: Path, table: str, rank: int, part: Path) -> None:
    """Add what a part says of itself; where that fails, readers open the part."""
    with suppress(OSError):
        status = part.stat()
        sealed, text = read_sealed((part, status.st_mtime_ns, status.st_size), TEXTS[table])
        about = (sealed.checksum, sealed.schema, sealed.recorded, sealed.parts, sealed.columns)
        body = "\t".join([part.name, str(status.st_mtime_ns), str(status.st_size), *about, text]).encode()
        with open(digest_path(run_dir, table, rank), "ab", buffering=0, opener=_no_link) as file:
            file.write(b"%08x\t%s\n" % (crc32(body), body))


def noted(run_dir: Path, table: str) -> Noted:
    """Return what the digests of a table say."""
    found: Noted = {}
    for path in sorted(run_dir.glob(f"{table}-r*.digest")):
        with suppress(OSError):
            lines = [] if path.is_symlink() else path.read_bytes().splitlines()
            found.update(one for line in lines if (one := _read(line)) is not None)
    return found


def forget(run_dir: Path) -> None:
    """Remove the digests of a run.

    Raises:
        OSError: One cannot be removed.
    """
    for table in TEXTS:
        for path in run_dir.glob(f"{table}-r*.digest"):
            path.unlink(missing_ok=True)


def said(run_dir: Path, table: str, signatures: Sequence[Signature]) -> list[Sealed]:
    """Return what parts say of themselves, without opening those that a digest tells of: their bytes are not compared.

    Raises:
        OSError: One cannot be read, or its checksum differs.
    """
    known = [verified(one) or _SAID.get(one) for one in signatures]
    if table in TEXTS and known.count(None) > FEW:
        if len(_SAID) > _MOST_SAID:
            _SAID.clear()
        lines = noted(run_dir, table)
        for at, one in enumerate(signatures):
            if known[at] is None and (line := lines.get((one[0].name, *one[1:]))) is not None:
                known[at] = _SAID[one] = line[0]
    return [sealed or read_sealed(one, ROW)[0] for one, sealed in zip(signatures, known, strict=True)]


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _read(line: bytes) -> tuple[tuple[str, int, int], tuple[Sealed, str]] | None:
    """Return a line of a digest; None where it is not whole."""
    checksum, _, body = line.partition(b"\t")
    if checksum != b"%08x" % crc32(body):
        return None
    try:
        name, time, size, *about, text = body.decode().split("\t")
        return (name, int(time), int(size)), (Sealed(about[0], about[1], intern(about[2]), *about[3:]), text)
    except (ValueError, TypeError, IndexError):
        return None
