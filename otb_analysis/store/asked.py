"""A query that somebody typed, in a process of its own: DuckDB does not count the memory of values it computes.

`SELECT repeat('x', 1000000) FROM range(2048)` takes 7 GB under a limit of 256 MB, and nothing interrupts it.
"""

import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from otb_analysis.errors import STOPS, InputError, StoreError
from otb_analysis.store.query import ASKED_MEGABYTES, ASKED_MEMORY, ASKED_PROCESS, ASKED_ROWS, ASKED_SECONDS
from otb_analysis.store.reader import RunStore

STARTED = 20
"""Seconds in which the process may start and send its answer, beside those of the query."""


def asked_sql(run_dir: Path | str, query: str, seconds: float = ASKED_SECONDS) -> pd.DataFrame:
    """Return the answer to one SELECT over a run, as `RunStore.sql` does, within the bounds of `ASKED_…`.

    The answer holds 100,000 rows and 20 MB at most. The process has 2 GB for its data where the system can limit that.

    Raises:
        InputError: The query is not one SELECT, cannot be run, takes longer than allowed, or its answer is larger.
        StoreError: A part is broken or lacks a key column, or the answer needs more memory than allowed.
    """
    command = [sys.executable, "-m", __name__, str(run_dir), str(seconds)]
    try:
        done = subprocess.run(
            command, input=query.encode(errors="replace"), capture_output=True, timeout=seconds + STARTED,
            check=False,
        )  # fmt: skip
        answer = pickle.loads(done.stdout) if done.returncode == 0 else _too_large(run_dir)  # written by `_answer`
    except subprocess.TimeoutExpired:
        answer = InputError(
            f"the query on {run_dir} took longer than {seconds:g} s and was ended; ask for fewer steps or columns."
        )
    if isinstance(answer, pd.DataFrame):
        return answer
    raise answer


def _too_large(run_dir: Path | str) -> StoreError:
    return StoreError(
        f"the query on {run_dir} needs more memory than allowed; ask for fewer steps or columns, or for shorter texts."
    )


def _answer(run_dir: str, seconds: float, query: str) -> Any:
    try:
        store = RunStore(run_dir, memory_limit=ASKED_MEMORY)
        return store.sql(query, seconds=seconds, rows=ASKED_ROWS, megabytes=ASKED_MEGABYTES)
    except STOPS as error:
        return error
    except MemoryError:
        return _too_large(run_dir)


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError):  # Windows has no `resource`, macOS refuses the limit
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (ASKED_PROCESS, ASKED_PROCESS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _limit_memory()
    sys.stdout.buffer.write(pickle.dumps(_answer(sys.argv[1], float(sys.argv[2]), sys.stdin.buffer.read().decode())))
