"""A typed query runs in a process of its own: the same answers and sentences, and memory that nothing escapes."""

import resource
import sys
import time
from threading import Timer

import pytest

from otb_analysis.errors import InputError, StoreError
from otb_analysis.store import RunStore
from otb_analysis.store.asked import ASKED_PROCESS, SENT, asked_sql

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no process")


@pytest.fixture
def run(writer, tables):
    writer.write_step(0, tables(0))
    writer.finish()
    return writer.path


def test_the_answer_is_that_of_the_store_with_its_types(run):
    query = "SELECT rollout, mask, token, grad_norm_sq, [t, 1] AS list, {'a': t} AS struct FROM tokens ORDER BY ALL"
    expected = RunStore(run).sql(query)
    answer = asked_sql(run, query)
    assert list(answer.dtypes) == list(expected.dtypes)
    assert answer.astype(str).equals(expected.astype(str)) and len(answer) == 10


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT 1; SELECT 2", "the query holds SELECT, SELECT; pass one SELECT"),
        ("SELECT * FROM read_text('/etc/passwd')", "the query cannot be run"),
        ("SELECT \ud800", "the query cannot be run"),
        (
            "WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
            "longer than 0.5 s",
        ),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(run, query, said):
    with pytest.raises(InputError, match=said) as caught:
        asked_sql(run, query, seconds=0.5)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits a process's data")
def test_values_that_are_computed_take_no_more_memory_than_the_process_may_have(run):
    with pytest.raises(StoreError, match="more memory than allowed"):
        asked_sql(run, "SELECT max(length(repeat('x', 1000000) || range::VARCHAR)) FROM range(20480)")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 1.2 * ASKED_PROCESS


def test_a_process_that_dies_is_a_sentence(run, monkeypatch):
    monkeypatch.setattr("otb_analysis.store.asked.sys.executable", "false")
    with pytest.raises(StoreError, match="needs more memory than allowed"):
        asked_sql(run, "SELECT 1")


@pytest.mark.parametrize("work", ["pass", "time.sleep(60)"])
def test_a_bound_holds_within_two_seconds_of_a_process_that_starts_slowly(run, tmp_path, monkeypatch, work):
    slow = tmp_path / "python"  # takes longer to start than the query may, and then works without being interrupted
    body = f"import sys, time; time.sleep(3); print('.', end='', flush=True); sys.stdin.read(); {work}"
    slow.write_text(f"#!{sys.executable}\n{body}\nimport pickle; sys.stdout.buffer.write(pickle.dumps(7))\n")
    slow.chmod(0o755)
    monkeypatch.setattr("otb_analysis.store.asked.sys.executable", str(slow))
    ready = []

    class Noted(Timer):
        def cancel(self):
            ready.append(time.monotonic())
            super().cancel()

    monkeypatch.setattr("otb_analysis.store.asked.Timer", Noted)
    if work == "pass":
        assert asked_sql(run, "SELECT 1", seconds=1) == 7
    else:
        with pytest.raises(InputError, match="took longer than 1 s"):
            asked_sql(run, "SELECT 1", seconds=1)
        assert time.monotonic() - ready[0] < 1 + SENT + 2  # two seconds for what the machine does beside
