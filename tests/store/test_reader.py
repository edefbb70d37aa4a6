"""Readers: pruning, SQL that can change nothing and reach nothing, and files of every age and state."""

import threading

import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.store import RolloutFilter, RunStore, RunWriter, StepTables, find_rollouts, runs_df


@pytest.fixture
def store(writer, tables):
    for step in range(3):
        writer.write_step(step, tables(step))
    return RunStore(writer.path)


def test_steps_columns_and_condition_narrow_the_answer(store):
    frame = store.tokens_df(steps=[2, 1, 99], columns=["t", "step"], where="t >= ? AND mask", params=[2])
    assert list(frame.columns) == ["t", "step"]
    # Rollout 0 has tokens 0–2 and rollout 3 tokens 0–3: three tokens with t ≥ 2 in each step.
    assert frame["step"].tolist() == [1, 1, 1, 2, 2, 2]
    assert frame["t"].tolist() == [2, 2, 3] * 2


def test_every_table_has_a_frame_and_a_view(store):
    assert len(store.rollouts_df()) == 12
    assert len(store.steps_df()) == 3
    assert store.gradients_df().empty and store.sql("select * from grams").empty
    answer = store.sql("SELECT r.step, count(*) AS n FROM rollouts r JOIN tokens USING (step, rollout) GROUP BY ALL")
    assert answer["n"].tolist() == [10, 10, 10]


def test_parameters_are_values_never_sql(store):
    assert store.tokens_df(where="token = $token", params={"token": "x' OR true --"}).empty


def test_unknown_column_names_the_nearest(store):
    with pytest.raises(InputError, match=r"no column 'grad_norm'; .*'grad_norm_sq'"):
        store.tokens_df(columns=["grad_norm"])
    with pytest.raises(InputError, match=r'"los" not found.*Candidate bindings: "loss"'):
        store.sql("SELECT los FROM steps")


def test_unknown_run_names_the_nearest(tmp_path, writer):
    with pytest.raises(InputError, match=r"there is no run 'dmeo' in .*; did you mean 'demo'"):
        RunStore(tmp_path / "dmeo")
    with pytest.raises(InputError, match="there are no runs"):
        RunStore(tmp_path / "nowhere" / "demo")


@pytest.mark.parametrize(
    "query",
    [
        "COPY tokens TO '{run}/out.csv'",
        "ATTACH '{run}/new.db'",
        "DELETE FROM tokens",
        "DROP VIEW tokens",
        "CREATE TABLE mine AS SELECT 1",
        "INSERT INTO tokens VALUES (1)",
        "SET memory_limit='64GB'",
        "PRAGMA enable_profiling",
        "INSTALL httpfs",
        "EXPLAIN ANALYZE COPY tokens TO '{run}/out.csv'",
        "SELECT 1; DROP VIEW tokens",
        "SELECT 1; SELECT 2",
        "",
        "-- nothing",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('{root}/demonstration/run.json')",
        "SELECT * FROM '{root}/demonstration/run.json'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM read_text('{run}/../demonstration/run.json')",
        "SELECT * FROM read_text('{run}/tokens/../../demonstration/run.json')",
        "SELECT * FROM read_csv('https://example.org/x.csv')",
        "SELECT * FROM secret_frame, tokens",
        "SELECT * FROM query('DROP VIEW tokens')",
        "selec",
    ],
)
def test_query_that_is_more_than_reading_this_run_is_refused(tmp_path, store, query):
    secret_frame = store.steps_df()
    RunWriter.create(tmp_path, "demonstration", {})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as caught:
        store.sql(query.format(run=store.path, root=tmp_path))
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert len(store.steps_df()) == len(secret_frame)


@pytest.mark.parametrize("where", ["true; DROP VIEW tokens", "true); DROP VIEW tokens --", "t = 'x'", "nowhere"])
def test_condition_that_is_none_is_refused(store, where):
    with pytest.raises(InputError):
        store.tokens_df(columns=["t"], where=where)
    assert len(store.tokens_df(where="true -- a comment")) == 30


def test_describe_is_reading(store):
    assert "grad_norm_sq" in store.sql("DESCRIBE tokens")["column_name"].tolist()


def test_step_written_again_replaces_the_old_one(store, writer):
    writer.write_step(1, StepTables(steps={"loss": 7.0}))
    assert store.tokens_df()["step"].unique().tolist() == [0, 2]
    assert store.steps_df(steps=[1])["loss"].tolist() == [7.0]


def test_new_steps_and_columns_are_seen_by_an_open_reader(store, writer):
    assert len(store.sql("SELECT * FROM steps")) == 3
    writer.write_step(3, StepTables(steps={"reward_format": 1.0}))
    assert store.sql("SELECT reward_format FROM steps")["reward_format"].tolist()[3] == 1.0


