"""A full disk, a dead process: one sentence, and everything complete stays readable."""

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.errors import StoreError
from otb_analysis.store import RunStore, StepTables, gram_rows, runs_df
from otb_analysis.store import writer as writer_module
from otb_analysis.types import Gram

REPOSITORY = Path(__file__).parents[2]

WRITE = """
import sys
import numpy as np
from otb_analysis.store import RunWriter, StepTables

def tables(n):
    rng = np.random.default_rng(0)
    keys = {name: np.zeros(n, dtype=np.int64) for name in ("group", "rollout", "turn")}
    return StepTables(tokens=keys | {"t": np.arange(n), "logprob": rng.normal(size=n)}, steps={"n_tokens": n})
"""

FULL = """
import resource, signal
from otb_analysis.errors import StoreError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = RunWriter.create(sys.argv[1], "demo", {})
writer.write_step(0, tables(100))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
try:
    writer.write_step(1, tables(100_000))
except StoreError as error:
    print(error)
    writer.finish("failed", str(error))
"""

ENDLESS = """
writer = RunWriter.create(sys.argv[1], "demo", {})
for step in range(100_000):
    writer.write_step(step, tables(20_000))
    print(step, flush=True)
"""


def command(script, root):
    return [sys.executable, "-c", textwrap.dedent(WRITE + script), str(root)]


def environment():
    return os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def files(root):
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def test_system_that_refuses_to_write_more_leaves_the_earlier_step_and_a_sentence(tmp_path):
    done = subprocess.run(command(FULL, tmp_path), env=environment(), capture_output=True, text=True, check=True)
    (sentence,) = done.stdout.splitlines()
    assert f"cannot write step 1 to {tmp_path / 'demo'} (File too large)" in sentence
    assert "steps up to 0 are complete and readable" in sentence
    store = RunStore(tmp_path / "demo")
    assert len(store.tokens_df()) == 100
    assert store.info["status"] == "failed"
    assert files(tmp_path / "demo") == ["run.json", "run.sqlite", "tokens/part-00000000-r0.parquet"]


@pytest.mark.parametrize("full_at", ["tokens", "grams", "the catalogue"])
def test_disk_full_in_any_table_removes_the_whole_step(writer, tables, monkeypatch, full_at):
    writer.write_step(0, tables(0))
    before = files(writer.path)
    _fill_disk_at(monkeypatch, full_at)
    one = tables(1)
    gram = Gram(np.eye(2).reshape(1, 1, 2, 2), (("rloo", "none"),), 4)
    with pytest.raises(StoreError, match=r"No space left.*up to 0 are complete") as caught:
        writer.write_step(1, StepTables(one.tokens, one.rollouts, one.steps, grams=gram_rows(1, gram)))
    assert "\n" not in str(caught.value)
    assert files(writer.path) == before
    monkeypatch.undo()
    writer.write_step(1, tables(1))
    assert RunStore(writer.path).complete_steps() == [0, 1]


def test_disk_full_at_the_first_step_says_that_nothing_was_written(writer, tables, monkeypatch):
    _fill_disk_at(monkeypatch, "tokens")
    with pytest.raises(StoreError, match="no earlier step was written"):
        writer.write_step(0, tables(0))


def test_disk_full_at_the_end_keeps_run_json_and_steps(writer, tables, monkeypatch):
    writer.write_step(0, tables(0))
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(StoreError, match=r"run is complete \(No space left"):
        writer.finish()
    monkeypatch.undo()
    store = RunStore(writer.path)
    assert store.info["status"] == "running"
    assert len(store.steps_df()) == 1
    assert not [name for name in files(writer.path) if "tmp" in name]


def test_room_is_set_aside_until_the_run_ends(writer):
    assert (writer.path / ".reserve").stat().st_size > (writer.path / "run.json").stat().st_size
    writer.finish()
    assert files(writer.path) == ["run.json", "run.sqlite"]


def test_interrupt_in_the_middle_of_a_part_leaves_no_temporary_file(writer, tables, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("otb_analysis.atomic.os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.write_step(0, tables(0))
    assert files(writer.path) == [".reserve", "run.json", "run.sqlite"]


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.011])
def test_process_killed_in_the_middle_of_writing_leaves_a_readable_run(tmp_path, seconds):
    with subprocess.Popen(command(ENDLESS, tmp_path), env=environment(), stdout=subprocess.PIPE, text=True) as process:
        printed = [int(process.stdout.readline()) for _ in range(4)]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        printed += [int(line) for line in process.stdout if line.endswith("\n")]
    store = RunStore(tmp_path / "demo")
    steps = store.complete_steps()
    # The process may die between a step's last rename and its line.
    assert steps in (printed, [*printed, len(printed)])
    counts = store.sql("SELECT step, count(*) AS n FROM tokens GROUP BY step ORDER BY step")
    assert counts["step"].tolist() == steps
    assert (counts["n"] == 20_000).all()
    assert runs_df(tmp_path)["n_steps"].tolist() == [len(steps)]


RESUMED = """
import os
from pathlib import Path

path = Path(sys.argv[1]) / "demo"
for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        print("killed", flush=True)
        continue
    writer = RunWriter.resume(path, int(line)) if path.exists() else RunWriter.create(sys.argv[1], "demo", {})
    os.write(1, f"{os.getpid()}\\n".encode())  # a whole line at a time
    for step in range(int(line), 100_000):
        writer.write_step(step, tables(20_000))
        os.write(1, f"{step}\\n".encode())
"""
"""For each number of steps on its standard input, a fork that goes on behind them until it is killed."""


@pytest.fixture
def forking(tmp_path):
    """The process whose forks write."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command(RESUMED, tmp_path), env=environment(), text=True, bufsize=1, **pipes) as process:
        yield process


@pytest.mark.slow
def test_writer_killed_twenty_times_loses_no_complete_step_and_leaves_a_readable_run(tmp_path, forking):
    rng, kept = np.random.default_rng(0), 0
    for _ in range(20):
        forking.stdin.write(f"{kept}\n")
        child = int(forking.stdout.readline())
        lines = [forking.stdout.readline() for _ in range(rng.integers(3))]  # on a slow machine, too
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        printed = [int(line) for line in (*lines, *iter(forking.stdout.readline, "killed\n"))]
        store = RunStore(tmp_path / "demo")
        steps = store.complete_steps()
        # The process may die between a step's last rename and its line.
        assert steps in (list(range(kept + len(printed))), list(range(kept + len(printed) + 1)))
        counts = store.sql(
            "SELECT step, count(*) AS n, count(logprob) AS known FROM tokens GROUP BY step ORDER BY step"
        )
        assert counts["step"].tolist() == steps == store.steps_df()["step"].tolist()
        assert (counts["n"] == 20_000).all() and (counts["known"] == 20_000).all()
        assert store.live_status[0] == "stopped" and runs_df(tmp_path)["n_steps"].tolist() == [len(steps)]
        kept = len(steps)
    assert kept > 10


def _no_space(*args):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fill_disk_at(monkeypatch, where):
    """Make the disk full in the middle of one table's file, or of the transaction."""
    real, add = writer_module.atomic_file, writer_module.catalogue.add_step

    @contextmanager
    def filling(path):
        with real(path) as file:
            if path.parent.name == where:
                file.write(b"PAR1 and then no more")
                _no_space()
            yield file

    def adding(*given):
        add(*given)
        if where == "the catalogue":
            raise sqlite3.OperationalError("No space left on device")

    monkeypatch.setattr(writer_module, "atomic_file", filling)
    monkeypatch.setattr(writer_module.catalogue, "add_step", adding)
