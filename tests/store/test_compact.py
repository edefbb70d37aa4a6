"""A run that has ended is one file per table and says what it said before: to readers, to a writer, after a kill."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore, RunWriter, StepTables, compact, gram_rows, runs_df
from otb_analysis.store import compact as compact_function
from otb_analysis.store.parts import as_rows
from otb_analysis.types import Gram

compact_module = sys.modules[compact_function.__module__]
LABELS = (("otb", "proxy"), ("otb", "exact"), ("rloo", "none"))
KILLED = """
import os, shutil, signal, sqlite3, sys
from pathlib import Path
from otb_analysis.store import compact

def killing(call, at):
    def counted(*args, **options):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return counted

whole, calls = Path(sys.argv[1]), 0
for at in range(1, 300):
    run = whole.with_name(f"killed-{at}")
    shutil.copytree(whole, run)
    child = os.fork()
    if not child:
        os.fsync = killing(os.fsync, at)
        sqlite3.connect = killing(sqlite3.connect, at)
        for name in ("replace", "unlink", "open"):
            setattr(Path, name, killing(getattr(Path, name), at))
        compact(run)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(run.name, flush=True)
    if not status:
        break
"""
"""Compacts copies of a run, each killed one operation on a file later than the one before, until one is not."""


def write(writer, tables, step, **scalars):
    one = tables(step, **scalars)
    gram = Gram(np.random.default_rng(step).normal(size=(3, 3, 2, 2)), LABELS, 8)
    rows = gram_rows(step, gram) if step % 2 == 0 else None
    tokens = dict(one.tokens)
    tokens["entropy"] = np.where(np.arange(10) == step % 10, np.nan, 0.5)
    if step > 3:
        tokens["mine"] = np.arange(10)  # a column that earlier steps do not have
    writer.write_step(step, StepTables(tokens, one.rollouts, one.steps, grams=rows))


@pytest.fixture
def run(writer, tables):
    """A run of eight steps that failed, so that nothing was compacted; two processes wrote it."""
    writer.size, other = 2, RunWriter(writer.path, rank=1, size=2)
    for step in range(8):
        if step == 2:
            other.write_step(2, StepTables(tables(2).tokens))
        write(writer, tables, step)
    writer.finish("failed")
    return writer.path


def everything(run):
    store = RunStore(run)
    return {table: store.frame(table) for table in TABLES}, {s: g.inner for s, g in store.grams().items()}


def same(one, other):
    for table, frame in one[0].items():
        pd.testing.assert_frame_equal(frame, other[0][table], check_exact=True)
    np.testing.assert_equal(one[1], other[1])


def names(run):
    return sorted(str(path.relative_to(run)) for path in run.rglob("*.parquet"))


WHOLE = ["grams.parquet", "rollouts.parquet", "steps.parquet", "tokens.parquet"]


def test_rows_and_gram_matrices_are_those_of_the_parts(run, tmp_path):
    before = everything(run)
    done = compact(run)
    assert (done.steps, done.parts, done.files) == (8, 8 + 1 + 4, 4) and names(run) == WHOLE
    same(everything(run), before)
    store = RunStore(run)
    assert store.complete_steps() == list(range(8)) and runs_df(tmp_path)["n_steps"].tolist() == [8]
    asked = store.tokens_df([2, 5])
    pd.testing.assert_frame_equal(asked, before[0]["tokens"].query("step in [2, 5]").reset_index(drop=True))
    assert len(store.steps_df([3])) == 1 and store.tokens_df([99]).empty
    references = [("rloo", "none")]
    assert list(store.reduced_grams(references, [4])) == [4]
    assert list(store.reduced_grams(references)) == [0, 2, 4, 6]
    assert compact(run).parts == 2  # the files that are there


def test_other_tools_read_a_run_that_has_ended(writer, tables):
    for step in range(3):
        write(writer, tables, step)
    writer.finish()
    store = RunStore(writer.path)
    assert names(writer.path) == WHOLE
    for table in ("tokens", "rollouts", "steps", "grams"):
        rows = pd.read_parquet(writer.path / f"{table}.parquet")
        assert len(rows) == len(store.frame(table)) and rows["step"].tolist() == store.frame(table)["step"].tolist()
    assert store.info["steps"] == {"number": 3, "first": 0, "last": 2}


def test_the_catalogue_names_the_types_that_the_file_has(run):
    compact(run)
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        fields = dict(db.execute("SELECT DISTINCT file, fields FROM parts"))
    assert "grams.parquet" in fields
    for file, named in fields.items():
        assert json.loads(named) == {field.name: str(field.type) for field in pq.read_schema(run / file)}


def test_a_run_that_has_ended_is_read_from_its_copies_where_they_fit_the_sums_of_the_catalogue(run):
    compact(run)
    before, copy = RunStore(run).frame("rollouts"), run / "rollouts.parquet"
    whole = pq.read_table(copy)
    pq.write_table(whole.set_column(0, "step", pa.array(whole["step"].to_pylist()[::-1])), copy)
    pd.testing.assert_frame_equal(RunStore(run).frame("rollouts"), before)  # from the catalogue
    rewards = [reward + 1 for reward in whole["reward"].to_pylist()]
    for other in (
        whole.drop_columns("reward"),
        whole.set_column(whole.column_names.index("reward"), "reward", pa.array(rewards)),
        whole[:-1],
    ):
        pq.write_table(other, copy)
        pd.testing.assert_frame_equal(RunStore(run).frame("rollouts"), before)
    pq.write_table(whole, copy)
    with closing(sqlite3.connect(run / "run.sqlite")) as db, db:
        db.execute("DELETE FROM rollouts")
    pd.testing.assert_frame_equal(RunStore(run).frame("rollouts"), before)  # from the copy
    copy.unlink()
    with pytest.raises(StoreError, match="has 0 rows of rollouts"):
        RunStore(run).frame("rollouts")


def test_row_groups_hold_whole_steps_so_that_one_is_read_alone(run, monkeypatch):
    monkeypatch.setattr(compact_module, "ROW_GROUP", 25)  # a step has 10 tokens, step 2 has 20; a Gram matrix 21 rows
    before = everything(run)
    compact(run)
    same(everything(run), before)
    metadata = pq.read_metadata(run / "tokens.parquet")
    held = [metadata.row_group(i).column(0).statistics for i in range(metadata.num_row_groups)]
    assert [(s.min, s.max) for s in held] == [(0, 1), (2, 2), (3, 4), (5, 6), (7, 7)]
    assert len(RunStore(run).tokens_df([2])) == 20


def test_run_that_is_written_is_refused(writer, tables):
    write(writer, tables, 0)
    with pytest.raises(InputError, match="demo is being written by"):
        compact(writer.path)
    writer.finish()
    assert compact(writer.path).steps == 1


def test_run_goes_on_after_any_step_and_ends_again(run, tables):
    before = everything(run)
    compact(run)
    writer = RunWriter.resume(run, 5)
    assert RunStore(run).complete_steps() == [0, 1, 2, 3, 4] and "steps.parquet" not in names(run)
    assert RunStore(run).tokens_df()["step"].max() == 4 and list(RunStore(run).grams()) == [0, 2, 4]
    for step in (4, 5, 6, 7):  # step 4 lies in the file of all steps, and is replaced
        write(writer, tables, step)
    same(everything(run), before)
    writer.finish()
    assert names(run) == WHOLE and len(pd.read_parquet(run / "tokens.parquet")) == 90
    same(everything(run), before)
    RunWriter.resume(run, 0)
    assert RunStore(run).complete_steps() == [] and names(run) == []


def test_a_run_that_ended_and_ends_again_is_whole_where_its_files_are_exchanged(run, tables, monkeypatch):
    compact(run)
    write(RunWriter(run), tables, 8)  # without a word that it goes on
    before = everything(run)

    def killed(*given):
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as dying:  # the new files are there, and the catalogue names the old ones
        dying.setattr(compact_module, "as_rows", lambda parts: killed() if _of_one_file(parts) else as_rows(parts))
        RunWriter(run).finish()
        same(everything(run), before)
    RunWriter(run).finish()
    same(everything(run), before)
    assert names(run) == WHOLE and len(pd.read_parquet(run / "tokens.parquet")) == 100


def _of_one_file(parts):
    return any(part.file == "tokens.parquet" for part in parts)


@pytest.mark.parametrize("ended", [False, True])
def test_file_that_was_deleted_changed_or_exchanged_is_a_sentence(run, tables, ended):
    if ended:
        compact(run)
    path = run / ("tokens.parquet" if ended else "tokens/part-00000003-r0.parquet")
    content = path.read_bytes()
    other = RunWriter.create(run.parent, "other", {})
    write(other, lambda step: tables(step + 1), 3)
    other.finish()
    for wrong in (
        content[:200] + bytes([content[200] ^ 1]) + content[201:],
        (other.path / "tokens.parquet").read_bytes(),
    ):
        path.write_bytes(wrong)
        for read in (RunStore(run).tokens_df, lambda: compact(run)):
            if not (ended and read != RunStore(run).tokens_df):
                with pytest.raises(StoreError, match=f"{path} has changed since it was written"):
                    read()
    path.unlink()
    with pytest.raises(StoreError, match=f"{path} is missing"):
        RunStore(run).tokens_df()
    assert len(RunStore(run).rollouts_df()) == 32
    if not ended:
        assert len(RunStore(run).tokens_df([1, 2])) == 30


def test_run_that_ended_with_more_steps_than_it_has_is_a_sentence(run):
    compact(run)
    RunWriter(run).finish()
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        db.execute("DELETE FROM written WHERE step = 3")
        db.commit()
        with pytest.raises(StoreError, match="7 steps where 8 were written"):
            RunStore(run)
        db.execute("UPDATE totals SET steps = 7")
        db.commit()
    with pytest.raises(StoreError, match=r"7 steps, .*ended with 8"):
        RunStore(run)


def test_full_disk_leaves_the_run_as_it_was(run, monkeypatch):
    before, files = everything(run), names(run)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compact_module, "atomic_file", full)
    with pytest.raises(StoreError, match=r"cannot compact .*No space left"):
        compact(run)
    same(everything(run), before)
    assert names(run) == files
    RunWriter(run).finish()  # what cannot be merged stays as it is
    assert RunStore(run).info["status"] == "complete" and names(run) == files


@pytest.mark.parametrize("inner", ["checksum_of", "_row_groups"])
def test_a_file_of_other_bytes_or_fewer_rows_takes_no_part_away(run, monkeypatch, inner):
    before, files = everything(run), names(run)
    real = getattr(compact_module, inner)
    other = {"checksum_of": lambda *given: 0, "_row_groups": lambda *given: iter([*real(*given)][1:])}
    monkeypatch.setattr(compact_module, "ROW_GROUP", 25)
    monkeypatch.setattr(compact_module, inner, other[inner])
    with pytest.raises(StoreError, match=r"would not hold the .* rows"):
        compact(run)
    assert names(run) == files
    same(everything(run), before)


def test_readers_see_the_same_rows_while_a_run_ends_and_goes_on(run, tables):
    before, failures, stop = everything(run), [], threading.Event()

    def read():
        while not stop.is_set():
            try:
                same(everything(run), before)
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        compact(run)
        time.sleep(0.2)
        RunWriter.resume(run, 8).finish("failed")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.slow
@pytest.mark.heavy
def test_compaction_killed_before_every_operation_on_a_file_loses_nothing(run):
    before, states = everything(run), []
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(run)], env=environment, capture_output=True, text=True, check=True
    )
    killed = done.stdout.split()
    for name in killed:
        path = run.with_name(name)
        same(everything(path), before)
        states.append("parts" if any("part-" in file for file in names(path)) else "whole")
        compact(path)
        same(everything(path), before)
        assert names(path) == WHOLE and not list(path.rglob("*.tmp"))
    assert len(killed) > 20 and set(states) == {"parts", "whole"}
