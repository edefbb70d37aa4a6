"""Running a study: the cells that are missing, then tables, figures, page and index."""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.estimators.spec import AUTO, LEAST_RIDGE, RIDGES
from otb_analysis.store import committed_studies
from otb_analysis.store.studies import NOT_RUN
from otb_analysis.training.runtime import Bar, silent
from studies.lib import formats
from studies.lib.record import (
    COST,
    DEFAULTS,
    Cell,
    CellCache,
    Finished,
    Rows,
    Study,
    committed_cells,
    distinct,
    forget_peak_memory,
    joined_tables,
    load_study,
    machine_words,
    minutes_words,
    peak_memory_mib,
    read_tables,
    select,
    write_tables,
)

UNKNOWN = "not recorded"
TEMPLATE, INDEX = "README.md.j2", "index.md.j2"
OPEN_ROWS = 10
"""Most rows of the one table of a page that is not folded."""
OPEN = "<!-- open -->\n"
"""What a template writes above that table where it is not the first of few rows."""
OUTDATED = "None: the answer that was written here no longer holds in the tables. Read the numbers, and write another."
"""What a template says in place of its verdict where the tables do not bear it out."""
CACHE = Path("runs") / "studies"


def default_options() -> dict[str, str]:
    """Return today's defaults of every estimator with options, as in `tail = own_return; decay = 0.9`."""
    ridges = ", ".join([*(f"{ridge:g} below {most} prompts" for most, ridge in RIDGES), f"then {LEAST_RIDGE:g}"])
    defaults = {}
    for name, spec in ESTIMATORS.items():
        values = {key: " ".join(x) if isinstance(x, tuple) else x for key, x in vars(spec.options()).items()}
        defaults[name] = "; ".join(f"{key} = {ridges if x == AUTO else x}" for key, x in values.items())
    return {name: words for name, words in defaults.items() if words}


def named_estimators(facts: Any) -> list[str]:
    """Return the estimators with options that a cell's settings or a table's rows name, also within a portfolio."""
    words = set(re.findall(r"\w+", json.dumps(facts, default=str)))
    return [name for name in default_options() if name in words]


def defaults_table(cells: Sequence[Cell], results: Sequence[Finished]) -> Rows:
    """Return which defaults the estimators that cells name had when the cells' tables were measured."""
    uses = dict[tuple[str, str], dict[str, None]]()
    for cell, one in zip(cells, results, strict=True):
        for name in named_estimators([cell.settings, one.tables]):
            tables = uses.setdefault((name, one.defaults.get(name, UNKNOWN)), {})
            tables |= dict.fromkeys(one.tables)
    return [{"estimator": name, "defaults": then, "tables": " ".join(of)} for (name, then), of in uses.items() if of]


def outdated_defaults(rows: Rows) -> Rows:
    """Return the rows of `recorded` whose defaults are not today's, with what differs `then` and `today`."""
    today, out = default_options(), list[dict[str, str]]()
    for row in rows:
        then, now = (x.split("; ") for x in (row["defaults"], today.get(row["estimator"], "no such estimator")))
        if then != now:
            differ = {"then": [o for o in then if o not in now], "today": [o for o in now if o not in then]}
            out.append(dict(row) | {when: "; ".join(which) for when, which in differ.items()})
    return out


def study_page(
    folder: Path, study: Study, tables: Mapping[str, Rows], quick: bool = False
) -> tuple[str, Mapping[str, str]]:
    """Return the README of a study, and its figures as SVG text by file name.

    `README.md.j2` of the folder fills the blocks `verdict` and `page` of `study.md.j2`. It sees the tables and the
    study's `names` and `numbers`. A quick page leaves the verdict out, which was written for the full setting.

    Raises:
        InputError: The template is missing.
    """
    if not (folder / TEMPLATE).is_file():
        raise InputError(f"{folder} has no {TEMPLATE}; write the page of the study there.")
    figures = study.figures(tables)
    cells = () if quick else (*study.cells, *study.later)  # what the tables were made without is named
    facts = {"study": study, "name": folder.name, "tables": tables, "figures": figures, "quick": quick}
    facts |= {"missing": [cell.name for cell in cells if not select(tables[COST], cell=cell.name)]}
    facts |= {"aged": outdated_defaults(tables.get(DEFAULTS, ())), **tables, **study.numbers(tables)}
    page = _environment(folder).get_template(TEMPLATE).render(dict(study.names) | facts)
    return _folded(re.sub(r"\n{3,}", "\n\n", page).strip() + "\n"), figures


def _folded(page: str) -> str:
    """Return a page in which one table is open, the marked one or the first of few rows, and all others are folded."""
    opened = OPEN in page

    def fold(table: re.Match[str]) -> str:
        nonlocal opened
        mark, text = table[1], table[2]
        rows = text.count("\n") - 2  # without its head
        if mark or (rows <= OPEN_ROWS and not opened):
            opened = True
            return text
        return f"<details markdown><summary>Table of {rows} rows</summary>\n\n{text}\n</details>\n"

    return re.sub(rf"({OPEN})?((?:^\|.*\n)+)", fold, page, flags=re.MULTILINE)


def index_page(studies: Path) -> str:
    """Return `studies/README.md`: question, verdict, command and cost of every study; of one not yet run, no verdict.

    Each row is as the study's page has it, so that a study whose tables and page part leaves the others be.
    """
    rows = []
    for one in committed_studies(studies):
        tables, run = read_tables(one.folder / "results"), one.state != NOT_RUN
        if tables and COST not in tables:
            raise InputError(f"{one.folder}/results has no table {COST}.csv; run {one.command} again.")
        question = one.question if run else load_study(one.folder).question
        rows.append((one, question, minutes_words(tables[COST]) if tables and run else "–"))
    return _environment(studies).get_template(INDEX).render(rows=rows, NOT_RUN=NOT_RUN)


