"""The README of a study and the index of all, both made from committed tables and from nothing else."""

from collections.abc import Mapping
from pathlib import Path

from otb_analysis.errors import InputError
from otb_analysis.store import CommittedStudy, committed_studies
from otb_analysis.store.studies import NOT_RUN
from otb_analysis.study.folder import load_study
from otb_analysis.study.record import Findings, Rows, Study
from otb_analysis.study.results import COST, distinct, read_tables

INDEX = """\
# Studies

Each study asks one question about baselines and answers it with committed numbers. You repeat it with its command:

- If it is stopped, the same command continues it. Finished parts are kept in `runs/studies/`.
- `--quick` runs a small version in less than two minutes, into a temporary folder.
- `--render` writes pages and figures again from the committed tables.

Settings are at the top of `NN_slug/study.py`, tables in `NN_slug/results/`. What did not work is in [LOG.md](LOG.md).
The words are explained in the [glossary](../docs/glossary.md).

| study | question | verdict | command | cost |
|---|---|---|---|---|
{rows}

Results without sampling noise, from tiny policies whose every answer is enumerated:
[docs/catalogue.md](../docs/catalogue.md). How often the intervals hold: [docs/coverage.md](../docs/coverage.md). The
demo's table: [docs/results/demo.txt](../docs/results/demo.txt).
"""


def study_page(folder: Path, study: Study, tables: Mapping[str, Rows]) -> tuple[str, Findings]:
    """Return the README of a study, and what it found.

    Args:
        folder: studies/NN_slug; its name heads the page and stands in the command.
        study: The study.
        tables: Its result tables.
    """
    found = study.report(tables)
    number = folder.name.split("_", 1)[0]
    parts = [
        f"# {number} · {study.title}",
        f"**Question.** {study.question}",
        f"**Verdict.** {found.verdict}",
        *(f"![{Path(name).stem}](results/{name})" for name in found.figures),
        found.body.strip(),
        f"## How it was made\n\n```\n{command(folder)}\n```",
        f"{cost_words(tables[COST])} Tables: {_links(tables)}. This page is made of them; it is not edited by hand.",
    ]
    return "\n\n".join(parts) + "\n", found


def index_page(studies: Path) -> str:
    """Return `studies/README.md`: question, verdict, command and cost of every study; of one not yet run, no verdict.

    Args:
        studies: The folder that holds them.
    """
    rows = [_index_row(one) for one in committed_studies(studies)]
    return INDEX.format(rows="\n".join(rows))


def command(folder: Path) -> str:
    """Return what runs a study.

    Args:
        folder: studies/NN_slug.
    """
    return f"otb study {folder.name}"


def cost_words(cost: Rows) -> str:
    """Return the cost of a study in one sentence: minutes, cells, the most memory, machines.

    Args:
        cost: One row per cell.
    """
    known = [row["peak_mib"] for row in cost if row["peak_mib"] is not None]
    peak = f"at most {max(known):,.0f} MiB of memory, " if known else ""
    return f"{minutes_words(cost)} in {len(cost)} cells, {peak}each on {' and '.join(distinct(cost, 'machine'))}."


def minutes_words(cost: Rows) -> str:
    """Return the minutes of all cells together, as in `83 min of processor time (120 min by the clock)`.

    Args:
        cost: One row per cell; where one has no processor time, only the clock is told.
    """
    clock = _minutes(sum(row["minutes"] for row in cost))
    processor = [row["processor_minutes"] for row in cost if row.get("processor_minutes") is not None]
    if len(processor) < len(cost):
        return clock
    return f"{_minutes(sum(processor))} of processor time ({clock} by the clock)"


def _minutes(minutes: float) -> str:
    return f"{minutes:.1f} min" if minutes < 10 else f"{minutes:.0f} min"


def _index_row(one: CommittedStudy) -> str:
    """A study's row as its page has it, so that a study whose tables and page part leaves the others be."""
    name = one.folder.name
    if one.state == NOT_RUN:
        return f"| [{name}]({name}/study.py) | {load_study(one.folder).question} | not run yet | `{one.command}` | – |"
    cost = _results(one.folder).get(COST, ())
    minutes = minutes_words(cost) if cost else "–"
    return f"| [{name}]({name}/README.md) | {one.question} | {one.verdict} | `{one.command}` | {minutes} |"


def _results(folder: Path) -> dict[str, Rows]:
    tables = read_tables(folder / "results")
    if tables and COST not in tables:
        raise InputError(f"{folder}/results has no table {COST}.csv; run {command(folder)} again.")
    return tables


def _links(tables: Mapping[str, Rows]) -> str:
    return ", ".join(f"[{name}.csv](results/{name}.csv)" for name in sorted(tables))
