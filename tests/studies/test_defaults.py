"""Committed tables are no older than the defaults of the estimators that they name, or their page says so."""

from pathlib import Path

import pytest

from studies.lib import run
from studies.lib.record import Cell, Finished, read_tables, study_folders
from studies.lib.run import DEFAULTS, UNKNOWN, default_options, defaults_table, named_estimators, outdated_defaults

STUDIES = Path(__file__).parent.parent.parent / "studies"
WITH_RESULTS = [folder for folder in study_folders(STUDIES) if (folder / "results").is_dir()]


def mark(row):
    """What a page says of an aged row, up to what has changed."""
    tables = ", ".join(f"`{name}`" for name in row["tables"].split())
    return f"The defaults of `{row['estimator']}` have changed since these tables were made: {tables}."


@pytest.mark.parametrize("folder", WITH_RESULTS, ids=lambda path: path.name)
def test_every_table_records_the_defaults_of_the_estimators_that_it_names(folder):
    tables = read_tables(folder / "results")
    known = {(name, row["estimator"]) for row in tables.get(DEFAULTS, ()) for name in row["tables"].split()}
    measured = {name: rows for name, rows in tables.items() if name not in ("cost", DEFAULTS)}
    asked = {(name, of) for name, rows in measured.items() for of in named_estimators(rows)}
    assert asked <= known


@pytest.mark.parametrize("folder", WITH_RESULTS, ids=lambda path: path.name)
def test_tables_older_than_a_default_are_called_outdated_on_their_page_and_no_others(folder):
    page = (folder / "README.md").read_text(encoding="utf-8")
    old = outdated_defaults(read_tables(folder / "results").get(DEFAULTS, ()))
    assert [row for row in old if mark(row) not in page] == []
    assert page.count("**Outdated.**") == len(old)


def test_a_changed_default_makes_committed_tables_outdated(monkeypatch):
    rows = read_tables(STUDIES / "04_group_size" / "results")[DEFAULTS]
    assert outdated_defaults(rows) == []
    monkeypatch.setattr(run, "LEAST_RIDGE", 0.5)
    (row,) = outdated_defaults(rows)
    assert row["estimator"] == "energy_regression" and {"curves", "sweep"} <= set(row["tables"].split())
    assert row["then"].endswith("then 0.1") and row["today"].endswith("then 0.5")


def test_an_option_that_is_new_makes_them_outdated_too():
    (row,) = outdated_defaults([{"estimator": "energy_ema", "defaults": "tail = own_return", "tables": "a"}])
    assert (row["then"], row["today"]) == ("", "decay = 0.9")


def test_what_is_recorded_are_the_defaults_of_the_day_on_which_a_cell_was_measured():
    cells = [Cell("a", {"arm": "0.5*otb+0.5*energy_ema"}), Cell("b", {"arm": "rloo"}), Cell("c", {"arm": "otb"})]
    then = [{"otb": "tail = zero", "energy_ema": "decay = 0.5"}, default_options(), {}]  # the last was kept before
    results = [Finished({"t": [{"x": 1}], "u": [{"x": 1}]}, 0, None, "here", 0, of) for of in then]
    assert defaults_table(cells, results) == [
        {"estimator": "otb", "defaults": "tail = zero", "tables": "t u"},
        {"estimator": "energy_ema", "defaults": "decay = 0.5", "tables": "t u"},
        {"estimator": "otb", "defaults": UNKNOWN, "tables": "t u"},
    ]
