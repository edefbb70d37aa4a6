"""`otb query`: one SELECT over a run, or what its page Rollouts begins with, as a table or as JSON."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from otb_analysis.commands.inspect import parsed, print_all, print_json, run_path
from otb_analysis.commands.watching import shown
from otb_analysis.errors import STOPS, InputError
from otb_analysis.phases import phase

FAILED = 1
"""Exit status of a query that cannot be answered."""


@dataclass(frozen=True)
class QueryConfig:
    """Answer one read-only SELECT over a run's tables, within the dashboard's bounds of time, memory and rows.

    Without a SELECT: the tables and their columns; with --json also the rewards by step and the first rollouts. Exit
    status 1: the query cannot be answered; one sentence on stderr says why.
    """

    run: Annotated[str, tyro.conf.Positional] = ""
    """Name or path of a run."""
    sql: Annotated[str, tyro.conf.Positional] = ""
    """One SELECT in DuckDB's SQL, as in: "SELECT step, reward_mean FROM steps"."""
    json: bool = False
    """Print one JSON object instead, for scripts."""
    root: Path = Path("runs")
    """Directory that holds the runs."""


def query_command(words: Sequence[str]) -> int:
    """Ask a run."""
    config = parsed(QueryConfig, "query", words, QueryConfig())
    if not config.run:
        raise InputError('otb query needs a run; pass its name, as in otb query demo-otb-s0 "SELECT * FROM steps".')
    try:
        with shown(), phase("asking the run"):
            parts, record = _answered(config)
    except STOPS as error:
        sys.stderr.write(f"otb: {error}\n")
        return FAILED
    print_json(record) if config.json else print_all(parts)
    return 0


def _answered(config: QueryConfig) -> tuple[Sequence[object], object]:
    """Return what the terminal shows, or the record for JSON."""
    from otb_analysis.report.asked import answer, answer_parts, answer_record, columns_tables, rollouts_record
    from otb_analysis.store import ASKED_MEMORY, RunStore

    store = RunStore(run_path(config.root, config.run), memory_limit=ASKED_MEMORY)
    if config.json:
        return [], answer_record(store, config.sql) if config.sql else rollouts_record(store)
    return answer_parts(answer(store, config.sql)) if config.sql else columns_tables(), None
