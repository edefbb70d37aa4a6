"""run.json: what a run was, where it came from, and how it ended; written atomically."""

import json
import os
import platform
import stat
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from zlib import crc32

from otb_analysis.atomic import atomic_file
from otb_analysis.errors import StoreError
from otb_analysis.schema import SCHEMA_VERSION
from otb_analysis.store.layout import RUN_FILE, refused_link
from otb_analysis.store.liveness import this_process

RESERVE = ".reserve"
"""A file that only holds disk space. It is deleted when a run ends, so that a full disk still has room for run.json."""

PACKAGES = ("otb-analysis", "torch", "transformers", "numpy", "pandas", "pyarrow", "duckdb")
MAX_DIFF_BYTES = 1_000_000

_TYPES: dict[str, type | tuple[type, ...]] = {
    "run": str, "status": str, "reason": str, "created": str, "updated": str, "config": dict, "packages": dict,
    "schema_version": int,
}  # fmt: skip
"""What run.json must hold where it has these keys; people and other tools may have written it."""


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond: runs of a sweep start within a second."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def new_run(run: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return the content of the run.json of a run that starts now."""
    return {
        "run": run,
        "status": "running",
        "reason": "",
        "created": now(),
        "updated": now(),
        "process": this_process(),
        "schema_version": SCHEMA_VERSION,
        "seed": config.get("seed"),
        "config": dict(config),
        "git": git_state(),
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def write_run_file(run_dir: Path, info: Mapping[str, object]) -> None:
    """Write run.json; values JSON does not know (a path, say) are written as their text.

    Raises:
        OSError: It cannot be written.
    """
    said = json.loads(json.dumps(info, default=str))
    # The checksum comes first and the name after it: what tears out one and more than that tears out both.
    text = json.dumps({"checksum": checksum_of(said), **said}, indent=2, ensure_ascii=False)
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
    except OSError as error:
        raise _unreadable(path, error) from error
    if stat.S_ISLNK(status.st_mode):
        raise refused_link(path)
    return dict(_read(path, status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=256)
def _read(path: Path, inode: int, mtime_ns: int, size: int) -> dict[str, object]:
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
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
    if checksum != checksum_of(info) and (checksum is not None or "run" not in info):
        raise StoreError(
            f"{path} is broken (its checksum differs, so it has changed since it was written); restore it, or delete "
            "its checksum if the change is yours."
        )
    return info


def checksum_of(info: Mapping[str, object]) -> str:
    """Return the checksum of what run.json says, however it is laid out."""
    return f"{crc32(json.dumps(info, sort_keys=True, default=str).encode()):08x}"


def _unreadable(path: Path, error: Exception) -> StoreError:
    why = getattr(error, "strerror", None) or str(error)
    return StoreError(f"{path} cannot be read ({why}); restore it, or delete the run and write it again.")


def git_state() -> dict[str, object] | None:
    """Return commit and uncommitted diff of the repository around the working directory, or None outside of one.

    The diff is cut after a megabyte, and `diff_truncated` says so.
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    diff = _git("diff", "--no-ext-diff", "--no-textconv", "HEAD") or b""
    return {
        "commit": commit.decode().strip(),
        "diff": diff[:MAX_DIFF_BYTES].decode("utf-8", errors="replace"),
        "diff_truncated": len(diff) > MAX_DIFF_BYTES,
    }


def _git(*arguments: str) -> bytes | None:
    """Return what git prints; None where it fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # two runs that start together must not wait for each other
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, env=environment, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
