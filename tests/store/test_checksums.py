"""A changed file is a sentence that names it, or the numbers are right: never other numbers without a word."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from otb_analysis.errors import StoreError
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore, StepTables, gram_rows
from otb_analysis.types import Gram

MUTATIONS = 1_000
LABELS = (("otb", "proxy"), ("otb", "exact"), ("rloo", "none"))
GRAM = Gram(np.random.default_rng(0).normal(size=(3, 3, 2, 2)), LABELS, 8)


@pytest.fixture
def run(writer, tables):
    for step in range(3):
        one = tables(step)
        writer.write_step(step, StepTables(one.tokens, one.rollouts, one.steps, grams=gram_rows(step, GRAM)))
    writer.finish()
    return writer.path


def flip(content, at, bit):
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


@pytest.mark.parametrize("table", ["tokens", "grams"])
def test_every_byte_of_a_part_counts(run, table):
    path = run / table / "part-00000001-r0.parquet"
    content, before = path.read_bytes(), everything(run)
    for at in np.linspace(0, len(content) - 1, 40).astype(int):
        path.write_bytes(flip(content, at, 3))
        with pytest.raises(StoreError, match=f"{path} is broken"):
            everything(run)
    path.write_bytes(content)
    assert same(everything(run), before)


def test_part_under_the_name_of_another_step_is_refused(run):
    shutil.copy(run / "tokens" / "part-00000000-r0.parquet", run / "tokens" / "part-00000001-r0.parquet")
    with pytest.raises(StoreError, match=r"part-00000001-r0.parquet is broken \(its checksum differs"):
        RunStore(run).tokens_df()
    assert len(RunStore(run).tokens_df([0, 2])) == 20


def test_run_file_that_was_changed_says_how_to_go_on(run):
    path = run / "run.json"
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"seed": 4}))
    with pytest.raises(StoreError, match=r"run.json is broken \(its checksum differs.*delete its checksum if"):
        RunStore(run)
    del info["checksum"]
    path.write_text(json.dumps(info | {"seed": 4}))
    assert RunStore(run).info["seed"] == 4


def everything(run):
    """Return all that a run says: a frame per table, the Gram matrices, run.json."""
    store = RunStore(run)
    frames = {table: store.frame(table) for table in TABLES}
    return frames, {step: gram.inner for step, gram in store.grams().items()}, store.info


def same(one, other):
    (frames, grams, info), (others, other_grams, other_info) = one, other
    for table, frame in frames.items():
        pd.testing.assert_frame_equal(frame, others[table], check_exact=True)
    np.testing.assert_equal(grams, other_grams)
    # A key that was damaged in run.json may stand there under another name, the one of the checksum.
    return {name: info.get(name) for name in other_info} == other_info


@pytest.mark.slow
def test_a_thousand_changed_files_are_a_sentence_or_the_right_numbers(run):
    rng, before = np.random.default_rng(20261123), everything(run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    sentences, copies = 0, 0
    for number in range(MUTATIONS):
        path = files[rng.integers(len(files))]
        content = path.read_bytes()
        copies += path.suffix == ".digest"  # then the parts are read
        path.write_bytes(mutated(content, rng, files[rng.integers(len(files))].read_bytes()))
        try:
            assert same(everything(run), before), f"change {number} of {path}"
        except StoreError as error:
            sentences += 1
            assert str(path) in str(error), f"change {number} of {path}: {error}"
            assert "\n" not in str(error)
        path.write_bytes(content)
    assert sentences > 0.9 * (MUTATIONS - copies)


def mutated(content, rng, other):
    """Return the bytes of a file with one of the things that happen to files."""
    at, size = int(rng.integers(len(content))), int(2 ** rng.uniform(0, 12))
    noise, rest = rng.bytes(min(size, len(content) - at)), content[at + size :]
    return [
        flip(content, at, int(rng.integers(8))),
        content[:at] + noise + rest,
        content[:at] + bytes(len(noise)) + rest,
        content[:at] + rest,
        content[:at] + noise + content[at:],
        content[:at],
        other,
    ][rng.choice(7, p=[0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])]
