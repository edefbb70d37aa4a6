"""A changed file is a sentence that names it, or the numbers are right: never other numbers without a word."""

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import (
    RunStore,
    RunWriter,
    StepTables,
    catalogue,
    compact,
    gram_rows,
    layout,
    parts,
    runs_df,
    subgroup_rows,
)
from otb_analysis.store.catalogue import transaction
from otb_analysis.types import Gram

MUTATIONS = 1_000
LABELS = (("otb", "proxy"), ("otb", "exact"), ("rloo", "none"))
GRAM = Gram(np.random.default_rng(0).normal(size=(3, 3, 2, 2)), LABELS, 8)
NUMBERS = ("n_steps", "last_step", "n_tokens", "reward_first", "reward_last", "grad_norm_last")


def all_tables(one, step):
    """Return the tables of a step with rows in every one, attribution and texts included."""
    rng, gram = np.random.default_rng(step), Gram(GRAM.inner * (step + 1), LABELS, 8)
    shares = {name: rng.normal(size=10) for name in ("attribution", "signal", "noise", "contrast")}
    texts = {name: [f"{name} {step}.{n}" for n in range(4)] for name in ("prompt", "completion", "answer")}
    labels = {"estimator": ["otb", "rloo"], "energy_source": ["exact", "none"]}
    return StepTables(
        one.tokens | shares, one.rollouts | texts, one.steps | {"grad_norm": rng.random()},
        gradients=labels | {"variance": rng.random(2), "n_prompts": [2, 2]}, grams=gram_rows(step, gram),
        subgroups=subgroup_rows(step, {2: gram}), sampling={"test": ["temperature"], "score": [rng.random()]},
    )  # fmt: skip


@pytest.fixture
def run(writer, tables):
    """A run of five steps that goes on: the first three are in one file of each large table."""
    for step in range(3):
        writer.write_step(step, all_tables(tables(step), step))
    writer.finish()
    writer = RunWriter.resume(writer.path, 3)
    for step in range(3, 5):
        writer.write_step(step, all_tables(tables(step), step))
    return writer.path


def flip(content, at, bit):
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def test_run_file_that_was_changed_says_how_to_go_on(run):
    path = run / "run.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"seed": 4}))
    with pytest.raises(StoreError, match=r"run.json is broken \(its checksum differs.*delete its checksum if"):
        RunStore(run)
    del info["checksum"]
    path.write_text(json.dumps(info | {"seed": 4}))
    assert RunStore(run).info["seed"] == 4


def test_run_file_from_which_any_piece_with_its_checksum_is_torn_is_no_other_run_file(run):
    path, info, read = run / "run.json", RunStore(run).info, 0
    said = {name: info[name] for name in ("run", "status", "schema_version", "steps")}  # a short one
    layout.write_run_file(run, said)
    text = path.read_text()
    for end in range(1, len(text)):
        for at in range(min(end, text.index('"run"'))):
            try:
                json.loads(text[:at] + text[end:])
            except ValueError:
                continue
            path.write_text(text[:at] + text[end:])
            try:
                assert {name: RunStore(run).info.get(name) for name in said} == said, (at, end)
                read += 1
            except StoreError as error:
                assert str(path) in str(error)
    assert read > 10  # the checksum alone was torn out


def everything(run):
    """Return all that a run says to a new process: frames, Gram matrices, what is held, its line in a list."""
    parts.checksum_of.cache_clear()
    layout._parsed.cache_clear()
    store = RunStore(run)
    frames = {table: store.frame(table) for table in TABLES}
    frames["light"] = store.sql("SELECT step, rollout, reward FROM rollouts ORDER BY ALL")
    frames["list"] = runs_df(run.parent).loc[:, ["status", "reason", *NUMBERS]]
    if frames["list"]["status"].tolist() == ["broken"]:
        raise StoreError(frames["list"]["reason"][0])
    grams = {step: one.inner for step, one in store.grams().items()}
    reduced = {step: one.products for step, one in store.reduced_grams([("rloo", "none")]).items()}
    steps = store.complete_steps(), store.steps_with("tokens", "signal"), store.stored_labels()
    return frames, (grams, reduced, store.subgroup_grams()[2][4].inner, steps), store.info


def same(one, other):
    (frames, grams, info), (others, other_grams, other_info) = one, other
    for table, frame in frames.items():
        pd.testing.assert_frame_equal(frame, others[table], check_exact=True)
    np.testing.assert_equal(grams, other_grams)
    # A key that was damaged in run.json may stand there under another name, the one of the checksum.
    return {name: info.get(name) for name in other_info} == other_info


