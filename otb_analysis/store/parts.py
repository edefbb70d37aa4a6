"""Which files of a run a reader may see, and whether one of them is missing.

A part holds one step of one table from one rank. The `steps` part is written last, so the steps that have one are the
complete ones. Readers skip all other parts, and files whose names are not those of parts (a temporary file starts with
a dot). A compacted run also has files that hold many steps: `compacted` in run.json lists them, and for the steps named
there it counts alone. It is read after the folders are listed: a part that compaction removes later is in the list, and
one that it removed before is named in run.json.
"""

import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.checksum import Sealed, Signature, sealed
from otb_analysis.store.digest import said
from otb_analysis.store.layout import MERGED, PART, RUN_FILE, part_path, refused_link
from otb_analysis.store.merged import Part, merged_parts
from otb_analysis.store.runfile import read_run_file

SETTLED = 5_000_000_000
"""Nanoseconds after which the time of a folder tells whether it has changed since."""


class _OfARun(Protocol):
    path: Path


S = TypeVar("S", bound=_OfARun)
P = ParamSpec("P")
R = TypeVar("R")


def loose_parts(run_dir: Path, table: str) -> Sequence[Part]:
    """Return all parts of one step of a table, by step and rank, complete or not.

    Raises:
        StoreError: The folder cannot be listed, or is or holds a link.
    """
    folder = run_dir / table
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return []
    if stat.S_ISLNK(status.st_mode):
        raise refused_link(folder)
    changed = status.st_mtime_ns
    # A folder that changed a moment ago may change again without another time.
    return _listed(folder, changed) if time.time_ns() - changed > SETTLED else _listed.__wrapped__(folder, changed)


@lru_cache(maxsize=32)
def _listed(folder: Path, changed: int) -> Sequence[Part]:
    try:
        with os.scandir(folder) as entries:
            links = {entry.name: entry.is_symlink() for entry in entries}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder} cannot be listed ({error.strerror}); make it a readable folder.") from error
    linked = next((name for name in links if links[name] and name.endswith(".parquet")), None)
    if linked:
        raise refused_link(folder / linked)
    known = _known(folder)
    for name in links.keys() - known.keys():
        if m := PART.fullmatch(name):
            known[name] = Part(int(m[1]), int(m[2]), folder / name, steps=(int(m[1]),))
    return sorted((known[name] for name in links if name in known), key=lambda part: (part.step, part.rank))


@lru_cache(maxsize=128)
def _known(folder: Path) -> dict[str, Part]:
    """Return a folder's parts that were listed before, by name: making them takes ten times as long as listing."""
    return {}


def remove_unlisted(run_dir: Path) -> None:
    """Remove what a killed process left and no reader looks at.

    These are temporary files, merged files that run.json does not list, and parts of steps that a listed one holds.

    Raises:
        OSError: One cannot be removed.
    """
    merged = merged_parts(run_dir, read_run_file(run_dir))
    held = {step for part in merged.get("steps", ()) for step in part.steps}
    listed = {part.path for files in merged.values() for part in files}
    for path in run_dir.glob("*/.*.tmp"):
        if not path.parent.is_symlink():
            path.unlink(missing_ok=True)
    for table in TABLES:
        for path in (run_dir / table).glob("merged-*.parquet"):
            if MERGED.fullmatch(path.name) and path not in listed:
                path.unlink()
        for part in loose_parts(run_dir, table):
            if part.step in held:
                part.path.unlink(missing_ok=True)


def complete_steps(run_dir: Path) -> list[int]:
    """Return the steps that are complete, in order: those with a `steps` part, or in a merged file of `steps`."""
    return sorted({step for part in visible_parts(run_dir, ["steps"])["steps"] for step in part.steps})


