"""What run.json lists of a compacted run: files of many steps, each checked before anything is read by its name.

Someone may have written the list by hand. So a name that is a path, steps that its file cannot hold, or a step that two
files hold are refused.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store.layout import MERGED, RUN_FILE, merged_path
from otb_analysis.store.runfile import read_run_file

COMPACTED = "compacted"
"""The key in run.json: table → its files, each with name, checksum and the steps it holds as ranges."""

MOST_STEPS = 1_000_000
"""Steps of a table beyond which a list is wrong: each takes memory before a row is read."""

_CHECKSUM = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, order=True)
class Part:
    """One Parquet file of a table; made by listing a run, read by the readers."""

    step: int  # The step whose rows it holds, the first one where it holds several
    rank: int  # The process that wrote it
    path: Path  # Where it lies
    checksum: str = ""  # The one it must carry; empty where nobody says
    steps: tuple[int, ...] = ()  # Those to be read
    whole: bool = True  # False when the file holds other steps, too
    recorded: str = ""  # Its columns that hold any value, with commas between; empty where nobody says
    seen: tuple[int, int] | None = None  # Time in nanoseconds and size when its folder was looked at; None: not seen

    def __hash__(self) -> int:  # most of the time of a query of thousands would go into hashing paths
        return hash((self.step, self.rank, self.checksum, self.seen))

    def only(self, steps: Collection[int]) -> "Part":
        """Return the same file for fewer steps."""
        kept = tuple(step for step in self.steps if step in steps)
        return self if kept == self.steps else replace(self, steps=kept, whole=False)


def merged_parts(run_dir: Path, info: Mapping[str, Any]) -> dict[str, list[Part]]:
    """Return the files of several steps that run.json lists, by table.

    Raises:
        StoreError: It lists what is no file of this run, or steps that a file cannot hold.
    """
    try:
        return {table: list(_merged(run_dir, table, files)) for table, files in info.get(COMPACTED, {}).items()}
    except _Unfit as error:
        why = str(error)
    except (AttributeError, KeyError, TypeError, ValueError):
        why = "a file needs a name, a checksum, and steps as pairs"
    raise StoreError(
        f"{run_dir / RUN_FILE} lists under {COMPACTED!r} what is no part of this run ({why}); restore it from a "
        "copy of the run."
    )


def last_merged_step(run_dir: Path) -> int:
    """Return the last step that lies in a merged file, -1 where none does."""
    files = merged_parts(run_dir, read_run_file(run_dir)).get("steps", ())
    return max((part.steps[-1] for part in files), default=-1)


def merged_before(info: Mapping[str, Any], step: int) -> dict[str, list[dict[str, object]]]:
    """Return what run.json lists without the steps from `step` on; a file of later ones only is left out."""
    kept: dict[str, list[dict[str, object]]] = {}
    for table, files in info[COMPACTED].items():
        cut = [one | {"steps": [[a, min(b, step - 1)] for a, b in one["steps"] if a < step]} for one in files]
        kept[table] = [one for one in cut if one["steps"]]
    return kept


def ranges(steps: Sequence[int]) -> list[list[int]]:
    """Return ordered steps as first and last ones of runs without a gap."""
    found: list[list[int]] = []
    for step in steps:
        if found and found[-1][1] == step - 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return found


class _Unfit(Exception):
    """What is wrong with an entry of the list."""


def _merged(run_dir: Path, table: str, files: Iterable[Mapping[str, Any]]) -> Iterator[Part]:
    if table not in TABLES:
        raise _Unfit(f"there is no table {table!r:.80}")
    end, n_steps = -1, 0
    for one in files:
        name, checksum, held = one["file"], one["checksum"], one["steps"]
        match = MERGED.fullmatch(name)
        if match is None:
            raise _Unfit(f"{name!r:.80} is no name of a file of {table}")
        if not _CHECKSUM.fullmatch(checksum):
            raise _Unfit(f"{checksum!r:.80} is no checksum of {name}")
        lowest, highest = int(match[1]), int(match[2])
        for first, last in held:
            whole = type(first) is type(last) is int
            if not whole or not max(end + 1, lowest) <= first <= last <= highest:
                raise _Unfit(f"{table}/{name} cannot hold steps {first!r:.20} to {last!r:.20} here")
            end, n_steps = last, n_steps + last - first + 1
        if not held or n_steps > MOST_STEPS:
            raise _Unfit(f"{table} cannot have {n_steps} steps up to {name}")
        steps = tuple(step for first, last in held for step in range(first, last + 1))
        path = run_dir / table / name
        yield Part(steps[0], 0, path, checksum, steps, path == merged_path(run_dir, table, steps[0], steps[-1]))
