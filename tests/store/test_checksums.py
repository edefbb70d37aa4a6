"""A changed file is a sentence that names it, or the numbers are right: never other numbers without a word."""

import json
import os
import shutil

import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import (
    RunStore,
    RunWriter,
    StepTables,
    checksum,
    compact,
    digest,
    folder,
    gram,
    gram_rows,
    held,
    parts,
    reader,
    runfile,
    runs,
    runs_df,
    subgroup_rows,
    views,
)
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
    """A run of five steps: the first three are compacted."""
    for step in range(3):
        writer.write_step(step, all_tables(tables(step), step))
    writer.finish()
    compact(writer.path)
    writer = RunWriter.resume(writer.path, 3)
    for step in range(3, 5):
        writer.write_step(step, all_tables(tables(step), step))
    writer.finish()
    return writer.path


@pytest.fixture
def by_footers(monkeypatch):
    """Read digests and footers as in a run of thousands of steps."""
    for module, name in ((digest, "FEW"), (held, "FEW"), (reader, "MANY")):
        monkeypatch.setattr(module, name, 0)


def forget_all():
    """Make this process as new: it has read no file."""
    for cache in (checksum._SEALED, digest._SAID, views._SCHEMAS, gram._ORDERS):
        cache.clear()
    for cached in (
        held._steps,
        held._rollouts,
        parts._found_before,
        folder._seen,
        runfile._read,
        views._read_schema,
        runs._kept,
    ):
        cached.cache_clear()


def flip(content, at, bit):
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


@pytest.mark.parametrize("table", ["tokens", "grams"])
def test_every_byte_of_a_part_counts(run, table):
    path = run / table / "part-00000003-r0.parquet"
    content, before = path.read_bytes(), everything(run)
    for at in np.linspace(0, len(content) - 1, 40).astype(int):
        path.write_bytes(flip(content, at, 3))
        with pytest.raises(StoreError, match=f"{path} is broken"):
            everything(run)
    path.write_bytes(content)
    assert same(everything(run), before)


def test_part_under_the_name_of_another_step_is_refused(run):
    shutil.copy(run / "tokens" / "part-00000003-r0.parquet", run / "tokens" / "part-00000004-r0.parquet")
    with pytest.raises(StoreError, match=r"part-00000004-r0.parquet is broken \(its checksum differs"):
        RunStore(run).tokens_df()
    assert len(RunStore(run).tokens_df([0, 3])) == 20


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
    said = {name: info[name] for name in ("run", "status", "schema_version", "compacted")}  # a short one
    runfile.write_run_file(run, said)
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
    forget_all()
    store = RunStore(run)
    frames = {table: store.frame(table) for table in TABLES}
    frames["light"] = store.sql("SELECT * FROM rollouts ORDER BY ALL", texts=False)
    frames["list"] = runs_df(run.parent).loc[:, ["status", "reason", *NUMBERS]]
    if frames["list"]["status"].tolist() == ["broken"]:
        raise StoreError(frames["list"]["reason"][0])
    grams = {step: one.inner for step, one in store.grams().items()}
    return frames, (grams, store.subgroup_grams()[2][4].inner, store.steps_with("tokens", "signal")), store.info


def same(one, other):
    (frames, grams, info), (others, other_grams, other_info) = one, other
    for table, frame in frames.items():
        pd.testing.assert_frame_equal(frame, others[table], check_exact=True)
    np.testing.assert_equal(grams, other_grams)
    # A key that was damaged in run.json may stand there under another name, the one of the checksum.
    return {name: info.get(name) for name in other_info} == other_info


@pytest.mark.slow
@pytest.mark.usefixtures("by_footers")
def test_a_thousand_changed_files_are_a_sentence_or_the_right_numbers(run):
    rng, before = np.random.default_rng(20261123), everything(run)
    assert all(len(frame) for frame in before[0].values())
    files = sorted(path for path in run.rglob("*") if path.is_file())
    assert len(files) == 3 * len(TABLES) + 3  # of each table one of three steps and two of one; run.json, two digests
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
    for path in files:  # a digest is left out, and a `steps` part that it knows is not read
        parts_count = path.suffix != ".digest" and path.parent.name not in ("steps", run.name)
        assert sentences[path] >= 0.9 * (sentences[path] + right[path]) or not parts_count, path


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
