"""Files and folders that appear whole or not at all: written under a temporary name with a dot, then renamed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that appears under `path` once it is complete and on the disk; after a failure it is removed.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a link, or what a killed process of this number left
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: Path, *, replace: bool) -> Iterator[Path]:
    """Yield an empty folder that appears under `path` once the block ends; after a failure it is removed.

    Raises:
        OSError: It cannot be written, or something is at `path` and must not be replaced.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        if replace:
            shutil.rmtree(path, ignore_errors=True)
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left of such files and folders, anywhere in a folder that nobody else writes.

    Raises:
        OSError: One cannot be removed.
    """
    for path in [*folder.rglob(".*.tmp"), *folder.rglob(".*.new")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
