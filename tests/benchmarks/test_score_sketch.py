"""Errors of sketched norms: what is stated is what is found, and the table says which command made it."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import score_sketch
from benchmarks.config import ScoreSketchConfig
from benchmarks.demo_batch import DemoBatch
from benchmarks.publish import run_bench
from benchmarks.score_sketch import bench_score_sketch
from otb_analysis.errors import InputError


def test_rows_hold_found_and_stated_errors():
    torch.manual_seed(0)
    config = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 17}
    model = Qwen2ForCausalLM(Qwen2Config(**config, num_key_value_heads=1, intermediate_size=24)).eval()
    ids = torch.randint(17, (3, 10))
    mask = torch.arange(10).expand(3, 10) > 2
    batch = DemoBatch((model, ids, mask, torch.ones_like(ids)), mask.numpy() * 1.0)
    rows = bench_score_sketch(batch, directions=(16,), seeds=6)
    assert [(r["method"], r["directions"], r["tokens"]) for r in rows] == [("hybrid", 16, 21), ("rank_one", 16, 21)]
    assert all(0.6 < r["error"] / r["stated"] < 1.6 and abs(r["mean"]) < r["error"] for r in rows)


def test_the_report_holds_the_rows_and_the_command_that_made_them(monkeypatch):
    row = {"method": "hybrid", "directions": 8, "tokens": 375, "error": 0.2468, "stated": 0.2421, "mean": 0.0057}
    monkeypatch.setattr(score_sketch, "demo_batch", lambda prompts, group_size: None)
    monkeypatch.setattr(score_sketch, "bench_score_sketch", lambda batch, directions, seeds: [row])
    found = run_bench(ScoreSketchConfig(prompts=3, directions=(8,), repeats=2))
    assert found.command == "otb bench score-sketch --prompts 3 --directions 8 --repeats 2"
    assert found.cells == [["hybrid", "8", "375", "0.247", "0.242", "+0.006"]]
    assert (found.name, found.notes[-1]) == ("score_sketch", "Not measured on a GPU.")


@pytest.mark.parametrize("change", [{"prompts": 0}, {"repeats": 0}, {"directions": (8, 0)}, {"directions": ()}])
def test_settings_below_one_are_refused(change):
    with pytest.raises(InputError, match=f"--{next(iter(change))} is 0"):
        run_bench(replace(ScoreSketchConfig(), **change))
