"""Nothing outside a run is read through it: not by a link, and not by what its run.json lists."""

import json
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
from otb_analysis.store.aggregate import aggregate, partitions

DOORS = {
    **{table: lambda run, table=table: RunStore(run).frame(table) for table in TABLES},
    "sql": lambda run: RunStore(run).sql(f"SELECT count(*) FROM {', '.join(TABLES)}"),
    "light columns": lambda run: RunStore(run).sql("SELECT reward FROM rollouts", texts=False),
    "complete steps": lambda run: RunStore(run).complete_steps(),
    "standing": lambda run: RunStore(run).standing,
    "written": lambda run: RunStore(run).written(*TABLES),
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
READ = {
    "steps": DOORS.keys(),
    "tokens": {"tokens", "sql", "written", "token arrays", "attributed steps", "attribution", "compact"},
    "rollouts": {"rollouts", "sql", "light columns", "search", "rewards", "token arrays", "aggregate", "compact"},
    "grams": {"grams", "reduced grams", "sql", "written", "compact"},
    "subgroups": {"subgroups", "subgroups of grams", "sql", "compact"},
    "gradients": {"gradients", "sql", "compact"},
    "sampling": {"sampling", "sql", "compact"},
}
"""Which of them read a table."""


@pytest.fixture
def run(writer, tables):
    for step in range(3):
        one = tables(step)
        writer.write_step(step, one)
    writer.finish()
    return writer.path


def refused(read, run, sentence):
    with pytest.raises(StoreError) as caught:
        read(run)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("table", TABLES)
def test_folder_of_a_table_that_is_a_link_is_refused_by_every_reader(run, tmp_path, table):
    folder, outside = run / table, tmp_path / "outside"
    folder.mkdir(exist_ok=True)
    folder.rename(outside)
    folder.symlink_to(outside)
    for door in READ[table]:
        refused(DOORS[door], run, f"{folder} is a link, which may lead out of the run; put what it points to there.")
    assert (runs_df(tmp_path)["status"].tolist() == ["broken"]) == (table == "steps")


def test_folder_that_becomes_a_link_to_one_of_the_same_age_is_refused(run, tmp_path):
    folder, outside = run / "tokens", tmp_path / "outside"
    os.utime(folder, (1e9, 1e9))
    assert len(RunStore(run).tokens_df()) == 30
    folder.rename(outside)
    folder.symlink_to(outside)
    refused(DOORS["tokens"], run, f"{folder} is a link")


@pytest.mark.parametrize("table", ["tokens", "rollouts", "steps"])
@pytest.mark.parametrize("merged", [False, True])
def test_file_of_a_table_that_is_a_link_is_refused_by_every_reader(run, tmp_path, table, merged):
    if merged:
        compact(run)
    path = sorted((run / table).iterdir())[-1]
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    for door in READ[table]:
        refused(DOORS[door], run, f"{path} is a link, which may lead out of the run")


def test_run_file_that_is_a_link_is_refused_by_every_reader_and_in_the_list(run, tmp_path):
    path = run / "run.json"
    path.rename(tmp_path / "outside.json")
    path.symlink_to(tmp_path / "outside.json")
    for read in DOORS.values():
        refused(read, run, f"{path} is a link, which may lead out of the run; put what it points to there.")
    listed = runs_df(tmp_path)
    assert listed["status"].tolist() == ["broken"] and "is a link" in listed["reason"][0]


def test_writer_changes_nothing_behind_a_link(run, tables, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / ".mine.tmp").write_text("mine")
    (run / "more").symlink_to(kept)

    def plant(*paths):
        for path in paths:
            path.unlink(missing_ok=True)
            path.symlink_to(kept / ".mine.tmp")

    plant(run / ".reserve", run / "steps-r0.digest")
    writer = RunWriter.resume(run, 3)
    plant(run / "steps" / f".part-00000004-r0.parquet.{os.getpid()}.tmp")
    for step in (3, 4):
        writer.write_step(step, tables(step))
    writer.finish()
    assert len(RunStore(run).tokens_df()) == 50
    compact(run)
    assert [(path.name, path.read_text()) for path in kept.iterdir()] == [(".mine.tmp", "mine")]
    assert len(RunStore(run).tokens_df()) == 50


def entry(**changes):
    return {"file": "merged-00000000-00000002.parquet", "checksum": "0123abcd", "steps": [[0, 2]]} | changes


LISTS = {
    "no table": ({"../elsewhere": [entry()]}, "there is no table '../elsewhere'"),
    "a path": ({"tokens": [entry(file="../steps/part-00000000-r0.parquet")]}, "is no name of a file of tokens"),
    "an absolute path": ({"tokens": [entry(file="/etc/passwd")]}, "'/etc/passwd' is no name of a file of tokens"),
    "a part": ({"tokens": [entry(file="part-00000000-r0.parquet")]}, "is no name of a file of tokens"),
    "other digits": ({"tokens": [entry(file="merged-٠-٢.parquet")]}, "is no name of a file of tokens"),
    "no checksum": ({"tokens": [entry(checksum="")]}, "'' is no checksum of merged-00000000-00000002.parquet"),
    "a number": ({"tokens": [entry(checksum=7)]}, "a file needs a name, a checksum, and steps as pairs"),
    "backwards": ({"tokens": [entry(steps=[[2, 0]])]}, "cannot hold steps 2 to 0 here"),
    "beyond the name": ({"tokens": [entry(steps=[[0, 3]])]}, "cannot hold steps 0 to 3 here"),
    "before step 0": ({"tokens": [entry(steps=[[-1, 2]])]}, "cannot hold steps -1 to 2 here"),
    "unordered": ({"tokens": [entry(steps=[[2, 2], [0, 1]])]}, "cannot hold steps 0 to 1 here"),
    "twice in a file": ({"tokens": [entry(steps=[[0, 1], [1, 2]])]}, "cannot hold steps 1 to 2 here"),
    "twice in two files": ({"tokens": [entry(), entry()]}, "cannot hold steps 0 to 2 here"),
    "half a step": ({"tokens": [entry(steps=[[0, 1.5]])]}, "cannot hold steps 0 to 1.5 here"),
    "a flag": ({"tokens": [entry(steps=[[False, True]])]}, "cannot hold steps False to True here"),
    "no steps": ({"tokens": [entry(steps=[])]}, "tokens cannot have 0 steps"),
    "all steps": (
        {"tokens": [entry(file="merged-0-999999999999.parquet", steps=[[0, 999_999_999_999]])]},
        "tokens cannot have 1000000000000 steps",
    ),
    "no pairs": ({"tokens": [entry(steps=[0, 2])]}, "a file needs a name, a checksum, and steps as pairs"),
    "no name": ({"tokens": [{"steps": [[0, 2]]}]}, "a file needs a name, a checksum, and steps as pairs"),
    "no files": ({"tokens": 5}, "a file needs a name, a checksum, and steps as pairs"),
    "no tables": (["tokens"], "a file needs a name, a checksum, and steps as pairs"),
    "nothing": (None, "a file needs a name, a checksum, and steps as pairs"),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_list_of_merged_files_that_was_made_by_hand_is_one_sentence(run, tmp_path, name):
    path, (listed, why) = run / "run.json", LISTS[name]
    info = json.loads(path.read_text())
    del info["checksum"]
    path.write_text(json.dumps(info | {"compacted": listed}))
    for read in DOORS.values():
        refused(read, run, f"{path} lists under 'compacted' what is no part of this run (")
        refused(read, run, why)
    listed = runs_df(tmp_path)
    assert listed["status"].tolist() == ["broken"] and why in listed["reason"][0]


def test_sql_reaches_no_file_outside_the_run_by_a_link(run, tmp_path):
    (tmp_path / "notes.txt").write_text("secret")
    (run / "notes.txt").symlink_to(tmp_path / "notes.txt")
    (run / "folder").symlink_to(tmp_path)
    for path in (run / "notes.txt", run / "folder" / "notes.txt", run / ".." / "notes.txt", tmp_path / "notes.txt"):
        with pytest.raises(InputError, match="cannot be run"):
            RunStore(run).sql(f"SELECT * FROM read_text('{path}')")