def test_names_with_signs_of_sql_and_globs_are_only_names(tmp_path, tables):
    root = tmp_path / "it's" / "a=b[1]*"
    writer = RunWriter.create(root, "run=1", {})
    writer.write_step(0, tables(0))
    store = RunStore(writer.path)
    assert len(store.tokens_df()) == 10
    assert "a" not in store.steps_df().columns


def test_relative_paths_are_fine(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(RunStore("demo").steps_df()) == 3
    assert len(RunStore("../" + tmp_path.name + "/demo").steps_df()) == 3


def test_token_text_is_only_text(writer):
    text = ["<script>alert(1)</script>", "\x00\n\t", "🔬", "'; DROP TABLE tokens", ""]
    n = len(text)
    keys = {"group": [0] * n, "rollout": [0] * n, "turn": [0] * n, "t": range(n)}
    writer.write_step(0, StepTables(tokens=keys | {"token": text}))
    assert RunStore(writer.path).tokens_df()["token"].tolist() == text


def test_memory_limit_that_is_no_amount_is_refused(store):
    with pytest.raises(InputError, match="memory_limit is 'lots'"):
        RunStore(store.path, memory_limit="lots").sql("SELECT 1")


def test_answer_beyond_the_memory_limit_is_a_sentence(store):
    small = RunStore(store.path, memory_limit="16MB")
    with pytest.raises(StoreError, match="needs more memory than allowed"):
        small.sql("SELECT list(a.range) FROM range(3000000) a GROUP BY a.range % 3")


def test_threads_share_a_store_while_a_writer_adds_steps(store, writer, tables):
    failures, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            counts = store.sql(
                "SELECT s.step, count(t.t) AS n FROM steps s LEFT JOIN tokens t USING (step) GROUP BY ALL"
            )
            if (counts["n"] != 10).any() or len(counts) < 3:
                failures.append(counts)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(3, 20):
        writer.write_step(step, tables(step))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(store.steps_df()) == 20


SLOW = "SELECT count(*) AS n FROM steps, range(100000000) a, range(100000) b WHERE a.range * b.range % 7 = step"


def test_query_ends_after_the_seconds_it_may_take_and_the_reader_goes_on(store):
    with pytest.raises(InputError, match=r"took longer than 0\.2 s"):
        store.sql(SLOW, seconds=0.2)
    assert store.sql("SELECT count(*) AS n FROM steps", seconds=5)["n"].tolist() == [3]


def test_answer_is_read_no_further_than_asked(store):
    endless = store.sql("SELECT range AS n FROM range(1000000000000)", rows=5_000)
    assert endless["n"].tolist() == list(range(5_000))
    few = store.sql("SELECT * FROM steps ORDER BY step; -- all", rows=5_000)
    pd.testing.assert_frame_equal(few, store.sql("SELECT * FROM steps ORDER BY step"))
    none = store.sql("SELECT step FROM steps WHERE false", rows=5)
    assert none.empty and list(none.columns) == ["step"]


@pytest.mark.parametrize(
    ("cell", "size"),
    [
        ("repeat('x', 1000)", 1000), ("[repeat('x', 500), repeat('y', 500)]", 1000), ("{'a': repeat('x', 1000)}", 1000),
        ("[{'a': [repeat('x', 1000)]}]", 1000), ("encode(repeat('x', 1000))", 1000), ("range", 8), ("NULL", 8),
        ("MAP {'a': repeat('x', 1000)}", 1000), ("range::DOUBLE", 8), ("list_value(1, NULL, range)", 24),
    ],
)  # fmt: skip
def test_larger_answer_is_refused_wherever_its_bytes_are(store, cell, size):
    query = f"SELECT {cell} AS a FROM range(4000)"
    with pytest.raises(InputError, match=r"is larger than .* MB"):
        store.sql(query, megabytes=4000 * size * 0.9e-6)
    assert len(store.sql(query, megabytes=4000 * (size + 100) * 1.1e-6)) == 4000
    assert len(store.sql(f"{query} LIMIT 1000", rows=100, megabytes=4000 * size * 0.9e-6)) == 100
    assert store.sql("SELECT range AS n FROM range(1000000000000)", rows=5_000, megabytes=1)["n"].iloc[-1] == 4_999


def test_links_lead_nowhere(tmp_path, tmp_path_factory, store):
    other = RunWriter.create(tmp_path_factory.mktemp("elsewhere"), "secret", {}).path
    (other / "notes.txt").write_text("secret")
    (store.path / "link").symlink_to(other)
    with pytest.raises(InputError, match="cannot be run"):
        store.sql(f"SELECT * FROM read_text('{store.path}/link/notes.txt')")
    part = store.path / "tokens" / "part-00000001-r0.parquet"
    part.rename(other / part.name)
    part.symlink_to(other / part.name)
    with pytest.raises(StoreError, match=f"{part} is a link"):
        store.tokens_df()
    (tmp_path / "linked").symlink_to(other)
    listed = runs_df(tmp_path).set_index("run")
    assert listed.loc["linked", "status"] == "broken" and "is a link out of" in listed.loc["linked", "reason"]


def test_what_was_written_of_a_table_changes_only_with_its_own_steps(tmp_path):
    writer = RunWriter.create(tmp_path, "run", {"seed": 0})
    row = {"estimator": ["rloo"], "energy_source": ["none"], "variance": [1.0]}
    run = RunStore(tmp_path / "run")
    writer.write_step(0, StepTables(steps={"reward_mean": 0.0}, gradients=row))
    first = run.change_token("gradients", "grams")
    writer.write_step(1, StepTables(steps={"reward_mean": 0.0}))
    assert run.change_token("gradients", "grams") == first
    writer.write_step(2, StepTables(steps={"reward_mean": 0.0}, gradients=row))
    assert run.change_token("gradients", "grams") != first


def test_step_that_was_not_finished_is_invisible(store, writer):
    (store.path / "tokens" / "part-00000003-r0.parquet").write_bytes(b"PAR1 half")
    for name in (".part-00000001-r0.parquet.77.tmp", "notes.txt", "part-00000009-r0.parquet"):
        (store.path / "tokens" / name).write_bytes(b"half")
    assert store.complete_steps() == [0, 1, 2] and len(store.tokens_df()) == 30
    RunWriter.resume(writer.path, 3)
    left = sorted(path.name for path in (store.path / "tokens").iterdir())
    assert left == ["notes.txt", *(f"part-0000000{step}-r0.parquet" for step in range(3))]


@pytest.mark.parametrize("ranks", [2, 64])
def test_all_ranks_of_a_step_are_read(tmp_path, tables, ranks):
    first = RunWriter.create(tmp_path, "many", {})
    first.size, others = ranks, [RunWriter(first.path, rank=rank, size=ranks) for rank in range(1, ranks)]
    for step in range(2):
        files = list[str]()
        for writer in others:
            other = tables(step + 4 + writer.rank)
            rollouts = other.rollouts | {"rollout": range(4 * writer.rank, 4 * writer.rank + 4), "mine": ["x"] * 4}
            files += writer.write_step(step, StepTables(other.tokens, rollouts, {"loss": 9.0}))
        assert RunStore(first.path).complete_steps() == list(range(step))
        first.write_step(step, tables(step, loss=1.0), [None, files][step])
    store = RunStore(first.path)
    for _ in range(2):
        assert store.tokens_df()["step"].value_counts().to_dict() == {0: 10 * ranks, 1: 10 * ranks}
        assert store.rollouts_df([1])["rollout"].tolist() == list(range(4 * ranks))
        assert store.rollouts_df([1])["mine"].isna().sum() == 4 and store.steps_df()["loss"].tolist() == [1.0, 1.0]
        first.finish()
    assert not (store.path / "rollouts").exists()


def test_a_rank_whose_file_is_not_seen_is_no_smaller_step(tmp_path, tables):
    first = RunWriter.create(tmp_path, "two", {})
    second = RunWriter(first.path, rank=1, size=2)
    first.size, files = 2, second.write_step(0, tables(5))
    (first.path / files[0]).rename(tmp_path / "elsewhere")  # a folder of the other machine's own
    with pytest.raises(StoreError, match=rf"cannot write step 0 .*another process wrote {files[0]}"):
        first.write_step(0, tables(0), files)
    assert RunStore(first.path).complete_steps() == []
    (tmp_path / "elsewhere").rename(first.path / files[0])
    first.write_step(0, tables(0), files)
    assert len(RunStore(first.path).tokens_df()) == 20


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "gone", "another"])
def test_broken_file_is_named_and_the_rest_stays_readable(store, damage):
    path = store.path / "tokens" / "part-00000001-r0.parquet"
    whole, other = path.read_bytes(), path.with_name("part-00000002-r0.parquet").read_bytes()
    wrong = {"empty": b"", "truncated": whole[: len(whole) // 2], "flipped": whole[:20] + b"\xff" * 9 + whole[29:]}
    path.write_bytes((wrong | {"another": other}).get(damage, b""))
    if damage == "gone":
        path.unlink()
    for read in (store.tokens_df, lambda: store.sql("SELECT * FROM tokens")):
        with pytest.raises(StoreError, match=rf"{path.name} (has changed|is missing)") as caught:
            read()
        assert "\n" not in str(caught.value)
    assert len(store.steps_df()) == 3
    assert len(store.tokens_df(steps=[0, 2])) == 20


def test_query_opens_no_file_of_other_steps_or_of_tables_it_does_not_name(store):
    for step in (0, 2):
        (store.path / "tokens" / f"part-{step:08d}-r0.parquet").write_bytes(b"broken")
    assert store.sql("SELECT count(*) AS n FROM tokens", steps=[1])["n"].tolist() == [10]
    assert store.sql("SELECT n_tokens, n_rollouts FROM steps")["n_tokens"].tolist() == [10, 10, 10]
    assert find_rollouts(store, RolloutFilter(steps=(2, 2)))[1] == 4
    with pytest.raises(StoreError, match=r"part-00000000-r0\.parquet has changed"):
        store.sql("SELECT count(*) FROM tokens")


def test_scalars_of_every_kind_come_back_and_new_columns_are_null_before(tmp_path):
    writer = RunWriter.create(tmp_path, "long", {})
    for step in range(130):
        scalars = {"loss": [0.1, np.nan, np.inf, None][step % 4], "n_tokens": 2**60 + step, "clipped": step % 3 == 0}
        extra = {"reward_format": step / 3} if step > 40 else {"note": "a\n\u202e€ \x00\x18"} if step < 9 else {}
        odd = {"reward_list": [1.0, 2.0], "whole": 3} if step == 100 else {"whole": 2.5} if step > 100 else {}
        writer.write_step(step, StepTables(steps=scalars | extra | odd))
    store = RunStore(writer.path)
    whole = store.steps_df()
    assert whole["n_tokens"].tolist() == [2**60 + step for step in range(130)]
    assert whole["clipped"].tolist() == [step % 3 == 0 for step in range(130)]
    np.testing.assert_array_equal(whole["reward_format"][41:], np.arange(41, 130) / 3)
    assert whole["note"][:9].tolist() == ["a\n\u202e€ \x00\x18"] * 9 and whole["note"][9:].isna().all()
    assert whole["reward_list"].dropna().tolist() == ["[1.0, 2.0]"] and whole["whole"][100:103].tolist() == [
        3,
        2.5,
        2.5,
    ]
    assert store.sql("SELECT count(*) AS n FROM steps WHERE isnan(loss)")["n"].tolist() == [33]
    assert store.sql("SELECT count(*) AS n FROM steps WHERE loss IS NULL")["n"].tolist() == [32]
    some = store.steps_df([*range(0, 130, 2), 129], ["step", "loss"])
    assert some["step"].tolist() == [*range(0, 130, 2), 129]
    writer.write_step(130, StepTables(steps={"loss": 3.0}))
    writer.write_step(5, StepTables(steps={"loss": 4.0}))
    again = store.steps_df()
    assert len(again) == 131 and again["loss"].tolist()[5] == 4.0 and again["loss"].tolist()[130] == 3.0
    with pytest.raises(InputError, match=r"'whole' .*held numbers before"):
        writer.write_step(131, StepTables(steps={"whole": "three"}))
    assert store.complete_steps()[-1] == 130


def test_rollouts_of_every_kind_come_back(tmp_path):
    writer, written = RunWriter.create(tmp_path, "many", {"seed": 0}), []
    for step in range(80):
        columns: dict[str, object] = {"group": [0, 0, 1, 2**40], "rollout": [0, 1, 2, 3], "completion": ["x"] * 4}
        columns |= {"reward": [0.1, np.nan, np.inf, -1 / 3], "length": [1, None, 3, 2**31 - 1]} if step % 7 else {}
        columns |= {"prompt_id": ["a\n\u202e€", None, "\x18", ""]} if step % 5 else {}
        writer.write_step(step, StepTables(rollouts=columns))
        written.append(pd.DataFrame({name: columns.get(name) for name in ("group", "reward", "length", "prompt_id")}))
    read = RunStore(writer.path).sql('SELECT "group", reward, length, prompt_id FROM rollouts ORDER BY step, rollout')
    expected = pd.concat([frame.astype(object) for frame in written], ignore_index=True)
    for name in expected:
        plain = [[None if pd.isna(value) else value for value in frame[name]] for frame in (read, expected)]
        assert plain[0] == plain[1], name


def test_following_a_run_reads_what_is_new(store, writer, tables):
    seen = store.complete_steps()[-1]
    writer.write_step(3, tables(3))
    (new,) = [step for step in store.complete_steps() if step > seen]
    assert store.rows("rollouts", ["step", "reward"], range(seen + 1, new + 1))["step"].to_pylist() == [3] * 4
