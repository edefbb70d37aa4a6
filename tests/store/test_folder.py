"""Listing a run: what is new costs, what was there does not, and a replaced file is never taken for the old one."""

import os

import pytest

from otb_analysis.errors import StoreError
from otb_analysis.store import RunStore, RunWriter, StepTables, compact, folder, held, one_look, reader


def row(step, reward):
    return StepTables(
        rollouts={"group": [0], "rollout": [0], "reward": [reward], "length": [1]}, steps={"reward_mean": reward}
    )


@pytest.fixture
def writer(tmp_path):
    made = RunWriter.create(tmp_path, "run", {})
    for step in range(5):
        made.write_step(step, row(step, float(step)))
    return made


def rewards(store, table="steps"):
    return store.frame(table, columns=["reward_mean" if table == "steps" else "reward"]).iloc[:, 0].tolist()


@pytest.fixture
def asked(monkeypatch):
    """The names of files whose time was asked for."""
    names, original = [], folder._time_and_size
    monkeypatch.setattr(folder, "_time_and_size", lambda path: names.append(os.path.basename(path)) or original(path))
    return names


def test_only_new_files_are_asked_for_their_time(writer, asked, monkeypatch):
    monkeypatch.setattr(folder, "YOUNG", 0)
    store = RunStore(writer.path)
    assert store.complete_steps() == [0, 1, 2, 3, 4]
    asked.clear()
    writer.write_step(5, row(5, 5.0))
    assert store.complete_steps() == [0, 1, 2, 3, 4, 5]
    assert asked == ["run.json", "part-00000005-r0.parquet"]


def test_all_that_is_read_in_one_look_shows_one_moment(writer):
    store = RunStore(writer.path)
    with one_look():
        assert rewards(store, "rollouts") == [0, 1, 2, 3, 4]
        writer.write_step(5, row(5, 5.0))
        assert rewards(store) == rewards(store, "rollouts") == [0, 1, 2, 3, 4]
        with one_look():
            assert rewards(store) == [0, 1, 2, 3, 4, 5]
        assert rewards(store) == [0, 1, 2, 3, 4]
    assert rewards(store) == rewards(store, "rollouts") == [0, 1, 2, 3, 4, 5]


def test_files_exchanged_since_the_look_are_looked_for_again(writer):
    store = RunStore(writer.path)
    writer.finish()
    with one_look():
        assert store.complete_steps() == [0, 1, 2, 3, 4]
        compact(writer.path)
        assert rewards(store, "rollouts") == rewards(store) == [0, 1, 2, 3, 4]


def test_a_run_that_went_back_since_the_look_is_looked_for_again(writer):
    store = RunStore(writer.path)
    with one_look():
        assert store.complete_steps() == [0, 1, 2, 3, 4]
        RunWriter.resume(writer.path, 3).write_step(3, row(3, 7.0))
        assert rewards(store, "rollouts") == rewards(store) == [0, 1, 2, 7]


@pytest.mark.parametrize("same_inode", [True, False])
def test_a_step_that_is_written_again_is_read_again(writer, same_inode, monkeypatch):
    if same_inode:  # as file systems give those of removed files to new ones
        monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: Entries(scan(path)))
    store = RunStore(writer.path)
    for reward in (9.0, 8.0):
        writer.write_step(2, row(2, reward))
        assert rewards(store) == rewards(store, "rollouts") == [0, 1, reward, 3, 4]


class Entries:
    """A folder whose files all have the same inode."""

    def __init__(self, entries):
        self.entries = entries

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.entries.close()

    def __iter__(self):
        return map(Entry, self.entries)


class Entry:
    def __init__(self, entry):
        self.entry, self.name, self.is_symlink = entry, entry.name, entry.is_symlink

    def inode(self):
        return 1


def test_a_run_that_went_back_is_read_again(writer):
    store = RunStore(writer.path)
    assert rewards(store) == [0, 1, 2, 3, 4]
    again = RunWriter.resume(writer.path, 3)
    again.write_step(3, row(3, 7.0))
    assert rewards(store) == rewards(store, "rollouts") == [0, 1, 2, 7]


def test_a_run_that_went_back_is_followed_as_before(writer, monkeypatch):
    monkeypatch.setattr(reader, "MANY", 0)  # small columns in memory, as of a run of thousands of steps
    store = RunStore(writer.path)
    assert rewards(store) == rewards(store, "rollouts") == [0, 1, 2, 3, 4]
    again = RunWriter.resume(writer.path, 3)
    for step in (3, 4, 5):
        again.write_step(step, row(step, 10.0 + step))
        assert rewards(store) == rewards(store, "rollouts") == [0, 1, 2, 13, 14, 15][: step + 1]
    for rows in (held._steps(store.path), held._rollouts(store.path)):
        assert [part.step for part in rows.at] == [0, 1, 2, 3, 4, 5] and len(rows.table) == 6


def test_a_file_that_is_put_in_the_place_of_another_is_noticed(writer, tmp_path):
    store = RunStore(writer.path)
    assert rewards(store) == [0, 1, 2, 3, 4]
    other = RunWriter.create(tmp_path, "other", {})
    other.write_step(2, row(2, 6.0))
    for table in ("rollouts", "steps"):
        os.replace(other.path / table / "part-00000002-r0.parquet", writer.path / table / "part-00000002-r0.parquet")
    assert rewards(store) == rewards(store, "rollouts") == [0, 1, 6, 3, 4]


def test_a_known_file_that_becomes_a_link_is_refused(writer, tmp_path):
    store = RunStore(writer.path)
    assert rewards(store) == [0, 1, 2, 3, 4]
    part = writer.path / "steps" / "part-00000002-r0.parquet"
    part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(StoreError, match="is a link"):
        rewards(store)


def test_a_part_that_is_deleted_is_missed(writer):
    store = RunStore(writer.path)
    assert rewards(store, "rollouts") == [0, 1, 2, 3, 4]
    (writer.path / "rollouts" / "part-00000003-r0.parquet").unlink()
    with pytest.raises(StoreError, match="is missing, though step 3 was written with it"):
        rewards(store, "rollouts")


def test_a_part_that_comes_late_to_a_complete_step_is_read(writer):
    store = RunStore(writer.path)
    assert rewards(store, "rollouts") == [0, 1, 2, 3, 4]
    for step in (2, 4):  # in the middle, and after all that were seen
        RunWriter(writer.path, rank=1, size=2).write_step(step, StepTables(rollouts=row(step, 0.5).rollouts))
    assert rewards(store, "rollouts") == [0, 1, 2, 0.5, 3, 4, 0.5]


def test_times_of_all_files_are_asked_for_again_after_a_while_and_those_of_young_ones_every_time(writer, monkeypatch):
    def seen():
        return [part.seen[0] for part in folder.loose_parts(writer.path, "steps") if part.seen]

    old, *young = sorted((writer.path / "steps").iterdir())
    os.utime(old, ns=(1, 1))
    assert seen()[0] == 1
    for path in (old, young[0]):
        os.utime(path, ns=(2, 2))
    assert seen()[0] == 1 and seen()[1] == 2
    monkeypatch.setattr(folder, "AGAIN", 0)
    assert seen()[0] == 2


def test_a_merged_file_that_is_deleted_is_missed(writer, monkeypatch):
    monkeypatch.setattr(reader, "MANY", 0)
    writer.finish()
    compact(writer.path)
    store = RunStore(writer.path)
    assert rewards(store, "rollouts") == [0, 1, 2, 3, 4]
    next((writer.path / "rollouts").glob("merged-*")).unlink()
    with pytest.raises(StoreError, match="is broken"):
        rewards(store, "rollouts")
