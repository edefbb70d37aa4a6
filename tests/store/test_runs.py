"""The table of runs: one row each, broken ones too, and never an exception."""

import json
import os
import shutil
import sqlite3
from contextlib import closing

import pandas as pd
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import SCHEMA_VERSION
from otb_analysis.store import RunStore, RunWriter, StepTables, runs_df
from otb_analysis.store.catalogue import transaction
from otb_analysis.store.runs import DTYPES, matching


def row_of(root, run="demo"):
    frame = runs_df(root)
    return frame[frame["run"] == run].iloc[0]


def test_headline_numbers_are_those_of_the_first_and_last_tenth(tmp_path, writer):
    # 20 steps: a tenth is two of them. Rewards 0, 1, …, 19: means 0.5 and 18.5; norms 1, …, 20: median 10.5.
    for step in range(20):
        scalars = {"reward_mean": step, "grad_norm": step + 1, "n_tokens": 10, "seconds_sample": 0.5}
        held_out = {"heldout_reward": 0.25, "seconds_evaluate": 3.0} if step == 10 else {}
        writer.write_step(step, StepTables(steps=scalars | held_out))
    writer.finish()
    row = row_of(tmp_path)
    assert row["status"] == "complete"
    assert (row["n_steps"], row["last_step"], row["n_tokens"]) == (20, 19, 200)
    assert (row["reward_first"], row["reward_last"]) == (0.5, 18.5)
    assert (row["grad_norm_median"], row["grad_norm_last"]) == (10.5, 20)
    assert (row["heldout_reward"], row["seconds"]) == (0.25, 20 * 0.5 + 3)


def test_configuration_is_flattened_with_dots(tmp_path, writer):
    row = row_of(tmp_path)
    assert row["config.seed"] == 3
    assert row["config.task.name"] == "chain_sum"
    assert row["config.task.terms"] == "[2, 3]"


def test_run_that_grows_is_counted_anew(tmp_path, writer):
    writer.write_step(0, StepTables(steps={"reward_mean": 0.0}))
    assert row_of(tmp_path)["n_steps"] == 1
    writer.write_step(1, StepTables(steps={"reward_mean": 1.0}))
    row = row_of(tmp_path)
    assert (row["n_steps"], row["reward_last"]) == (2, 1.0)
    assert row["updated"] >= row["created"]


def test_what_was_not_measured_is_missing_not_zero(tmp_path, writer):
    writer.write_step(0, StepTables())
    row = row_of(tmp_path)
    assert row["n_steps"] == 1
    assert row[["reward_last", "heldout_reward", "n_tokens", "seconds"]].isna().all()


@pytest.mark.parametrize("make", [False, True], ids=["missing", "empty"])
def test_root_without_runs_is_a_frame_with_the_fixed_columns(tmp_path, make):
    root = tmp_path / "runs"
    if make:
        (root / "notes").mkdir(parents=True)
    frame = runs_df(root)
    assert frame.empty
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == DTYPES


