"""Runs written before the rooms were moved open, and say the same numbers.

Made by `otb train` on one layer of width 16: `levels` measures part of its groups exactly, draws tokens of others and
sketches the rest; `critic` trains `value` and measures everything. Models and checkpoints are left out.
`earlier_versions` holds a run for each set of columns there ever was, written by the code of that time.
"""

import json
import shutil
from pathlib import Path
from runpy import run_path

import pandas as pd
import pytest

from otb_analysis.schema import TABLES
from otb_analysis.statistics import pooled_statistics
from otb_analysis.store import RunStore, compact, runs_df

RUNS = Path(__file__).parent / "earlier_runs"
EXPECTED = json.loads((RUNS / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("run", sorted(EXPECTED))
@pytest.mark.parametrize("table", ["tokens_df", "rollouts_df", "steps_df"])
def test_columns_have_as_many_values_and_the_same_sums(run, table):
    frame = getattr(RunStore(RUNS / run), table)()
    for column, (count, total) in EXPECTED[run][table].items():
        assert int(frame[column].notna().sum()) == count, column
        assert float(frame[column].astype(float).sum()) == pytest.approx(total, rel=1e-12, nan_ok=True), column


@pytest.mark.parametrize("run", sorted(EXPECTED))
def test_statistics_of_the_stored_gram_matrices_are_the_same(run):
    rows = {
        f"{row['estimator']} {row['energy_source']}": row
        for row in (r.as_row() for r in pooled_statistics(list(RunStore(RUNS / run).grams().values())))
    }
    assert set(rows) == set(EXPECTED[run]["pooled"])
    for label, numbers in EXPECTED[run]["pooled"].items():
        for name, value in numbers.items():
            assert rows[label][name] == pytest.approx(value, rel=1e-9, abs=1e-12), (label, name)


def test_both_are_listed():
    assert set(runs_df(RUNS)["run"]) == set(EXPECTED)


VERSIONS = Path(__file__).parent / "earlier_versions"
MAKE = run_path(str(VERSIONS / "make.py"))


@pytest.mark.parametrize("run", sorted(path.name for path in VERSIONS.iterdir() if (path / "run.json").exists()))
def test_run_of_every_earlier_version_reads_in_todays_columns(run, tmp_path):
    store = RunStore(shutil.copytree(VERSIONS / run, tmp_path / run))
    written = json.loads((VERSIONS / run / "columns.json").read_text())
    assert store.complete_steps() == [0] and runs_df(tmp_path)["n_steps"].tolist() == [1]
    for _ in range(2):  # as it is, and compacted
        for table, today in TABLES.items():
            frame = store.frame(table)
            made = MAKE["columns"](table, written[table]) | {"step": [0] * len(frame)} if table in written else {}
            assert len(frame) == len(next(iter(made.values()), ()))
            for column in today:
                expected = made.get(column.name, [None] * len(frame))
                assert [None if pd.isna(value) else value for value in frame[column.name]] == expected, column.name
        assert set(store.grams()[0].labels) == {("rloo", "none")}
        compact(store.path)
