"""Where things lie on disk, and which parts of a run a reader may see.

A part holds one step of one table from one rank. The `steps` part is written last, so the steps that have one are the
complete ones. Readers skip all other parts, and files whose names are not those of parts (a temporary file starts with
a dot). Compaction will list its merged parts in a manifest; only `visible_parts` will have to read it.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.schema import TABLES

RUN_FILE = "run.json"

_PART = re.compile(r"part-(\d+)-r(\d+)\.parquet")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,@-]{0,127}")


@dataclass(frozen=True, order=True)
class Part:
    """One Parquet file of a table; made by listing a folder, read by the readers."""

    step: int  # The step whose rows it holds
    rank: int  # The process that wrote it
    path: Path  # Where it lies


def check_run_name(run: str) -> str:
    """Return the name if it can be a directory name anywhere.

    Raises:
        InputError: It is empty, too long, or holds a slash, a space or another sign that is not plain.
    """
    if not _RUN_NAME.fullmatch(run):
        raise InputError(
            f"run name {run!r} cannot be a directory name; use at most 128 letters, digits and . _ - + = , @, "
            "starting with a letter or a digit."
        )
    return run


def part_path(run_dir: Path, table: str, step: int, rank: int) -> Path:
    """Return where a part lies: <run>/<table>/part-<step>-r<rank>.parquet."""
    return run_dir / table / f"part-{step:08d}-r{rank}.parquet"


def parts_of(run_dir: Path, table: str) -> list[Part]:
    """Return all parts of one table, by step and rank, complete or not.

    Raises:
        StoreError: The folder cannot be listed, or is or holds a link.
    """
    folder = run_dir / table
    try:
        with os.scandir(folder) as entries:
            links = {entry.name: entry.is_symlink() for entry in entries}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed ({error.strerror}); make it a readable folder.") from error
    matches = [m for m in map(_PART.fullmatch, links) if m]
    if linked := next((m[0] for m in matches if links[m[0]]), None) or (folder.is_symlink() and "."):
        raise StoreError(f"{folder / linked} is a link, which may lead out of the run; put what it points to there.")
    return sorted(Part(int(m[1]), int(m[2]), folder / m[0]) for m in matches)


def complete_steps(run_dir: Path) -> list[int]:
    """Return the steps that are complete, in order: those with a `steps` part."""
    return sorted({part.step for part in parts_of(run_dir, "steps")})


def visible_parts(run_dir: Path, tables: Iterable[str], steps: Iterable[int] | None = None) -> dict[str, list[Part]]:
    """Return the parts a reader may see of each table: those of the steps that are complete at this moment.

    The complete steps are looked up once, so that all tables of one answer show the same ones.
    """
    visible = set(complete_steps(run_dir))
    if steps is not None:
        visible &= {int(step) for step in steps}
    return {table: [part for part in parts_of(run_dir, table) if part.step in visible] for table in tables}


def is_run(path: Path) -> bool:
    """Return whether a directory is a run, whole or broken: it has a run.json or a table's folder."""
    return path.is_dir() and any((path / name).exists() for name in (RUN_FILE, *TABLES))


def list_runs(root: Path) -> list[Path]:
    """Return the run directories of a root by name; none when the root does not exist.

    Raises:
        StoreError: The root is there but cannot be listed.
    """
    try:
        return sorted(p for p in root.iterdir() if not p.name.startswith(".") and is_run(p))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{root} cannot be listed ({error.strerror}); pass a directory that holds runs.") from error


def find_run(path: Path) -> Path:
    """Return the path if it is a run.

    Raises:
        InputError: There is no such run; the sentence names the nearest one beside it.
        StoreError: The directory is there but has no run.json.
    """
    if (path / RUN_FILE).is_file():
        return path
    if path.is_dir():
        raise StoreError(f"{path} has no {RUN_FILE}, so it cannot be read as a run; write the run again or delete it.")
    names = [p.name for p in list_runs(path.parent)]
    known = nearest(path.name, names) if names else "there are no runs."
    raise InputError(f"there is no run {path.name!r} in {path.parent}; {known}")