class _Environment(Environment):
    """Templates in which `row.update` is the column of that name, not the method of a dict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a column, or what Jinja finds."""
        return obj[attribute] if isinstance(obj, dict) and attribute in obj else super().getattr(obj, attribute)


def _environment(folder: Path) -> Environment:
    """Return what renders the templates of a folder and those beside this file; an unknown name is an error."""
    environment = _Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    names = ("number", "interval", "percent", "span", "median", "column", "mean")
    environment.filters |= {name: getattr(formats, name) for name in names}
    environment.filters |= {"where": select, "distinct": distinct, "minutes": minutes_words}
    environment.filters |= {"thousands": "{:,}".format, "line": lambda text: " ".join(text.split())}
    environment.tests |= {name: getattr(formats, name) for name in ("above", "below", "spanning")}
    environment.globals |= {name: getattr(formats, name) for name in ("grid", "heads", "find")} | {"outdated": OUTDATED}
    return environment


@dataclass(frozen=True)
class Setting:
    """How a study is run."""

    quick: bool = False  # At reduced constants, into `out` or a temporary directory, and from the beginning
    out: Path | None = None  # Where page and results go instead of the study's own folder; `NN_slug` is added
    only: Sequence[str] = ()  # Names of the cells to measure; the pages are written once no cell is missing
    render: bool = False  # Measure nothing: make pages and figures from the tables there are
    cache: Path = CACHE  # Where finished cells of the full setting are kept


def run_study(folder: Path, setting: Setting, bar: Bar = silent) -> Path | None:
    """Run the study of a folder and return where its page went, or None while cells of `Study.cells` are missing.

    Raises:
        InputError: A cell that was asked for does not exist, or there are no tables to render.
        StoreError: The disk refuses; finished cells are kept.
    """
    study, target = load_study(folder), folder
    if setting.out is not None or setting.quick:
        target = (setting.out or Path(tempfile.mkdtemp(prefix="otb-study-"))) / folder.name
    if not setting.render:
        cells = study.quick if setting.quick else (*study.cells, *study.later)
        if setting.quick:
            cache = CellCache(target / "cache")
            shutil.rmtree(cache.path, ignore_errors=True)
        else:
            committed = dict[tuple[str, str], Finished]()
            with suppress(StoreError):  # what cannot be read is measured again
                committed = committed_cells(read_tables(folder / "results"))
            cache = CellCache(setting.cache / folder.name, committed)
        finished = _measured(study, cells, cache, setting.only, bar)
        names, results = [cell.name for cell, _ in finished], [one for _, one in finished]
        if any(cell.name not in names for cell in (study.quick if setting.quick else study.cells)):
            return None
        known = defaults_table([cell for cell, _ in finished], results)
        made = joined_tables(results) | {COST: [one.cost(cell) for cell, one in finished]}
        write_tables(target / "results", made | ({DEFAULTS: known} if known else {}))
    tables = read_tables(target / "results")
    if COST not in tables:
        raise InputError(f"{target} has no result tables; run otb study {folder.name} first.")
    page, figures = study_page(folder, study, tables, setting.quick)
    try:
        for name, picture in figures.items():
            (target / "results" / name).write_text(picture, encoding="utf-8")
        (target / "README.md").write_text(page, encoding="utf-8")
        if target == folder:
            (folder.parent / "README.md").write_text(index_page(folder.parent), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write the page to {target} ({error.strerror}); pass another --out.") from error
    return target


def _measured(
    study: Study, cells: Sequence[Cell], cache: CellCache, only: Sequence[str], bar: Bar
) -> list[tuple[Cell, Finished]]:
    """Measure the missing cells that were asked for; return all finished ones, in order."""
    names = [cell.name for cell in cells]
    for name in only:
        if name not in names:
            raise InputError(f"cell {name!r} does not exist; {nearest(name, names)}")
    wanted, again, known = set(only or names), set[str](), -1
    while len(again) > known:
        known = len(again)
        for cell in cells:
            rests = not cache.file(cell).exists() and any(other.name in again for other in cell.after)
            if cell.name in wanted and (rests or cache.load(cell) is None):
                again.add(cell.name)
            if cell.name in again:  # what a cell left to others is in no table, so those who need it measure it again
                again |= {other.name for other in cell.after if not cache.file(other).exists() and cache.load(other)}
    for number, cell in enumerate(cells):
        if cell.name in again:
            bar(number, len(cells), f"{cell.name}: starting")
            earlier = {other.name: cache.load(other) for other in cell.after}
            if absent := [name for name, one in earlier.items() if one is None]:
                raise InputError(f"cell {cell.name!r} comes after {', '.join(absent)}; measure those first.")
            given = joined_tables([one for one in earlier.values() if one is not None])
            work = cache.work(cell)  # measured from its beginning, so that the minutes are those of all of it
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True, exist_ok=True)
            forget_peak_memory()
            torch.set_num_threads(study.threads)
            clock, processor = perf_counter(), process_time()
            tables = study.measure(replace(cell, given=given), work, bar)
            took = (perf_counter() - clock) / 60, peak_memory_mib(), machine_words(), (process_time() - processor) / 60
            cache.keep(cell, Finished(tables, *took, default_options()))
        bar(number + 1, len(cells), cell.name)
    return [(cell, finished) for cell in cells if (finished := cache.load(cell)) is not None]
