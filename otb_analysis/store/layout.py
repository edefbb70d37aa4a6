"""A run's folder: names on disk, run.json, which says what a run was, and the process that writes it.

A process that was killed cannot say that it ended. Only a reader that sees the same processes as the writer can tell:
on the same host, in the same process namespace. Anywhere else a run is believed, and when it was last heard of is said.
"""

import json
import os
import platform
import re
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil

from otb_analysis.atomic import atomic_file
from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.schema import SCHEMA_VERSION, TABLES

RUN_FILE, CATALOGUE = "run.json", "run.sqlite"
RESERVE = ".reserve"
"""A file that only holds disk space. It is deleted when a run ends, so that a full disk still has room for run.json."""

PART_FILE = re.compile(r"(\w+)/(?:part-\d+-r\d+|upto-\d+|merged-\d+-\d+)\.parquet|(\w+)\.parquet", re.ASCII)
"""Where rows of a table may lie: of one step and process, of all steps up to one, or of a run that has ended."""
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,@-]{0,127}")

PACKAGES = ("otb-analysis", "torch", "transformers", "numpy", "pandas", "pyarrow", "duckdb")
MAX_DIFF_BYTES = 1_000_000
STOPPED = (
    "its process ended without a word; its complete steps can be read, go on with --if-exists resume (TRL: if_exists)."
)

_TYPES: dict[str, type | tuple[type, ...]] = {
    "run": str, "status": str, "reason": str, "created": str, "updated": str, "config": dict, "packages": dict,
    "schema_version": int,
}  # fmt: skip
"""What run.json must hold where it has these keys; people and other tools may have written it."""


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


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond: runs of a sweep start within a second."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run(run: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return the content of the run.json of a run that starts now."""
    packages: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "run": run, "status": "running", "reason": "", "created": now(), "updated": now(), "process": this_process(),
        "schema_version": SCHEMA_VERSION, "seed": config.get("seed"), "config": dict(config), "git": git_state(),
        "packages": packages, "python": platform.python_version(), "platform": platform.platform(),
    }  # fmt: skip


def write_run_file(run_dir: Path, info: Mapping[str, object]) -> None:
    """Write run.json; values JSON does not know (a path, say) are written as their text.

    Raises:
        OSError: It cannot be written.
    """
    plain = json.loads(json.dumps(info, default=str))
    # The checksum comes first and the name after it: what tears out one and more than that tears out both.
    text = json.dumps({"checksum": _checksum(plain), **plain}, indent=2, ensure_ascii=False)
    with atomic_file(run_dir / RUN_FILE) as file:
        file.write(text.encode("utf-8", errors="backslashreplace"))


def write_reserve(run_dir: Path) -> None:
    """Set aside the room that one more run.json needs.

    Raises:
        OSError: There is no room.
    """
    room = (run_dir / RUN_FILE).stat().st_size + 16_384
    (run_dir / RESERVE).unlink(missing_ok=True)  # never through a link
    (run_dir / RESERVE).write_bytes(os.urandom(room))  # random: a file system that compresses would keep no room


def read_run_file(run_dir: Path) -> dict[str, object]:
    """Return the content of run.json.

    Raises:
        StoreError: It cannot be read, is a link, was written by a newer version, or has changed since it was written.
    """
    path = run_dir / RUN_FILE
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise refused_link(path)
        return dict(_parsed(path, status.st_ino, status.st_mtime_ns, status.st_size))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise StoreError(f"{path} cannot be read ({why}); restore it, or delete the run and write it again.") from error


# A list of runs asks seven times for each run, and one with the changes of a repository in it takes 3 ms to parse.
@lru_cache(maxsize=256)
def _parsed(path: Path, inode: int, mtime_ns: int, size: int) -> dict[str, object]:
    """Return what a run.json says once it is checked; until it changes it is read once."""
    info = json.loads(path.read_text(encoding="utf-8"))
    schema = info.get("schema_version") if isinstance(info, dict) else None
    if not isinstance(schema, int):
        raise StoreError(f"{path} names no schema_version; restore it, or delete the run and write it again.")
    for name, kind in _TYPES.items():
        if name in info and not isinstance(info[name], kind):
            raise StoreError(f"{path} has {name} = {str(info[name])[:40]}, which is none; restore it, or correct it.")
    if schema > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema_version {schema}, but this otb-analysis reads up to {SCHEMA_VERSION}; "
            "upgrade otb-analysis to read the run."
        )
    checksum = info.pop("checksum", None)
    if checksum != _checksum(info) and (checksum is not None or "run" not in info):
        raise StoreError(
            f"{path} is broken (its checksum differs, so it has changed since it was written); restore it, or delete "
            "its checksum if the change is yours."
        )
    return info


def _checksum(info: Mapping[str, object]) -> str:
    """Return the checksum of what run.json says, however it is laid out."""
    return f"{crc32(json.dumps(info, sort_keys=True, default=str).encode()):08x}"


def git_state() -> dict[str, object] | None:
    """Return commit and uncommitted diff of the repository around the working directory, or None outside of one.

    The diff is cut after a megabyte, and `diff_truncated` says so.
    """
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # two runs that start together must not wait for each other
    asked: Any = {"capture_output": True, "env": environment}
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **asked, check=True).stdout
        diff = subprocess.run(["git", "diff", "--no-ext-diff", "--no-textconv", "HEAD"], **asked, check=False).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return {
        "commit": commit.decode().strip(),
        "diff": diff[:MAX_DIFF_BYTES].decode("utf-8", errors="replace"),
        "diff_truncated": len(diff) > MAX_DIFF_BYTES,
    }


def this_process() -> dict[str, object]:
    """Return what identifies this process: host, place in which its number is valid, number, second of its start."""
    return {"host": platform.node(), "place": _host(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def live_status(info: Mapping[str, object], heard: str = "") -> tuple[str, str]:
    """Return the status of a run as it is now, and why.

    A run that says it is running is `stopped` where its process is known to be gone, and `running` otherwise.
    `heard` is when it was last written to, in words.
    """
    status, reason = str(info.get("status") or ""), str(info.get("reason") or "")
    process = info.get("process")
    if status != "running" or not isinstance(process, Mapping):
        return status, reason
    lives = _lives(process)
    if lives is None:
        last = f", last seen {heard}" if heard else ""
        return status, f"running on {process.get('host') or 'another machine'}{last}."
    return (status, reason) if lives else ("stopped", STOPPED)


def other_writer(info: Mapping[str, object]) -> int | None:
    """Return the number of another process that is known to write a run; None where none is known."""
    process = info.get("process")
    if info.get("status") != "running" or not isinstance(process, Mapping) or not _lives(process):
        return None
    return None if process["pid"] == os.getpid() else process["pid"]


def _lives(process: Mapping[str, object]) -> bool | None:
    """Return whether a process is running; None where this process cannot see it by number."""
    pid, started = process.get("pid"), process.get("started")
    if process.get("place") != _host() or not isinstance(pid, int) or not isinstance(started, int | float):
        return None
    try:
        one = psutil.Process(pid)
        # Another process may have the number by now. The clock may have been set meanwhile, by less than a second.
        return abs(one.create_time() - started) < 1 and one.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _host() -> str:
    """Return host and process namespace; processes of one place see each other's numbers."""
    namespace = ""
    with suppress(OSError):  # only Linux has these
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{platform.node()} {namespace}".strip()