@pytest.mark.slow
@pytest.mark.heavy
def test_a_thousand_changed_files_are_a_sentence_or_the_right_numbers(run):
    rng, before = np.random.default_rng(20261123), everything(run)
    assert all(len(frame) for frame in before[0].values())
    files = sorted(path for path in run.rglob("*") if path.is_file())
    assert (
        len(files) == 3 * 3 + 3
    )  # of each large table one of three steps and two of one; run.json, run.sqlite, .reserve
    files = [path for path in files for _ in range(5 if path.name == "run.sqlite" else 1) if path.name != ".reserve"]
    sentences, right = dict.fromkeys(files, 0), dict.fromkeys(files, 0)
    for number in range(MUTATIONS):
        path, other = files[number % len(files)], files[rng.integers(len(files))]
        kept = {one: (one.read_bytes(), one.stat()) for one in (path, other)}
        change(path, other, rng)
        if number % 3:  # as a disk changes bits: the file is as old as before
            for one, (_, status) in kept.items():
                os.utime(one, ns=(status.st_atime_ns, status.st_mtime_ns))
        try:
            assert same(everything(run), before), f"change {number} of {path}"
            right[path] += 1
        except StoreError as error:
            sentences[path] += 1
            assert any(str(one) in str(error) for one in kept), f"change {number} of {path}: {error}"
            assert "\n" not in str(error)
        for one, (content, status) in kept.items():
            one.write_bytes(content)
            os.utime(one, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert same(everything(run), before) and sum(sentences.values()) + sum(right.values()) == MUTATIONS
    # Most bytes of a small catalogue hold nothing, and a change there is none; as many as hold something must be told.
    content = np.frombuffer((run / "run.sqlite").read_bytes(), np.uint8)
    least_of = {"run.sqlite": np.count_nonzero(content) / content.size, "run.json": 0.5}
    for path in set(files):
        least = least_of.get(path.name, 0.9)
        assert sentences[path] >= least * (sentences[path] + right[path]), (path, sentences[path], right[path])


def change(path, other, rng):
    """Do to a file one of the things that happen to files; the last one changes another, too."""
    content, others = path.read_bytes(), other.read_bytes()
    at, size = int(rng.integers(len(content))), int(2 ** rng.uniform(0, 12))
    noise, rest = rng.bytes(min(size, len(content) - at)), content[at + size :]
    ways = [
        flip(content, at, int(rng.integers(8))),
        content[:at] + noise + rest,
        content[:at] + bytes(len(noise)) + rest,
        content[:at] + rest,
        content[:at] + noise + content[at:],
        content[:at],
        content + noise,
        others,
    ]
    way = rng.choice(len(ways), p=[0.3, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.15])
    path.write_bytes(ways[way])
    if way == len(ways) - 1 and rng.random() < 0.5:
        other.write_bytes(content)


CHANGES = {
    "a number": "UPDATE steps SET reward_mean = reward_mean + 1e-15 WHERE step = 3",
    "a sign of NaN": "UPDATE rollouts SET reward = NULL WHERE step = 1 AND rollout = 2",
    "a text": "UPDATE rollouts SET completion = completion || ' ' WHERE step = 4 AND rollout = 0",
    "an order": "UPDATE rollouts SET rowid = -rowid WHERE step = 0",
    "a step": "UPDATE steps SET step = 7 WHERE step = 4",
    "a lost row": "DELETE FROM gradients WHERE step = 2 AND estimator = 'rloo'",
    "a lost step": "DELETE FROM written WHERE step = 2",
    "a row too many": 'INSERT INTO rollouts (step, "group", rollout, reward) VALUES (2, 0, 9, 1.0)',
    "a step of minus seven": "INSERT INTO steps (step, reward_mean) VALUES (-7, 1.0)",
    "a file": "UPDATE parts SET file = 'tokens/part-00000004-r0.parquet' WHERE step = 3 AND \"table\" = 'tokens'",
    "a type": "UPDATE rollouts SET reward = 'high' WHERE step = 1",
    "bytes": "UPDATE rollouts SET completion = x'ff00' WHERE step = 1",
    "a column": "ALTER TABLE steps RENAME COLUMN reward_mean TO reward_mxan",
    "a table": "DROP TABLE gradients",
    "a view": "ALTER TABLE steps RENAME TO s; CREATE VIEW steps AS SELECT * FROM s WHERE step < 3",
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_of_the_catalogue_that_somebody_changed_are_a_sentence(run, name):
    with closing(sqlite3.connect(run / "run.sqlite")) as db:
        db.executescript(CHANGES[name])
    with pytest.raises(StoreError, match=r"run\.sqlite (has changed since it was written|cannot be read)") as caught:
        everything(run)
    assert "\n" not in str(caught.value)


OUTSIDE = ["../elsewhere/tokens.parquet", "/etc/passwd", "tokens/../../x.parquet", "steps/part-00000003-r0.parquet",
           "tokens/part-٣-r0.parquet", "", "tokens"]  # fmt: skip


@pytest.mark.parametrize("file", OUTSIDE)
def test_file_outside_the_run_that_somebody_listed_is_not_opened(run, file):
    with transaction(run, write=True) as db:
        others = [part for part in parts.listed(db, run, steps=[3]) if part.table != "tokens"]
        (one,) = parts.listed(db, run, "tokens", [3])
        catalogue.replace_parts(db, parts.as_rows([replace(one, file=file), *others]))
    for read in (RunStore(run).tokens_df, lambda: compact(run), lambda: RunWriter.resume(run, 4)):
        with pytest.raises((StoreError, InputError), match=r"which is no file of it|is being written by") as caught:
            read()
    assert "\n" not in str(caught.value)
