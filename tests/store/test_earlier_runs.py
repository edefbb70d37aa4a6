"""Runs written before the rooms were moved open, and say the same numbers.

Made by `otb train` on one layer of width 16: `levels` measures part of its groups exactly, draws tokens of others and
sketches the rest; `critic` trains `value` and measures everything. Models and checkpoints are left out.
`earlier_versions` holds a run for each set of columns there ever was, written by the code of that time.
"""

import json
import shutil
from pathlib import Path
from runpy import run_path

import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import StoreError
from otb_analysis.schema import SCHEMA_VERSION, TABLES
from otb_analysis.statistics import pooled_statistics
from otb_analysis.store import RunStore, RunWriter, StepTables, compact, runs_df

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


@pytest.fixture
def levels(tmp_path):
    return shutil.copytree(RUNS / "levels", tmp_path / "levels")


def test_a_run_goes_on_from_an_earlier_layout(levels):
    before = RunStore(levels)
    frames, grams = {table: before.frame(table) for table in TABLES}, before.grams()
    last = before.complete_steps()[-1]
    writer = RunWriter.resume(levels, last)
    assert RunStore(levels).info["schema_version"] == SCHEMA_VERSION and RunStore(levels).complete_steps()[-1] < last
    one = {name: frames["steps"][name].iloc[-1] for name in ("reward_mean", "loss")}
    writer.write_step(last, StepTables(steps=one))
    writer.finish()
    store = RunStore(levels)
    pd.testing.assert_frame_equal(store.tokens_df(), frames["tokens"].query("step < @last"), check_exact=True)
    assert store.steps_df()["loss"].tolist() == frames["steps"]["loss"].tolist()
    for step, gram in store.reduced_grams([("rloo", "none")]).items():
        np.testing.assert_array_equal(gram.products, grams[step].products)
    assert not list(levels.glob("*/*.parquet"))


@pytest.mark.parametrize("table", ["tokens", "rollouts", "steps", "grams"])
@pytest.mark.parametrize("how", ["flipped", "cut", "linked"])
def test_a_broken_file_of_an_earlier_layout_is_a_sentence(levels, tmp_path, table, how):
    path = sorted((levels / table).glob("*.parquet"))[0]
    content = path.read_bytes()
    if how == "linked":
        path.rename(tmp_path / "outside")
        path.symlink_to(tmp_path / "outside")
    else:
        wrong = {"flipped": content[:30] + bytes([content[30] ^ 1]) + content[31:], "cut": content[:40]}
        path.write_bytes(wrong[how])
    signed = b"otb_crc32" in content
    if how != "flipped" or signed:
        with pytest.raises(StoreError, match=f"{path.name} is (broken|a link)") as caught:
            RunStore(levels)
        assert "\n" not in str(caught.value)


LISTS = [
    {"../elsewhere": []}, {"tokens": 5}, ["tokens"], {"tokens": [{"steps": [[0, 2]]}]},
    *({"tokens": [{"checksum": "0123abcd", **one}]} for one in (
        {"file": "../steps/part-00000000-r0.parquet", "steps": [[0, 2]]}, {"file": "/etc/passwd", "steps": [[0, 2]]},
        {"file": "merged-00000000-00000002.parquet", "steps": [[2, 0]]},
        {"file": "merged-00000000-00000002.parquet", "steps": [[0, 3]]},
        {"file": "merged-00000000-00000002.parquet", "steps": []},
        {"file": "merged-0-999999999999.parquet", "steps": [[0, 999_999_999_999]]},
        {"file": "merged-00000000-00000002.parquet", "steps": [[0, 1], [1, 2]]},
    )),
]  # fmt: skip


@pytest.mark.parametrize("listed", LISTS, ids=str)
def test_list_of_merged_files_that_was_made_by_hand_is_one_sentence(levels, listed):
    path = levels / "run.json"
    info = {name: value for name, value in json.loads(path.read_text()).items() if name != "checksum"}
    path.write_text(json.dumps(info | {"compacted": listed}))
    with pytest.raises(StoreError, match=r"lists under 'compacted' .*no part") as caught:
        RunStore(levels)
    assert "\n" not in str(caught.value)
