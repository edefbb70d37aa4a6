"""Errors of sketched norms: what is stated is what is found, and the table says which command made it."""

import json

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from otb_analysis.bench.score_sketch import COMMAND, bench_score_sketch, publish_score_sketch
from otb_analysis.bench.sketch import SketchBatch


def test_rows_hold_found_and_stated_errors_and_are_published_with_their_command(tmp_path):
    torch.manual_seed(0)
    config = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 17}
    model = Qwen2ForCausalLM(Qwen2Config(**config, num_key_value_heads=1, intermediate_size=24)).eval()
    ids = torch.randint(17, (3, 10))
    mask = torch.arange(10).expand(3, 10) > 2
    batch = SketchBatch(model, ids, mask, torch.ones_like(ids), np.zeros((3, 1, 10)), np.zeros(3, dtype=np.int64))
    rows = bench_score_sketch(batch, directions=(16,), seeds=6)
    assert [(r.method, r.directions, r.tokens) for r in rows] == [("hybrid", 16, 21), ("rank_one", 16, 21)]
    assert all(0.6 < r.error / r.stated < 1.6 and abs(r.mean) < r.error for r in rows)
    publish_score_sketch(tmp_path, rows)
    assert COMMAND in (tmp_path / "score_sketch.md").read_text()
    assert json.loads((tmp_path / "score_sketch.json").read_text())["rows"][0]["error"] == rows[0].error
