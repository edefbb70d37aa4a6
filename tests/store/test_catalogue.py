"""The catalogue: names that SQLite refuses, what is derived, a schema that is no text, a program that holds a lock."""

import sqlite3
import threading
from contextlib import closing

import numpy as np
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.store import RunStore, RunWriter, StepTables, catalogue, gram_rows, runs_df, subgroup_rows
from otb_analysis.types import Gram

GRAM = Gram(np.random.default_rng(0).normal(size=(2, 2, 2, 2)), (("rloo", "none"), ("otb", "proxy")), 4)


def changed(run, statement):
    with closing(sqlite3.connect(run)) as db:
        db.executescript(statement)


@pytest.fixture
def measured(writer, tables):
    """A run of three measured steps, with groups of two smaller sizes."""
    for step in range(3):
        one, gram = tables(step), Gram(GRAM.inner * (step + 1), GRAM.labels, 4)
        smaller = subgroup_rows(step, {size: Gram(gram.inner * size, GRAM.labels, size) for size in (1, 2)})
        all_tables = StepTables(one.tokens, one.rollouts, one.steps, grams=gram_rows(step, gram), subgroups=smaller)
        writer.write_step(step, all_tables)
    return writer.path


CHANGES = [
    "UPDATE products SET step = 0 WHERE step = 1",
    "UPDATE products SET step = 'x' WHERE step = 0",
    "UPDATE products SET size = 2 WHERE size = 0",
    "UPDATE products SET size = 3 - size WHERE size > 0",
    "UPDATE products SET numbers = zeroblob(9) WHERE step = 1 AND size = 2",
    "DELETE FROM products WHERE step = 1 AND size = 2",
    "DELETE FROM products",
]


@pytest.mark.parametrize("statement", CHANGES)
def test_what_is_derived_never_counts_for_another_step_or_size(measured, statement):
    def numbers():
        store = RunStore(measured)
        reduced = {step: gram.products for step, gram in store.reduced_grams([("rloo", "none")]).items()}
        smaller = store.subgroup_grams()
        return reduced, {size: {step: one.inner for step, one in smaller[size].items()} for size in smaller}

    before = numbers()
    changed(measured / "run.sqlite", statement)
    np.testing.assert_equal(numbers(), before)


@pytest.mark.parametrize("value", ["'abc'", "5000000000000"])
def test_stamp_of_a_changed_catalogue_is_another_one(measured, value):
    before = RunStore(measured).change_token("grams")
    changed(measured / "run.sqlite", f"UPDATE written SET parts_sums = {value}")
    assert RunStore(measured).change_token("grams") != before


def test_schema_that_is_no_text_is_a_sentence(measured):
    broken = "CAST(x'73749d6570' AS TEXT)"
    changed(
        measured / "run.sqlite",
        f"PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = {broken}, name = {broken} WHERE type = 'index'",
    )
    for read in (RunStore, lambda run: RunWriter.resume(run, 1)):
        with pytest.raises(StoreError, match=r"run\.sqlite cannot be read"):
            read(measured)
    assert runs_df(measured.parent)["status"].tolist() == ["broken"]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("Reward_Mean", 1.0, "steps cannot have a column 'Reward_Mean'"),
        ("a\0b", 1.0, "steps cannot have a column"),
        ("seed", np.uint64(2**63), "column 'seed' of steps cannot be stored"),
        ("seed", 2**70, "column 'seed' of steps cannot be stored"),
    ],
)
def test_column_that_cannot_be_kept_is_a_sentence_and_leaves_no_file(writer, tables, name, value, sentence):
    with pytest.raises(InputError, match=sentence):
        writer.write_step(0, tables(0, **{name: value}))
    assert not [*writer.path.rglob("*.parquet")]
    writer.write_step(0, tables(0))
    assert RunStore(writer.path).complete_steps() == [0]


def test_column_named_rowid_and_half_floats_come_back(writer, tables):
    one = tables(0, loss=np.float16(1.5))
    writer.write_step(0, StepTables(one.tokens, one.rollouts | {"rowid": [9, 8, 7, 6]}, one.steps))
    store = RunStore(writer.path)
    assert store.rollouts_df()["rowid"].tolist() == [9, 8, 7, 6]
    assert store.steps_df()["loss"].tolist() == [1.5]


def test_step_is_written_once_a_program_that_holds_the_catalogue_lets_go(writer, tables, monkeypatch):
    writer.write_step(0, tables(0))
    monkeypatch.setattr(catalogue, "WAIT", 0.05)
    said = threading.Event()
    monkeypatch.setattr(catalogue, "note", lambda text: said.set())
    with closing(sqlite3.connect(writer.path / "run.sqlite", isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN")
        other.execute("SELECT * FROM written").fetchall()
        freed = threading.Thread(target=lambda: said.wait(20) and other.execute("COMMIT"))
        freed.start()
        writer.write_step(1, tables(1))
        freed.join()
    assert said.is_set() and RunStore(writer.path).complete_steps() == [0, 1]


def test_reader_is_told_what_to_do_about_a_program_that_holds_the_catalogue(writer, monkeypatch):
    monkeypatch.setattr(catalogue, "WAIT", 0.05)
    with closing(sqlite3.connect(writer.path / "run.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="try again once"):
            RunStore(writer.path)
