"""A run that goes on, is killed while it begins to, or is written by several processes."""

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.store import RunStore, RunWriter, StepTables, catalogue, gram_rows, runs_df
from otb_analysis.store import writer as writer_module
from otb_analysis.types import Gram


class Killed(BaseException):
    pass


@pytest.fixture
def ended(writer, tables):
    for step in range(3):
        writer.write_step(step, tables(step))
    writer.finish()
    return writer.path


@pytest.mark.parametrize("at", ["remove_unlisted", "write_reserve", "separate"])
def test_run_killed_while_it_begins_to_go_on_is_read_as_before(ended, monkeypatch, at):
    def kill(*args):
        raise Killed

    monkeypatch.setattr(writer_module, at, kill)
    with pytest.raises(Killed):
        RunWriter.resume(ended, 2)
    assert RunStore(ended).complete_steps() == ([0, 1, 2] if at == "separate" else [0, 1])
    assert "broken" not in runs_df(ended.parent)["status"].tolist()


def test_disk_without_links_that_fails_in_the_middle_of_a_copy_loses_nothing(ended, monkeypatch):
    def half(source, target):
        target.write(source.read(100))
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_link(*args):
        raise OSError(errno.EPERM, "no links here")

    before = RunStore(ended).tokens_df([0, 1])
    monkeypatch.setattr(os, "link", no_link)
    with monkeypatch.context() as full:
        full.setattr(sys.modules["otb_analysis.store.compact"].shutil, "copyfileobj", half)
        with pytest.raises(Exception, match="No space left on device"):
            RunWriter.resume(ended, 2)
    RunWriter.resume(ended, 2)
    assert RunStore(ended).tokens_df().equals(before)


def test_run_that_ends_between_two_looks_of_a_reader_is_whole(writer, tables, monkeypatch):
    writer.write_step(0, tables(0))
    store, real = RunStore(writer.path), catalogue.written_steps

    def looking(db, where):
        steps = real(db, where)
        monkeypatch.setattr(catalogue, "written_steps", real)
        db.execute("COMMIT")
        writer.write_step(1, tables(1))
        writer.finish()
        db.execute("BEGIN")
        return steps

    monkeypatch.setattr(catalogue, "written_steps", looking)
    assert store.complete_steps() == [0]
    assert store.complete_steps() == [0, 1]


def test_step_is_kept_where_what_others_wrote_of_it_cannot_be_removed(writer, tables, monkeypatch):
    writer.size, one, real = 2, tables(0), Path.unlink
    RunWriter(writer.path, 1, 2).write_step(0, StepTables(rollouts=one.rollouts))

    def stale(path, missing_ok=False):
        if path.name.endswith("-r1.parquet"):
            raise OSError(errno.ESTALE, "Stale file handle")
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", stale)
    writer.write_step(0, StepTables(tokens=one.tokens, steps=one.steps))
    store = RunStore(writer.path)
    assert len(store.tokens_df()) == 10 and len(store.rollouts_df()) == 4


def test_prompts_of_all_processes_name_what_is_derived(writer, tables):
    writer.size, one = 2, tables(0)
    rollouts = {name: np.asarray(values) for name, values in one.rollouts.items()} | {
        "prompt_id": np.array(list("bbaa"))
    }
    first, second = ({name: values[rows] for name, values in rollouts.items()} for rows in (slice(2), slice(2, 4)))
    RunWriter(writer.path, 1, 2).write_step(0, StepTables(rollouts=second))
    gram = Gram(np.eye(2).reshape(1, 1, 2, 2), (("rloo", "none"),), 2)
    writer.write_step(0, StepTables(one.tokens, first, one.steps, grams=gram_rows(0, gram)))
    store = RunStore(writer.path)
    assert store.grams()[0].prompt == store.reduced_grams([("rloo", "none")])[0].prompt == ("b", "a")
