import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import sampled
from benchmarks.config import SampledConfig
from benchmarks.publish import run_bench
from benchmarks.sampled import DemoBatch
from otb_analysis.errors import InputError
from otb_analysis.gradients import sampled_score_norms, token_score_norms


@pytest.fixture
def batch(tiny_model):
    """Four completions of six tokens of an untrained tiny model."""
    ids = torch.randint(3, 12, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :3] = False
    return DemoBatch((tiny_model, ids, mask, torch.ones_like(ids)), np.where(mask, 1.0, 0.0))


def test_every_size_measure_is_a_row_whose_stated_error_is_the_one_found(batch, monkeypatch):
    monkeypatch.setattr(sampled, "SHARES", {"uniform": (0.5,), "above_cut": (0.5,)})
    rows, seconds = sampled.bench_sampled(batch, 1)
    assert [(r["by"], r["tokens"]) for r in rows] == [("every token", 24), ("uniform", 12), ("above_cut", 12)]
    assert seconds > 0 and all(r["cost"] > 0 for r in rows)
    assert (rows[0]["cost"], rows[0]["error"], rows[0]["coverage"]) == (1.0, 0.0, 1.0)
    for row in rows[1:]:
        assert 0.6 < row["stated"] / row["error"] < 1.6
        assert 0.7 < row["coverage"] <= 1


def test_a_sample_of_everything_has_no_error(batch):
    norms = sampled_score_norms(*batch.args, tokens=24, by="uniform", proxy=batch.proxy)
    exact = token_score_norms(*batch.args).norm_sq
    row = sampled.sampled_row("uniform", norms, exact, 2.0)
    assert (row["tokens"], row["cost"]) == (24, 2.0)
    assert row["error"] < 1e-12 and row["stated"] < 1e-12


def test_the_report_holds_the_rows_and_the_command_that_made_them(monkeypatch):
    row = {"by": "above_cut", "tokens": 500, "share": 0.1, "cost": 0.12, "error": 0.034, "stated": 0.035}
    monkeypatch.setattr(sampled, "demo_batch", lambda prompts: None)
    monkeypatch.setattr(sampled, "bench_sampled", lambda batch, repeats: ([row | {"coverage": 0.94}], 1.25))
    report = run_bench(SampledConfig(prompts=3, repeats=2))
    assert report.command == "otb bench sampled --prompts 3 --repeats 2"
    assert report.cells == [["above_cut", "500", "10.0%", "12.0%", "3.40%", "3.50%", "94%"]]
    assert "1.2 s" in report.title and json.loads(json.dumps(report.rows))[0]["share"] == 0.1


def test_no_prompts_are_refused():
    with pytest.raises(InputError, match="prompts is 0"):
        run_bench(replace(SampledConfig(), prompts=0))
