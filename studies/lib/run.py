"""Running a study: the cells that are missing, then tables, figures, page and index."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time

import torch

from otb_analysis.errors import InputError, StoreError, nearest
from otb_analysis.training.runtime.progress import Bar, silent
from studies.lib.cache import (
    COST,
    CellCache,
    Finished,
    forget_peak_memory,
    joined_tables,
    machine_words,
    peak_memory_mib,
)
from studies.lib.defaults import DEFAULTS, default_options, defaults_table
from studies.lib.record import Cell, Study, load_study
from studies.lib.report import index_page, study_page
from studies.lib.results import read_tables, write_tables

CACHE = Path("runs") / "studies"


@dataclass(frozen=True)
class Setting:
    """How a study is run."""

    quick: bool = False  # At reduced constants, into `out` or a temporary directory, and from the beginning
    out: Path | None = None  # Where page and results go instead of the study's own folder; `NN_slug` is added
    only: Sequence[str] = ()  # Names of the cells to measure; the pages are written once no cell is missing
    render: bool = False  # Measure nothing: make pages and figures from the tables there are
    cache: Path = CACHE  # Where finished cells of the full setting are kept


def run_study(folder: Path, setting: Setting, bar: Bar = silent) -> Path | None:
    """Run the study of a folder and return where its page went, or None while cells are still missing.

    Raises:
        InputError: A cell that was asked for does not exist, or there are no tables to render.
        StoreError: The disk refuses; finished cells are kept.
    """
    study = load_study(folder)
    target = _target(folder, setting)
    if not setting.render:
        cells = study.quick if setting.quick else study.cells
        cache = CellCache(target / "cache" if setting.quick else setting.cache / folder.name)
        if setting.quick:
            shutil.rmtree(cache.path, ignore_errors=True)
        results = _measured(study, cells, cache, setting.only, bar)
        if len(results) < len(cells):
            return None
        cost = [one.cost(cell.name) for cell, one in zip(cells, results, strict=True)]
        known = defaults_table(cells, results)
        write_tables(target / "results", joined_tables(results) | {COST: cost} | ({DEFAULTS: known} if known else {}))
    _write_pages(folder, study, target, setting.quick)
    if target == folder:
        _write(folder.parent / "README.md", index_page(folder.parent))
    return target


def _write_pages(folder: Path, study: Study, target: Path, quick: bool) -> None:
    """Write README and figures of a study from the tables in `target`, and beside them."""
    tables = read_tables(target / "results")
    if COST not in tables:
        raise InputError(f"{target} has no result tables; run otb study {folder.name} first.")
    page, figures = study_page(folder, study, tables, quick)
    for name, svg in figures.items():
        _write(target / "results" / name, svg)
    _write(target / "README.md", page)


def _measured(study: Study, cells: Sequence[Cell], cache: CellCache, only: Sequence[str], bar: Bar) -> list[Finished]:
    """Measure the missing cells that were asked for; return all finished ones, in order."""
    names = [cell.name for cell in cells]
    for name in only:
        if name not in names:
            raise InputError(f"cell {name!r} does not exist; {nearest(name, names)}")
    for number, cell in enumerate(cells):
        if (not only or cell.name in only) and cache.load(cell) is None:
            bar(number, len(cells), f"{cell.name}: starting")
            cache.keep_arrays(cell, _finish(study, _with_given(cell, cache), cache.work(cell), bar))
        bar(number + 1, len(cells), cell.name)
    return [finished for cell in cells if (finished := cache.load(cell)) is not None]


def _with_given(cell: Cell, cache: CellCache) -> Cell:
    """Fill in the tables of the cells that a cell comes after."""
    earlier = {other.name: cache.load(other) for other in cell.after}
    missing = [name for name, finished in earlier.items() if finished is None]
    if missing:
        raise InputError(f"cell {cell.name!r} comes after {', '.join(missing)}; measure those first.")
    return replace(cell, given=joined_tables([finished for finished in earlier.values() if finished is not None]))


def _finish(study: Study, cell: Cell, work: Path, bar: Bar) -> Finished:
    """Measure a cell from its beginning, so that the minutes are those of all of it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    forget_peak_memory()
    torch.set_num_threads(1)  # models as small as those of studies gain nothing from a second thread
    clock, processor = perf_counter(), process_time()
    tables = study.measure(cell, work, bar)
    minutes, processor_minutes = (perf_counter() - clock) / 60, (process_time() - processor) / 60
    return Finished(tables, minutes, peak_memory_mib(), machine_words(), processor_minutes, default_options())


def _target(folder: Path, setting: Setting) -> Path:
    if setting.out is not None:
        return setting.out / folder.name
    return Path(tempfile.mkdtemp(prefix="otb-study-")) / folder.name if setting.quick else folder


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path} ({error.strerror}); pass another --out.") from error
