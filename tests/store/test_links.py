"""Nothing outside a run is read through it: not by a link, and not by what its run.json lists."""

import os

import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import (
    RolloutFilter,
    RunStore,
    RunWriter,
    attributed_steps,
    compact,
    find_rollouts,
    reward_histogram,
    runs_df,
    step_attribution,
)
from otb_analysis.store.runs import aggregate, partitions

DOORS = {
    **{table: lambda run, table=table: RunStore(run).frame(table) for table in TABLES},
    "sql": lambda run: RunStore(run).sql(f"SELECT count(*) FROM {', '.join(TABLES)}"),
    "light columns": lambda run: RunStore(run).sql("SELECT reward FROM rollouts"),
    "complete steps": lambda run: RunStore(run).complete_steps(),
    "live_status": lambda run: RunStore(run).live_status,
    "change_token": lambda run: RunStore(run).change_token(*TABLES),
    "grams": lambda run: RunStore(run).grams(),
    "reduced grams": lambda run: RunStore(run).reduced_grams([("rloo", "none")]),
    "subgroups of grams": lambda run: RunStore(run).subgroup_grams(),
    "token arrays": lambda run: RunStore(run).token_arrays(1),
    "attributed steps": lambda run: attributed_steps(RunStore(run)),
    "attribution": lambda run: step_attribution(RunStore(run), 1),
    "search": lambda run: find_rollouts(RunStore(run), RolloutFilter(text="a")),
    "rewards": lambda run: reward_histogram(RunStore(run), RolloutFilter()),
    "aggregate": lambda run: aggregate(partitions([run], 2)),
    "compact": compact,
    "resume": lambda run: RunWriter.resume(run, 1),
}
"""Every way to read a run."""


@pytest.fixture
def run(writer, tables):
    for step in range(3):
        writer.write_step(step, tables(step))
    writer.finish("failed")
    return writer.path


def refused(read, run, sentence):
    with pytest.raises(StoreError) as caught:
        read(run)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_writer_changes_nothing_behind_a_link(run, tables, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / ".mine.tmp").write_text("mine")
    (run / "more").symlink_to(kept)

    def plant(*paths):
        for path in paths:
            path.unlink(missing_ok=True)
            path.symlink_to(kept / ".mine.tmp")

    plant(run / ".reserve")
    writer = RunWriter.resume(run, 3)
    plant(run / "tokens" / f".part-00000004-r0.parquet.{os.getpid()}.tmp", run / f".tokens.parquet.{os.getpid()}.tmp")
    for step in (3, 4):
        writer.write_step(step, tables(step))
    writer.finish()
    assert len(RunStore(run).tokens_df()) == 50
    compact(run)
    assert [(path.name, path.read_text()) for path in kept.iterdir()] == [(".mine.tmp", "mine")]
    assert len(RunStore(run).tokens_df()) == 50


@pytest.mark.parametrize("name", ["run.json", "run.sqlite"])
def test_file_of_a_run_that_is_a_link_is_refused_by_every_reader_and_in_the_list(run, tmp_path, name):
    path = run / name
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    for read in DOORS.values():
        refused(read, run, f"{path} is a link, which may lead out of the run; put what it points to there.")
    listed = runs_df(tmp_path)
    assert listed["status"].tolist() == ["broken"] and "is a link" in listed["reason"][0]


@pytest.mark.parametrize("ended", [False, True])
def test_parquet_file_or_folder_that_is_a_link_is_refused(run, tmp_path, ended):
    if ended:
        compact(run)
    path = run / "tokens.parquet" if ended else run / "tokens" / "part-00000001-r0.parquet"
    for linked in (path, *(() if ended else (run / "tokens",))):
        linked.rename(tmp_path / linked.name)
        linked.symlink_to(tmp_path / linked.name)
        for door in ("tokens", "sql", "token arrays", "aggregate"):
            refused(DOORS[door], run, "is a link, which may lead out of the run")
        linked.unlink()
        (tmp_path / linked.name).rename(linked)


def test_sql_reaches_no_file_outside_the_run_by_a_link(run, tmp_path):
    (tmp_path / "notes.txt").write_text("secret")
    (run / "notes.txt").symlink_to(tmp_path / "notes.txt")
    (run / "folder").symlink_to(tmp_path)
    for path in (run / "notes.txt", run / "folder" / "notes.txt", run / ".." / "notes.txt", tmp_path / "notes.txt"):
        with pytest.raises(InputError, match="cannot be run"):
            RunStore(run).sql(f"SELECT * FROM read_text('{path}')")
