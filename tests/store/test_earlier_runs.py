"""Runs written before the rooms were moved open, and say the same numbers.

Made by `otb train` on one layer of width 16: `levels` measures part of its groups exactly, draws tokens of others and
sketches the rest; `critic` trains `value` and measures everything. Models and checkpoints are left out.
"""

import json
from pathlib import Path

import pytest

from otb_analysis.statistics import pooled_statistics
from otb_analysis.store import RunStore, runs_df

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
