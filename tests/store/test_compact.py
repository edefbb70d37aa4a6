"""A compacted run says what it said before: to its readers, to a writer that goes on, and after a kill."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore, RunWriter, StepTables, compact, gram_rows, runs_df
from otb_analysis.store import compact as compact_function
from otb_analysis.types import Gram

compact_module = sys.modules[compact_function.__module__]
LABELS = (("otb", "proxy"), ("otb", "exact"), ("rloo", "none"))
KILLED = """
import os, shutil, signal, sys
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
for at in range(1, 100):
    run = whole.with_name(f"killed-{at}")
    shutil.copytree(whole, run)
    child = os.fork()
    if not child:
        os.fsync = killing(os.fsync, at)
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
    for step in range(8):
        write(writer, tables, step)
    RunWriter(writer.path, rank=1).write_step(2, StepTables(tables(2).tokens))
    writer.finish()
    return writer.path


def everything(run):
    store = RunStore(run)
    return {table: store.frame(table) for table in TABLES}, {s: g.inner for s, g in store.grams().items()}


def same(one, other):
    for table, frame in one[0].items():
        pd.testing.assert_frame_equal(frame, other[0][table], check_exact=True)
    np.testing.assert_equal(one[1], other[1])


def names(run, table):
    return sorted(path.name for path in (run / table).iterdir())


def test_rows_checksums_and_gram_matrices_are_those_of_the_parts(run, tmp_path):
    before = everything(run)
    done = compact(run)
    assert (done.steps, done.parts, done.files) == (8, 8 + 1 + 8 + 8 + 4, 4)
    assert names(run, "tokens") == names(run, "steps") == ["merged-00000000-00000007.parquet"]
    assert names(run, "grams") == ["merged-00000000-00000006.parquet"]
    same(everything(run), before)
    store = RunStore(run)
    assert store.complete_steps() == list(range(8)) and runs_df(tmp_path)["n_steps"].tolist() == [8]
    pd.testing.assert_frame_equal(
        store.tokens_df([2, 5]), before[0]["tokens"].query("step in [2, 5]").reset_index(drop=True)
    )
    assert len(store.steps_df([3])) == 1 and store.tokens_df([99]).empty
    references = [("rloo", "none")]
    assert list(store.reduced_grams(references, [4])) == [4]
    assert list(store.reduced_grams(references)) == [0, 2, 4, 6]
    assert compact(run).parts == 0


def test_row_groups_hold_whole_steps_so_that_one_is_read_alone(run, monkeypatch):
    monkeypatch.setattr(compact_module, "ROW_GROUP", 25)  # a step has 10 tokens, step 2 has 20; a Gram matrix 21 rows
    before = everything(run)
    compact(run)
    same(everything(run), before)
    metadata = pq.read_metadata(run / "tokens" / "merged-00000000-00000007.parquet")
    held = [metadata.row_group(i).column(0).statistics for i in range(metadata.num_row_groups)]
    assert [(s.min, s.max) for s in held] == [(0, 1), (2, 2), (3, 4), (5, 6), (7, 7)]
    assert len(RunStore(run).tokens_df([2])) == 20


def test_several_files_where_one_would_be_too_large(run, monkeypatch):
    monkeypatch.setattr(compact_module, "FILE_BYTES", 1)
    before = everything(run)
    assert compact(run).files == 8 + 8 + 8 + 4
    same(everything(run), before)


def test_run_that_is_written_or_compacted_is_refused(writer, tables):
    write(writer, tables, 0)
    with pytest.raises(InputError, match=r"demo is being written by .*; compact it once it has ended"):
        compact(writer.path)
    writer.finish()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        path = writer.path / "run.json"
        info = json.loads(path.read_text())
        del info["checksum"]
        start = (Path("/proc") / str(other.pid) / "stat").read_text().rpartition(")")[2].split()[19]
        process = info["process"] | {"pid": other.pid, "start": int(start)}
        path.write_text(json.dumps(info | {"compacting": process}))
        with pytest.raises(InputError, match=f"is being written by process {other.pid}"):
            compact(writer.path)
        with pytest.raises(InputError, match=f"is being written by process {other.pid}"):
            RunWriter.resume(writer.path, 0)
        other.kill()
    assert compact(writer.path).steps == 1


def test_run_goes_on_after_any_step_and_is_compacted_again(run, tables):
    before = everything(run)
    compact(run)
    writer = RunWriter.resume(run, 5)
    assert RunStore(run).complete_steps() == [0, 1, 2, 3, 4]
    assert RunStore(run).tokens_df()["step"].max() == 4 and list(RunStore(run).grams()) == [0, 2, 4]
    with pytest.raises(InputError, match=r"step 4 of .* is in a compacted file and cannot be written again"):
        write(writer, tables, 4)
    for step in (5, 6, 7):
        write(writer, tables, step)
    same(everything(run), before)
    writer.finish()
    assert compact(run).steps == 3
    assert names(run, "tokens") == ["merged-00000000-00000007.parquet", "merged-00000005-00000007.parquet"]
    same(everything(run), before)
    RunWriter.resume(run, 0)
    assert RunStore(run).complete_steps() == [] and names(run, "tokens") == []


def test_part_that_was_deleted_is_missed(run):
    deleted = run / "tokens" / "part-00000003-r0.parquet"
    deleted.unlink()
    with pytest.raises(StoreError, match=f"{deleted} is missing, though step 3 was written with it; restore"):
        RunStore(run).tokens_df()
    with pytest.raises(StoreError, match="is missing"):
        compact(run)
    assert len(RunStore(run).rollouts_df()) == 32 and len(RunStore(run).tokens_df([1, 2])) == 30
    (run / "steps" / "part-00000003-r0.parquet").unlink()
    assert RunStore(run).tokens_df()["step"].unique().tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_part_of_another_run_is_no_part_of_this_one(run, tables):
    other = RunWriter.create(run.parent, "other", {})
    write(other, lambda step: tables(step + 1), 3)
    shutil.copy(other.path / "tokens" / "part-00000003-r0.parquet", run / "tokens")
    with pytest.raises(StoreError, match="is another file than its step was written with"):
        RunStore(run).tokens_df()


def test_merged_file_that_is_gone_or_changed_is_a_sentence(run):
    compact(run)
    path = run / "tokens" / "merged-00000000-00000007.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
    with pytest.raises(StoreError, match=f"{path} is broken .its checksum differs.*; restore it from a copy"):
        RunStore(run).tokens_df()
    path.unlink()
    with pytest.raises(StoreError, match=f"{path} is broken .No such file"):
        RunStore(run).tokens_df()
    assert len(RunStore(run).steps_df()) == 8


def test_full_disk_leaves_the_run_as_it_was(run, monkeypatch):
    before = everything(run)

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compact_module, "atomic_file", full)
    with pytest.raises(StoreError, match=r"cannot compact .* \(No space left on device\); its steps stay readable"):
        compact(run)
    same(everything(run), before)
    assert len(names(run, "steps")) == 8 and "compacting" not in RunStore(run).info


def test_readers_see_the_same_rows_while_a_run_is_compacted(run, tables):
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
        writer = RunWriter.resume(run, 8)
        writer.finish()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.slow
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
        left = list(path.glob("*/part-*"))
        states.append("before" if "compacted" not in RunStore(path).info else "between" if left else "after")
        compact(path)
        same(everything(path), before)
        assert not list(path.glob("*/part-*")) and not list(path.glob("*/.*.tmp"))
    assert len(killed) > 50 and list(dict.fromkeys(states)) == ["before", "between", "after"]