def test_broken_runs_are_rows_with_a_reason_beside_whole_ones(tmp_path, writer):
    writer.write_step(0, StepTables(steps={"reward_mean": 1.0}))
    for name in ("no_file", "no_json", "newer", "bad_rows", "bad_date"):
        shutil.copytree(writer.path, tmp_path / name)
    (tmp_path / "no_file" / "run.json").unlink()
    (tmp_path / "no_json" / "run.json").write_text("{")
    (tmp_path / "newer" / "run.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    with closing(sqlite3.connect(tmp_path / "bad_rows" / "run.sqlite")) as db:
        db.execute("UPDATE steps SET reward_mean = 2")
        db.commit()
    info = json.loads((tmp_path / "bad_date" / "run.json").read_text())
    del info["checksum"]
    (tmp_path / "bad_date" / "run.json").write_text(json.dumps(info | {"created": 5}))
    frame = runs_df(tmp_path).set_index("run")
    assert frame["status"].to_dict() == {
        "bad_date": "broken",
        "bad_rows": "broken",
        "demo": "running",
        "newer": "broken",
        "no_file": "broken",
        "no_json": "broken",
    }
    assert "has no run.json" in frame["reason"]["no_file"]
    assert "run.json cannot be read" in frame["reason"]["no_json"]
    assert "upgrade otb-analysis" in frame["reason"]["newer"]
    assert "reward_mean of steps at step 0 is not what was written" in frame["reason"]["bad_rows"]
    assert "created = 5" in frame["reason"]["bad_date"]


def test_run_json_records_where_the_run_came_from(writer):
    info = RunStore(writer.path).info
    assert info["seed"] == 3
    assert info["config"]["task"]["terms"] == [2, 3]
    assert info["schema_version"] == SCHEMA_VERSION
    assert info["packages"]["numpy"]
    assert info["status"] == "running"
    assert pd.Timestamp(info["created"]).tzinfo is not None
    assert info["git"] is None or len(info["git"]["commit"]) == 40


def test_outside_a_repository_git_is_null(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert RunStore(RunWriter.create(tmp_path, "a", {}).path).info["git"] is None


def test_how_a_run_ended_is_recorded(writer):
    writer.finish("failed", "reward of rollout 3 in step 7 is NaN")
    info = RunStore(writer.path).info
    assert (info["status"], info["reason"]) == ("failed", "reward of rollout 3 in step 7 is NaN")


@pytest.mark.parametrize("run", ["", "..", "../x", "a/b", ".hidden", "a b", "a\n", "x" * 129, "é"])
def test_name_that_is_no_plain_directory_name_is_refused(tmp_path, run):
    with pytest.raises(InputError, match="cannot be a directory name") as caught:
        RunWriter.create(tmp_path / "runs", run, {})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_existing_run_is_refused_and_untouched(tmp_path, writer, tables):
    writer.write_step(0, tables(0))
    with pytest.raises(InputError, match=r"run 'demo' already exists"):
        RunWriter.create(tmp_path, "demo", {})
    assert RunStore(writer.path).complete_steps() == [0]


def test_replace_starts_the_run_anew(tmp_path, writer, tables):
    writer.write_step(0, tables(0))
    RunWriter.create(tmp_path, "demo", {"seed": 4}, if_exists="replace")
    store = RunStore(tmp_path / "demo")
    assert store.complete_steps() == []
    assert store.info["seed"] == 4
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]


def test_replace_refuses_what_is_no_run(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(InputError, match="is no run"):
        RunWriter.create(tmp_path, "thesis", {}, if_exists="replace")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_replace_refuses_a_link_to_a_run(tmp_path, writer):
    (tmp_path / "link").symlink_to(writer.path)
    with pytest.raises(InputError, match="will not be replaced"):
        RunWriter.create(tmp_path, "link", {}, if_exists="replace")
    assert writer.path.is_dir()


def test_root_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(StoreError, match="cannot make"):
        RunWriter.create(tmp_path / "runs", "a", {})
    with pytest.raises(StoreError, match="cannot be listed"):
        runs_df(tmp_path / "runs")


def test_other_ranks_join_and_leave_run_json_alone(tmp_path, writer):
    other = RunWriter(tmp_path / "demo", rank=1)
    other.finish("failed", "not mine to say")
    assert RunStore(writer.path).info["seed"] == 3
    assert RunStore(writer.path).info["status"] == "running"


def test_runs_are_found_by_name_setting_and_result(tmp_path):
    for name, rate, heldout in (("otb-0", 1e-3, 0.5), ("otb-1", 1e-4, 0.3), ("rloo-0", 1e-3, 0.7)):
        config = {"estimator": {"name": name[:-2]}, "seed": int(name[-1]), "optimize": {"learning_rate": rate}}
        RunWriter.create(tmp_path, name, config).write_step(0, StepTables(steps={"heldout_reward": heldout}))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")  # it has no seed, so that those of the others are floats
    table = runs_df(tmp_path)
    wanted = {
        "": "broken otb-0 otb-1 rloo-0", "OTB": "otb-0 otb-1", "estimator=otb seed=1": "otb-1",
        "heldout_reward>0.4": "otb-0 rloo-0",
        "optimize.learning_rate<0.001": "otb-1", "seed=0 heldout_reward<0.6": "otb-0",
        "seed>=1": "otb-1", "seed==0 otb": "otb-0", "heldout_reward<=0.5": "otb-0 otb-1", "seed!=0 -": "otb-1",
        "created<2000": "", "created>=2001 rloo": "rloo-0",
    }  # fmt: skip
    assert {asked: " ".join(table["run"][matching(table, asked)]) for asked in wanted} == wanted
    with pytest.raises(InputError, match=r"'learning_rat'; did you mean"):
        matching(table, "learning_rat=1")
    with pytest.raises(InputError, match=r"'heldout_reward>high' .*'high'.* no number"):
        matching(table, "heldout_reward>high")


def test_a_run_that_ended_keeps_its_age_when_its_files_are_copied(tmp_path, writer):
    writer.write_step(0, StepTables(steps={"reward_mean": 0.5}))
    writer.finish()
    ended = row_of(tmp_path)["updated"]
    os.utime(writer.path / "run.sqlite", (2e9, 2e9))  # in 2033
    assert row_of(tmp_path)["updated"] == ended


def test_a_run_that_was_killed_keeps_its_age_when_its_files_are_copied(tmp_path, writer):
    writer.write_step(0, StepTables(steps={"reward_mean": 0.5}))
    written = row_of(tmp_path)["updated"]
    os.utime(writer.path / "run.sqlite", (2e9, 2e9))
    assert row_of(tmp_path)["updated"] == written and written.year < 2033
    with transaction(writer.path, write=True) as db:  # as runs of before, which kept no time
        db.execute("PRAGMA user_version=0")
    os.utime(writer.path / "run.sqlite", (2e9, 2e9))
    assert row_of(tmp_path)["updated"].timestamp() == 2e9
