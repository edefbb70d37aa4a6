"""A digest repeats what footers say: with it fewer files are opened, and never another number is read."""

import shutil

import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore, RunWriter, StepTables, checksum, compact, digest, held, runs_df

STEPS = 80
"""More than `digest.FEW`, and than `held.MANY`."""


@pytest.fixture
def run(writer, tables):
    for step in range(STEPS):
        odd = {"grad_norm": np.nan, "note": f"a\tb\n{step}"} if step % 7 == 3 else {"grad_norm": float(step)}
        writer.write_step(step, tables(step, **odd))
    writer.finish()
    return writer.path


@pytest.fixture(autouse=True)
def nothing_in_memory():
    for cache in (held._steps, held._rollouts):
        cache.cache_clear()
    checksum._SEALED.clear()
    digest._SAID.clear()


def read(run):
    """Return what a new process reads of a run."""
    for cache in (held._steps, held._rollouts):
        cache.cache_clear()
    checksum._SEALED.clear()
    digest._SAID.clear()
    store = RunStore(run)
    light = store.sql("SELECT step, rollout, reward, length FROM rollouts ORDER BY ALL", texts=False)
    return store.steps_df(), light, store.steps_with("tokens", "grad_norm_sq"), store.steps_with("tokens", "value")


def same(one, other):
    for mine, theirs in zip(one[:2], other[:2], strict=True):
        pd.testing.assert_frame_equal(mine, theirs, check_exact=True)
    return one[2:] == other[2:]


def without_digest(run):
    digest.forget(run)
    assert not list(run.glob("*.digest"))
    return read(run)


@pytest.fixture
def opened(monkeypatch):
    """Return the parts that were opened, as they are."""
    paths, original = [], checksum.read_sealed

    def counting(signature, key):
        paths.append(signature[0])
        return original(signature, key)

    for module in (checksum, digest, held):
        monkeypatch.setattr(module, "read_sealed", counting)
    return paths


def test_a_new_process_opens_no_part_for_lists_and_light_columns(run, opened):
    said = read(run)
    assert [path.parent.name for path in opened] == ["rollouts"]  # one, to see how many rows a step has
    assert runs_df(run.parent)["n_steps"].tolist() == [STEPS]
    assert said[2] == list(range(STEPS)) and said[3] == []
    assert same(without_digest(run), said)
    assert {path.parent.name for path in opened} == {"steps", "rollouts"}  # `steps` says what `tokens` hold


def test_a_followed_run_opens_only_its_new_parts(writer, tables, opened):
    for step in range(STEPS):
        writer.write_step(step, tables(step))
    read(writer.path)
    opened.clear()
    writer.write_step(STEPS, tables(STEPS))
    opened.clear()  # the writer reads what it notes
    store = RunStore(writer.path)
    assert len(store.steps_df()) == STEPS + 1 and len(store.sql("FROM rollouts", texts=False)) == 4 * (STEPS + 1)
    assert {path.name for path in opened} <= {f"part-{STEPS:08d}-r0.parquet"}


def test_a_step_that_was_written_again_is_read_as_it_is(run, tables):
    old = {path: path.read_bytes() for path in run.glob("*.digest")}
    RunWriter(run).write_step(5, tables(5, grad_norm=-1.0))
    assert read(run)[0]["grad_norm"][5] == -1.0
    for path, content in old.items():  # a digest of before, such as from a backup
        path.write_bytes(content)
    said = read(run)
    assert said[0]["grad_norm"][5] == -1.0 and same(without_digest(run), said)


def test_a_part_that_was_copied_over_another_is_refused_though_the_digest_knew_it(run):
    shutil.copy(run / "steps" / "part-00000004-r0.parquet", run / "steps" / "part-00000005-r0.parquet")
    with pytest.raises(StoreError, match=r"part-00000005-r0.parquet is broken \(its checksum differs"):
        read(run)


def test_a_digest_of_another_run_says_nothing_here(run, tables):
    other = RunWriter.create(run.parent, "other", {})
    for step in range(STEPS):
        other.write_step(step, tables(step, grad_norm=99.0))
    before = read(run)
    for path in other.path.glob("*.digest"):
        shutil.copy(path, run / path.name)
    assert same(read(run), before)


@pytest.mark.parametrize("at", [0, 8, 9, 40, 700, -1])
def test_a_digest_with_a_changed_byte_or_cut_short_changes_no_number(run, at):
    before = read(run)
    for path in run.glob("*.digest"):
        content = path.read_bytes()
        for changed in (content[:at] + b"%c" % (content[at] ^ 1) + content[at + 1 :][: None if at >= 0 else 0],
                        content[: at % len(content)]):  # fmt: skip
            path.write_bytes(changed)
            assert same(read(run), before)
        path.write_bytes(content)


