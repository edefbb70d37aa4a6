"""Following a running run: each page opens what was written since, of a long history no more than of a short one."""

import ctypes
import gc
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.statistics import gradient_statistics
from otb_analysis.store import RunWriter, StepTables, gram_rows
from tests.app.conftest import GROUP_SIZE, PROMPTS, synthetic_gram
from tests.app.test_pages import PAGES, open_page, texts

IN_OPEN = 0x20
SHORT, LONG = 78, 158
"""Steps, the second before a measured one; from 64 on small columns are held in memory."""


@contextmanager
def opens(run: Path) -> Iterator[set[str]]:
    """Note every part of a run that is opened, by Python, Arrow or DuckDB: the kernel says so."""
    libc, found = ctypes.CDLL(None, use_errno=True), set[str]()
    queue = libc.inotify_init1(os.O_NONBLOCK)
    if queue < 0:
        pytest.skip("no inotify here")
    tables = {libc.inotify_add_watch(queue, bytes(path), IN_OPEN): path.name for path in run.iterdir() if path.is_dir()}
    try:
        yield found
        while True:
            try:
                events = os.read(queue, 1 << 16)
            except BlockingIOError:
                break
            while events:
                watch, _, _, size = struct.unpack("iIII", events[:16])
                name = events[16 : 16 + size].rstrip(b"\0").decode()
                if name.endswith(".parquet"):
                    found.add(f"{tables[watch]}/{name}")
                events = events[16 + size :]
    finally:
        os.close(queue)


def write(writer: RunWriter, step: int) -> None:
    """Write a step; every tenth is measured."""
    random, n = np.random.default_rng(step), PROMPTS * GROUP_SIZE
    group, rewards = np.arange(n) // GROUP_SIZE, random.integers(0, 2, n).astype(float)
    due = step % 10 == 0
    exact = {"grad_norm_sq": random.lognormal(size=n)} if due else {}
    tokens = {
        "group": group, "rollout": np.arange(n), "turn": [0] * n, "t": [0] * n, "token": ["a"] * n, "mask": [True] * n,
        "reward": rewards, "logprob": -random.exponential(size=n), "energy_proxy": random.random(n),
        "measured_by": ["exact" if due else "none"] * n,
    }  # fmt: skip
    rollouts = {
        "group": group, "rollout": np.arange(n), "prompt_id": [f"p{g}" for g in group], "prompt": ["1+1="] * n,
        "completion": ["2"] * n, "reward": rewards, "length": [1] * n, "finish_reason": ["stop"] * n,
    }  # fmt: skip
    steps = {"reward_mean": rewards.mean(), "grad_norm": random.lognormal(), "n_measured_prompts": PROMPTS * due}
    gradients = grams = None
    if due:
        gram = synthetic_gram(random, PROMPTS)
        rows = [found.as_row() for found in gradient_statistics(gram.inner, gram.labels, gram.n_rollouts)]
        gradients, grams = {name: [row[name] for row in rows] for name in rows[0]}, gram_rows(step, gram)
    writer.write_step(step, StepTables(tokens | exact, rollouts, steps, gradients, grams))


def opened_by_refreshes(root: Path, page: str, query: dict[str, str], steps: int, monkeypatch) -> list[set[str]]:
    """Return the parts that a page opens once another step was written, one that was not measured and one that was."""
    writer = RunWriter.create(root, "run", {"estimator": {"name": "rloo"}})
    for step in range(steps):
        write(writer, step)
    app, found = open_page(root, page, monkeypatch, **query), []
    for step in range(steps, steps + 3):  # what the first one reads for good is not read by the others
        write(writer, step)
        with opens(writer.path) as parts:
            assert not app.run().exception
        found.append(parts)
    return found[1:]


def test_a_step_that_is_written_while_a_page_is_drawn_is_not_missed(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "run", {"estimator": {"name": "rloo"}})
    write(writer, 0)
    app, new = open_page(tmp_path, "run", monkeypatch), iter([2])
    listing = sys.modules["listing"]

    def listed(folder, original=listing.runs_df):
        table = original(folder)
        for step in new:  # once: the run grows after it was looked at
            write(writer, step)
        return table

    monkeypatch.setattr(listing, "runs_df", listed)
    write(writer, 1)
    assert "· 3 steps" in texts(app.run())  # it sees at its end that the run has grown, and is drawn again


def test_what_is_loaded_for_good_is_left_out_of_the_collection_after_every_run(store_root, monkeypatch):
    app, seen = open_page(store_root, "run", monkeypatch), []
    monkeypatch.setattr(gc, "freeze", lambda: seen.append(gc.get_freeze_count()))
    assert gc.get_freeze_count() > 50_000  # half of what Streamlit, pandas and Plotly are made of
    for _ in range(3):
        assert not app.run().exception
    assert len(seen) <= 1  # what the first run of the page loaded


@pytest.mark.parametrize(("page", "query"), [*((page, {}) for page in PAGES), ("estimators", {"part": "Proxy"})])
def test_a_refresh_opens_as_many_parts_of_a_long_run_as_of_a_short_one(page, query, tmp_path, monkeypatch):
    short, long = (
        opened_by_refreshes(tmp_path / str(steps), page, query, steps, monkeypatch) for steps in (SHORT, LONG)
    )
    assert f"steps/part-{LONG + 1:08}-r0.parquet" in long[0]  # what is new was read
    assert len(long[0]) <= len(short[0]) <= 15
    # Proxy and exact norms are compared over all tokens that were measured, once for each measured step.
    assert query or len(long[1]) <= len(short[1])
