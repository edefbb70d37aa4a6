"""Names on disk: what a run, its tables and their files are called."""

import re
from pathlib import Path

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.schema import TABLES

RUN_FILE, CATALOGUE = "run.json", "run.sqlite"

PART_FILE = re.compile(r"(\w+)/(?:part-\d+-r\d+|upto-\d+|merged-\d+-\d+)\.parquet|(\w+)\.parquet", re.ASCII)
"""Where rows of a table may lie: of one step and process, of all steps up to one, or of a run that has ended."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,@-]{0,127}")


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


def refused_link(path: Path) -> StoreError:
    """Return the sentence about a link in a run."""
    return StoreError(f"{path} is a link, which may lead out of the run; put what it points to there.")


def part_path(run_dir: Path, table: str, step: int, rank: int) -> Path:
    """Return where a part lies: <run>/<table>/part-<step>-r<rank>.parquet."""
    return run_dir / table / f"part-{step:08d}-r{rank}.parquet"


def is_run(path: Path) -> bool:
    """Return whether a directory is a run, whole or broken: it has a run.json or a table's folder."""
    return path.is_dir() and any((path / name).exists() for name in (RUN_FILE, CATALOGUE, *TABLES))


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
        InputError: There is no such run, of which the sentence names the nearest one beside it; or it holds runs.
        StoreError: The directory is there but has no run.json.
    """
    if (path / RUN_FILE).is_file():
        return path
    if path.is_dir() and list_runs(path):
        raise InputError(f"{path} holds runs and is none itself; pass it as --root.")
    if path.is_dir():
        raise StoreError(f"{path} has no {RUN_FILE}, so it cannot be read as a run; write the run again or delete it.")
    names = [p.name for p in list_runs(path.parent)]
    known = nearest(path.name, names) if names else "there are no runs."
    raise InputError(f"there is no run {path.name!r} in {path.parent}; {known}")
