"""`otb query` and `otb tokens`: a SELECT over a run, and one prompt's tokens, as tables or as JSON."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from otb_analysis.commands.inspect import print_json, run_path
from otb_analysis.commands.options import parsed
from otb_analysis.commands.screen import print_all, shown
from otb_analysis.errors import STOPS, InputError
from otb_analysis.phases import phase

FAILED = 1
"""Exit status of a query that cannot be answered."""


@dataclass(frozen=True)
class QueryConfig:
    """Answer one read-only SELECT over a run's tables, with the dashboard's limits of time, memory and rows.

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
            from otb_analysis.report.asked import answer_parts, answer_record, columns_parts, rollouts_record
            from otb_analysis.report.document import printed
            from otb_analysis.store import ASKED_MEMORY, RunStore
            from otb_analysis.store.asked import asked_sql

            store = RunStore(run_path(config.root, config.run), memory_limit=ASKED_MEMORY)
            table = asked_sql(store.path, config.sql) if config.sql else None
            record: object = None
            parts: list[Table | str] = []
            if config.json:
                record = rollouts_record(store) if table is None else answer_record(store.path.name, table)
            else:
                parts = printed(columns_parts() if table is None else answer_parts(table))
    except STOPS as error:
        sys.stderr.write(f"otb: {error}\n")
        return FAILED
    print_json(record) if config.json else print_all(parts)
    return 0


@dataclass(frozen=True)
class TokensConfig:
    """Print one prompt's tokens under an estimator, and with --t the formula of its baseline at a token."""

    run: Annotated[str, tyro.conf.Positional] = ""
    """Name or path of a run."""
    step: int | None = None
    """A step; by default the last one with exact norms, or the last one."""
    prompt: int | None = None
    """Number of the prompt within the step; by default that of the rollout, or the one with most of the gradient."""
    rollout: int | None = None
    """Only this rollout, by its number within the step."""
    t: int | None = None
    """A token of that rollout, whose formula is written out."""
    estimator: str = ""
    """Whose baseline and advantage: rloo, "otb (exact)", "otb (proxy)"; by default the one that trained."""
    against: str = ""
    """Another estimator; its advantage is subtracted in the column advantage_difference."""
    json: bool = False
    """Print one JSON object instead, for scripts."""
    root: Path = Path("runs")
    """Directory that holds the runs."""


def tokens_command(words: Sequence[str]) -> None:
    """Show tokens."""
    config = parsed(TokensConfig, "tokens", words, TokensConfig())
    if not config.run:
        raise InputError("otb tokens needs a run; pass its name, as in otb tokens demo-otb-s0.")
    with shown(), phase("reading the tokens"):
        from otb_analysis.answers.prompt import prompt_view, token_record, tokens_record
        from otb_analysis.report.asked import answer_parts
        from otb_analysis.report.document import printed
        from otb_analysis.report.records import following
        from otb_analysis.store import RunStore

        store = RunStore(run_path(config.root, config.run))
        view = prompt_view(store, config.step, config.prompt, config.estimator, config.against, config.rollout)
        record = following("tokens", tokens_record(view, config.rollout, config.t)) if config.json else None
        alarm = [view.alarm] if view.alarm else []
        parts = [] if config.json else [*alarm, *printed(answer_parts(view.rollout_tokens(config.rollout)))]
        if config.t is not None and not config.json:
            token = token_record(view, config.rollout, config.t)
            lines = token["numbers"] | ((token["formula"] or {}).get("lines") or {"formula": token["not_known"]})
            parts.append("\n".join(f"{name}: {text}" for name, text in lines.items() if text))
    print_json(record) if config.json else print_all(parts)
