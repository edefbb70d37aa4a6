"""The logits table: rows, the plain way, and a peer that was not given."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import logits
from benchmarks.config import LogitsConfig
from benchmarks.publish import run_bench
from otb_analysis.errors import InputError

TINY = LogitsConfig(vocabularies=(50,), rows=6, width=4, dtypes=("float32",), threads=(1,), repeats=2)


@pytest.fixture
def no_memory(monkeypatch):
    """Fresh processes take seconds each; the table is tested without them."""
    monkeypatch.setattr(logits, "in_fresh_process", lambda call, *args: 600)


def test_plain_way_is_the_log_probability_of_the_drawn_token():
    # Logits (log 3, 0): π = (3/4, 1/4).
    got = logits.plain_from_logits(torch.tensor([[math.log(3), 0.0]] * 2), torch.tensor([0, 1]))
    torch.testing.assert_close(got, torch.tensor([math.log(3 / 4), math.log(1 / 4)]))


def test_every_way_has_a_row_with_its_ratio_memory_and_error(no_memory):
    report = run_bench(TINY)
    rows = {row["name"]: row for row in report.rows}
    assert list(rows) == [*logits.PLAIN.values(), *logits.OURS.values(), logits.TRL]
    for source in ("logits", "hidden"):
        plain, ours = rows[logits.PLAIN[source]], rows[logits.OURS[source]]
        assert plain["to_plain"] == 1
        assert ours["to_plain"] == pytest.approx(ours["seconds"] / plain["seconds"])
        assert ours["memory"] == 600 / (4 * 6 * 50)
        assert 0 <= ours["error"] < 2e-6
    assert report.cells[-1][3:] == [logits.TRL, "not measured", "–", "–", "–", "–"]
    assert any("--trl-python" in note for note in report.notes)
    assert any(note.startswith("Not measured on a GPU") for note in report.notes)


def test_bfloat16_logits_of_the_plain_way_are_rounded_and_ours_are_not(no_memory):
    report = run_bench(replace(TINY, dtypes=("bfloat16",), width=64, vocabularies=(500,)))
    errors = {row["name"]: row["error"] for row in report.rows}
    assert errors[logits.OURS["hidden"]] < 2e-6 < 1e-4 < errors[logits.PLAIN["hidden"]]


def test_memory_is_that_of_the_call_of_its_row(monkeypatch):
    monkeypatch.setattr(logits, "peak", lambda run, device: (run().logprob.shape, device))
    inputs = {"rows": 6, "width": 4, "vocabulary": 50, "dtype": "float32", "device": "cpu"}
    assert logits.peak_of(inputs, logits.OURS["hidden"]) == ((6,), "cpu")


def test_sizes_must_be_positive():
    with pytest.raises(InputError, match="--rows is 0"):
        run_bench(replace(TINY, rows=0))