def test_lines_after_one_that_was_cut_are_read(run, tables):
    before = read(run)[0]
    with (run / "steps-r0.digest").open("ab") as file:
        file.write(b"1234abcd\tpart-")  # the disk was full
    writer = RunWriter(run)
    for step in range(STEPS, STEPS + 3):
        writer.write_step(step, tables(step))
    found = read(run)[0]
    assert len(found) == STEPS + 3
    pd.testing.assert_frame_equal(found.head(STEPS)[before.columns], before)


def test_a_link_is_no_digest(run, tmp_path):
    before = read(run)
    path = run / "steps-r0.digest"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert digest.noted(run, "steps") == {} and same(read(run), before)


def test_where_no_digest_can_be_written_steps_are_written_all_the_same(writer, tables):
    (writer.path / "steps-r0.digest").mkdir()
    writer.write_step(0, tables(0))
    assert RunStore(writer.path).complete_steps() == [0]


def test_compaction_needs_no_digest_and_a_resumed_run_begins_another(run, tables):
    before = read(run)[0]
    compact(run)
    assert not list(run.glob("*.digest"))
    pd.testing.assert_frame_equal(read(run)[0], before)
    writer = RunWriter.resume(run, STEPS - 10)
    for step in range(STEPS - 10, STEPS + 20):
        writer.write_step(step, tables(step, grad_norm=7.0))
    found = read(run)
    assert found[0]["grad_norm"].tolist()[-30:] == [7.0] * 30 and same(without_digest(run), found)


def test_every_process_writes_its_own_and_rank_0_says_what_all_hold(tmp_path, tables, opened):
    first = RunWriter.create(tmp_path, "two", {})
    first.size, second = 2, RunWriter(first.path, rank=1, size=2)
    for step in range(STEPS):
        one = tables(step)
        more = {name: np.asarray(one.rollouts[name]) + 4 * (name == "rollout") for name in one.rollouts}
        value = {"value": np.ones(10)} if step == 9 else {}
        second.write_step(step, StepTables(one.tokens | {"rollout": one.tokens["rollout"] + 4} | value, more))
        first.write_step(step, one)
    opened.clear()
    said = read(first.path)
    assert len(opened) == 1 and len(said[1]) == 8 * STEPS and said[3] == [9]
    assert sorted(path.name for path in first.path.glob("*.digest")) == [
        "rollouts-r0.digest", "rollouts-r1.digest", "steps-r0.digest",
    ]  # fmt: skip
    assert same(without_digest(first.path), said)


def test_a_column_of_several_kinds_of_values_is_text_as_in_sql(writer, tables):
    extras = [1, "x", 2.5, None, True]
    for step in range(300):  # more than `held.AT_ONCE`
        extra = extras[step % 5] if step > 260 else step
        writer.write_step(step, tables(step, extra=extra))
    found = read(writer.path)[0]["extra"]
    assert (
        found[261] == "x" and found[262] == "2.5" and found[3] == "3" and pd.isna(found[263]) and found[264] == "true"
    )
    assert RunStore(writer.path).sql("SELECT extra FROM steps WHERE step = 3")["extra"][0] == "3"
    assert runs_df(writer.path.parent)["status"].tolist() == ["running"]


def test_steps_after_some_that_could_not_be_joined_are_at_their_places(writer, tables, monkeypatch):
    for step in range(STEPS):
        writer.write_step(step, tables(step, grad_norm=float(step)))
    with monkeypatch.context() as patched:
        patched.setattr(held, "_concatenated", lambda tables: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            RunStore(writer.path).steps_df()
    assert RunStore(writer.path).steps_df()["grad_norm"].tolist() == [float(step) for step in range(STEPS)]


def test_a_step_without_rollouts_is_read_with_the_others(writer, tables):
    for step in range(STEPS):
        one = tables(step)
        empty = {name: np.asarray(values)[:0] for name, values in one.rollouts.items()}
        writer.write_step(step, StepTables(one.tokens, empty if step == 3 else one.rollouts, one.steps))
    said = read(writer.path)
    assert len(said[1]) == 4 * (STEPS - 1) and same(without_digest(writer.path), said)
    assert len(RunStore(writer.path).rollouts_df(columns=["step", "reward"])) == 4 * (STEPS - 1)


def test_a_merged_file_of_another_run_is_refused(run, tables):
    other = RunWriter.create(run.parent, "other", {})
    for step in range(STEPS):
        other.write_step(step, tables(step, reward_mean=2.0))
    other.finish()
    for path in (run, other.path):
        compact(path)
    name = next((run / "steps").glob("merged-*")).name
    shutil.copy(other.path / "steps" / name, run / "steps" / name)
    with pytest.raises(StoreError, match=f"{name} is broken"):
        read(run)
    assert runs_df(run.parent).set_index("run").loc["demo", "status"] == "broken"


def test_every_table_is_whole_with_a_digest(run):
    store = RunStore(run)
    assert {table: len(store.frame(table)) for table in TABLES if len(store.frame(table))} == {
        "tokens": 10 * STEPS, "rollouts": 4 * STEPS, "steps": STEPS,
    }  # fmt: skip