def by_step(parts: Iterable[Part]) -> dict[int, list[Part]]:
    """Return the parts that hold each step; of a merged file, the same one asked for that step alone."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        for step in part.steps:
            alone = part.whole and len(part.steps) == 1
            found.setdefault(step, []).append(part if alone else replace(part, steps=(step,), whole=False))
    return found


def visible_parts(run_dir: Path, tables: Iterable[str], steps: Iterable[int] | None = None) -> dict[str, list[Part]]:
    """Return the parts a reader may see of each table, by step: those of the steps that are complete at this moment.

    The complete steps are looked up once, so that all tables of one answer show the same ones.

    Raises:
        StoreError: A folder cannot be listed, run.json or a `steps` part is broken, or a part of a step is missing.
    """
    tables = list(tables)
    # `steps` first: a part that belongs to one of them was there before.
    loose = {table: loose_parts(run_dir, table) for table in dict.fromkeys(("steps", *tables))}
    merged = merged_parts(run_dir, read_run_file(run_dir))
    held = {step for part in merged.get("steps", ()) for step in part.steps}
    asked = None if steps is None else {int(step) for step in steps}
    completing = [p for p in loose["steps"] if p.step not in held and (asked is None or p.step in asked)]
    visible: dict[str, list[Part]] = {}
    for table in tables:
        files = [part if asked is None else part.only(asked) for part in merged.get(table, ())]
        there = completing if table == "steps" else _belonging(run_dir, table, loose[table], completing)
        visible[table] = [part for part in files if part.steps] + there
    return visible


def again_if_changed(read: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Read again what failed while files were exchanged: by compaction, or by a run that went back some steps."""

    @wraps(read)
    def reading(store: S, *args: P.args, **options: P.kwargs) -> R:
        for _ in range(5):
            before = _state(store.path)
            try:
                return read(store, *args, **options)
            except StoreError:
                if _state(store.path) == before:
                    raise
        return read(store, *args, **options)

    return reading


def _state(run_dir: Path) -> list[int]:
    """Return what changes when files of a run are exchanged."""
    return [path.stat().st_mtime_ns for path in (run_dir / RUN_FILE, run_dir / "steps") if path.exists()]


def signature(part: Part) -> Signature:
    """Return what changes when a part is written again.

    Raises:
        StoreError: It is gone.
    """
    try:
        status = part.path.stat()
    except OSError as error:
        raise broken(part, error) from error
    return part.path, status.st_mtime_ns, status.st_size


def checked(part: Part) -> Sealed:
    """Return what a part says of itself, once all its bytes are right.

    Raises:
        StoreError: It is broken, or not the one that its step was written with.
    """
    try:
        found = sealed(signature(part))
    except OSError as error:
        raise broken(part, error) from error
    if part.checksum and found.checksum != part.checksum:
        raise broken(part, OSError("it is another file than its step was written with"))
    return found


def broken(part: Part, error: Exception) -> StoreError:
    """Return the sentence about a part that cannot be read."""
    why = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
    return StoreError(f"{part.path} is broken ({why}); {without(part)}, or write the run again.")


def without(part: Part) -> str:
    """Return how to read a run without a part."""
    if MERGED.fullmatch(part.path.name):
        return "restore it from a copy of the run"
    completing = part_path(part.path.parent.parent, "steps", part.step, 0)
    return f"delete {'it' if completing == part.path else completing} to read the run without step {part.step}"


def _belonging(run_dir: Path, table: str, loose: Sequence[Part], completing: Sequence[Part]) -> list[Part]:
    """Return the parts of complete steps, each with the checksum under which its step names it."""
    there, found = {part.path.name for part in loose}, dict[int, Sealed]()
    for step, found[step.step] in zip(completing, _said(run_dir, "steps", completing), strict=True):
        for name in found[step.step].named_parts(table).keys() - there:
            path = run_dir / table / name
            raise StoreError(
                f"{path} is missing, though step {step.step} was written with it; restore it, "
                f"or {without(Part(step.step, 0, path))}."
            )
    before = _described(run_dir / table)
    for part in loose:
        step = found.get(part.step)
        if step is not None and before.get(part.path, (None,))[0] is not step:
            name = part.path.name
            checksum, recorded = step.named_parts(table).get(name, ""), step.held_by(table).get(name, "")
            before[part.path] = step, replace(part, checksum=checksum, recorded=recorded)
    return [before[part.path][1] for part in loose if part.step in found]


@lru_cache(maxsize=128)
def _described(folder: Path) -> dict[Path, tuple[Sealed, Part]]:
    """Return what steps said of a folder's parts, and the parts with that."""
    return {}


def _said(run_dir: Path, table: str, parts: Sequence[Part]) -> list[Sealed]:
    """Return what parts say of themselves; most are not opened for it."""
    try:
        return said(run_dir, table, [signature(part) for part in parts])
    except OSError:
        return [checked(part) for part in parts]  # the one that is broken says so
