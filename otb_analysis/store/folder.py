"""What lies in the folders of a run's tables: a part for each file of one step, as it was when it was looked at.

A look lists the names, and asks for time and size only of files that are new. The writer replaces no file without
touching run.json, and another file has another inode, most often; where either changed, the file is looked at again. So
that a file exchanged by hand is noticed for certain, all are looked at again after a while, and young ones every time.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from operator import attrgetter
from pathlib import Path

from otb_analysis.errors import StoreError
from otb_analysis.store.layout import PART, RUN_FILE, refused_link
from otb_analysis.store.merged import Part

YOUNG, AGAIN = 5_000_000_000, 300_000_000_000
"""Nanoseconds up to which a file is young, and from one look at the times of all files to the next."""

_looked: ContextVar[dict[Path, list[Part]] | None] = ContextVar("looked", default=None)


@contextmanager
def one_look() -> Iterator[None]:
    """Look at each folder once in this block, and let all that is read in it show that moment; for this thread."""
    before = _looked.set({})
    try:
        yield
    finally:
        _looked.reset(before)


def looked_earlier() -> bool:
    """Return whether reading would take what was seen before in a block of `one_look`."""
    return bool(_looked.get())


def look_again() -> None:
    """Forget what was seen in this block of `one_look`."""
    if (looked := _looked.get()) is not None:
        looked.clear()


def loose_parts(run_dir: Path, table: str) -> list[Part]:
    """Return all parts of one step of a table, by step and rank, complete or not; the same object as long as its file.

    Raises:
        StoreError: The folder cannot be listed, or is or holds a link.
    """
    folder, looked = run_dir / table, _looked.get()
    if looked is None:
        return _look(folder)
    if folder not in looked:
        looked[folder] = _look(folder)
    return looked[folder]


def _look(folder: Path) -> list[Part]:
    if folder.is_symlink():
        raise refused_link(folder)
    try:
        with os.scandir(folder) as entries:
            files = list(entries)
        # Not before: a file that was replaced before it was listed is older than run.json.
        return _seen(folder).parts(files, _time_and_size(f"{folder.parent}/{RUN_FILE}"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed ({error.strerror}); make it a readable folder.") from error


class _Seen:
    """The parts that a folder held when it was last looked at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.of_run_file: tuple[int, int] | None = None
        self.whole = 0  # When all files were last asked for their times
        self.listed: list[Part] = []  # By step and rank
        self.known: dict[str, Part] = {}  # The same by name
        self.settled: dict[str, int] = {}  # The inodes of those that are not young

    def parts(self, files: list[os.DirEntry[str]], of_run_file: tuple[int, int] | None) -> list[Part]:
        """Return the parts among all files of the folder; another time of run.json says that any may be replaced."""
        links = [file.name for file in files if file.is_symlink() and file.name.endswith(".parquet")]
        if links:
            raise refused_link(self.folder / links[0])
        inodes = {file.name: file.inode() for file in files}
        with self.lock:
            now = time.time_ns()
            sure = of_run_file == self.of_run_file and 0 <= now - self.whole < AGAIN
            before = self.settled if sure else {}
            asked = [name for name, inode in inodes.items() if before.get(name) != inode]
            found = {name: part for name in asked if (part := self._part(name)) is not None}
            added = {name: part for name, part in found.items() if part is not self.known.get(name)}
            gone = (self.known.keys() - inodes.keys()) | ((self.known.keys() & asked) - found.keys())
            grown = not gone and not added.keys() & self.known.keys()
            for name in gone:
                del self.known[name]
            self.known |= added
            if gone or added:
                parts = [*self.listed, *added.values()] if grown else self.known.values()
                self.listed = sorted(parts, key=attrgetter("step", "rank"))
            for name in asked:
                if name not in found or (found[name].seen or (now,))[0] >= now - YOUNG:
                    del inodes[name]
            self.settled, self.of_run_file, self.whole = inodes, of_run_file, self.whole if sure else now
            return self.listed

    def _part(self, name: str) -> Part | None:
        """Return a file's part, that of before if it is the same file; None if it is none, or was just removed."""
        match = PART.fullmatch(name)
        if match is None or (seen := _time_and_size(f"{self.folder}/{name}")) is None:
            return None
        before = self.known.get(name)
        if before is not None and before.seen == seen:
            return before
        step, rank = int(match[1]), int(match[2])
        return Part(step, rank, self.folder / name, steps=(step,), seen=seen)


@lru_cache(maxsize=1_000)
def _seen(folder: Path) -> _Seen:
    return _Seen(folder)


def _time_and_size(path: str) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size
