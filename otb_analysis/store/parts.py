"""Which files of a run a reader may see, and whether one of them is missing.

A part holds one step of one table from one rank. The `steps` part is written last, so the steps that have one are the
complete ones. Readers skip all other parts, and files whose names are not those of parts (a temporary file starts with
a dot). A compacted run also has files that hold many steps: `compacted` in run.json lists them, and for the steps named
there it counts alone. It is read after the folders are listed: a part that compaction removes later is in the list, and
one that it removed before is named in run.json.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from operator import attrgetter
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.checksum import Sealed, Signature, sealed
from otb_analysis.store.digest import said
from otb_analysis.store.folder import look_again, looked_earlier, loose_parts
from otb_analysis.store.layout import MERGED, RUN_FILE, part_path
from otb_analysis.store.merged import Part, merged_parts
from otb_analysis.store.runfile import read_run_file


class _OfARun(Protocol):
    path: Path


S = TypeVar("S", bound=_OfARun)
P = ParamSpec("P")
R = TypeVar("R")


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
    completing = loose["steps"]
    if held or asked is not None:
        completing = [p for p in completing if p.step not in held and (asked is None or p.step in asked)]
    visible: dict[str, list[Part]] = {}
    for table in tables:
        files = [part if asked is None else part.only(asked) for part in merged.get(table, ())]
        files = [replace(part, seen=signature(part)[1:]) for part in files if part.steps]
        there = completing if table == "steps" else _belonging(run_dir, table, loose[table], completing, asked is None)
        visible[table] = [*files, *there]
    return visible


def again_if_changed(read: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Read again what failed while files were exchanged: by compaction, or by a run that went back some steps."""

    @wraps(read)
    def reading(store: S, *args: P.args, **options: P.kwargs) -> R:
        for _ in range(5):
            before, earlier = _state(store.path), looked_earlier()
            try:
                return read(store, *args, **options)
            except StoreError:
                if not earlier and _state(store.path) == before:
                    raise
                look_again()
        return read(store, *args, **options)

    return reading


def _state(run_dir: Path) -> list[int]:
    """Return what changes when files of a run are exchanged."""
    return [path.stat().st_mtime_ns for path in (run_dir / RUN_FILE, run_dir / "steps") if path.exists()]


def signature(part: Part, *, now: bool = False) -> Signature:
    """Return what changes when a part is written again, as it was when its folder was looked at, or as it is now.

    Raises:
        StoreError: It is gone.
    """
    if part.seen is not None and not now:
        return part.path, *part.seen
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
        found = sealed(signature(part, now=True))
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


def _belonging(run_dir: Path, table: str, loose: list[Part], completing: list[Part], whole: bool) -> list[Part]:
    """Return the parts of complete steps, each with the checksum under which its step names it.

    Args:
        whole: These are all complete steps, so what is found is kept: the next look goes on after it.
    """
    place = _found_before(run_dir / table)
    before, kept = place[0], _Found()  # another thread may put another there
    if whole and before.begins(loose, completing):
        kept = before
    elif not whole:
        asked = {step.step for step in completing}
        loose = [part for part in loose if part.step in asked]
    new, later = completing[len(kept.completing) :], loose[len(kept.loose) :]
    if not new:
        return kept.parts
    found, there = dict[int, Sealed](), {part.path.name for part in later}
    for step, found[step.step] in zip(new, _said(run_dir, "steps", new), strict=True):
        for name in found[step.step].named_parts(table).keys() - there:
            path = run_dir / table / name
            raise StoreError(
                f"{path} is missing, though step {step.step} was written with it; restore it, "
                f"or {without(Part(step.step, 0, path))}."
            )
    parts = [*kept.parts]
    for part in later:
        if (step := found.get(part.step)) is not None:
            name = part.path.name
            checksum, recorded = step.named_parts(table).get(name, ""), step.held_by(table).get(name, "")
            parts.append(replace(part, checksum=checksum, recorded=recorded))
    if whole:
        end = bisect_right(loose, new[-1].step, key=attrgetter("step"))
        place[0] = _Found(completing, loose[:end], parts)
    return parts


@dataclass(frozen=True)
class _Found:
    """The complete steps of a run, a table's parts up to the last of them, and which of those belong to the steps."""

    completing: list[Part] = field(default_factory=list)
    loose: list[Part] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def begins(self, loose: list[Part], completing: list[Part]) -> bool:
        """Return whether these begin with the same files; comparing the same objects takes no time."""
        if completing[: len(self.completing)] != self.completing or loose[: len(self.loose)] != self.loose:
            return False
        later = loose[len(self.loose) :]
        return not (later and self.completing) or later[0].step > self.completing[-1].step


@lru_cache(maxsize=1_000)
def _found_before(folder: Path) -> list[_Found]:
    """Return a place for what was found in a folder when all its parts were last asked for."""
    return [_Found()]


def _said(run_dir: Path, table: str, parts: Sequence[Part]) -> list[Sealed]:
    """Return what parts say of themselves; most are not opened for it."""
    try:
        return said(run_dir, table, [signature(part) for part in parts])
    except OSError:
        return [checked(part) for part in parts]  # the one that is broken says so
