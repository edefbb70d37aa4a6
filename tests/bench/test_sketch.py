"""The table of count sketches: costs are ratios, the report names its command, settings are checked before any work."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from otb_analysis.bench import sketch
from otb_analysis.bench.config import SketchConfig
from otb_analysis.bench.publish import run_bench
from otb_analysis.bench.sketch import ESTIMATORS, WarmBatch, bench_sketch, row_cost
from otb_analysis.errors import InputError


@pytest.fixture
def batch():
    """Six rollouts of three prompts, of an untrained model, with random weights for every estimator."""
    torch.manual_seed(0)
    config = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 17}
    model = Qwen2ForCausalLM(Qwen2Config(**config, num_key_value_heads=1, intermediate_size=24)).eval()
    ids = torch.randint(17, (6, 9))
    mask = torch.arange(9).expand(6, 9) > 2
    weights = np.random.default_rng(0).normal(size=(6, len(ESTIMATORS), 9))
    return WarmBatch(model, ids, mask, torch.ones_like(ids), weights, mask.numpy(), np.arange(6) // 2)


def test_every_estimator_but_the_first_is_a_row_that_lies_within_a_few_stated_errors(batch):
    rows = bench_sketch(batch, dims=(4096, 16384), seeds=4)
    assert [(r["estimator"], r["dim"]) for r in rows] == [
        (name, dim) for dim in (4096, 16384) for name in ESTIMATORS[1:]
    ]
    # Variance ratios of unrelated weights: the exact one is recovered within five stated errors by every seed.
    assert all(0 < r["stated"] < 0.2 and r["found"] > 0 and r["worst"] < 5 for r in rows)
    assert all(abs(np.log(r["sketched"] / r["ratio"])) <= 5 * r["stated"] for r in rows)


def test_costs_are_ratios_to_one_pass(batch):
    cost = row_cost(batch, repeats=2)
    assert list(cost) == ["one row", "one more row"] and cost["one row"] > 0.5


def test_the_report_holds_the_rows_the_costs_and_the_command_that_made_them(monkeypatch):
    row = {"estimator": "otb", "dim": 4096, "ratio": 0.67312, "sketched": 0.67349, "stated": 0.00239}
    row |= {"found": 0.00141, "worst": 1.44}
    monkeypatch.setattr(sketch, "warm_batch", lambda prompts: None)
    monkeypatch.setattr(sketch, "bench_sketch", lambda batch, dims, seeds: [row])
    monkeypatch.setattr(sketch, "row_cost", lambda batch, repeats: {"one row": 1.42, "one more row": 0.774})
    found = run_bench(SketchConfig(prompts=3, dims=(4096,), seeds=5, repeats=2))
    assert found.command == "otb bench sketch --prompts 3 --dims 4096 --seeds 5 --repeats 2"
    assert found.cells == [["otb", "4096", "0.6731", "0.6735", "0.0024", "0.0014", "1.4"]]
    assert found.extra[-1] == {"cost": {"one row": 1.42, "one more row": 0.774}}
    assert "one row takes 1.42 and one more row takes 0.77 times" in found.notes[0]
    assert (found.name, found.notes[-1]) == ("sketch", "Not measured on a GPU.")


@pytest.mark.parametrize("change", [{"prompts": 0}, {"seeds": 0}, {"repeats": 0}, {"dims": (4096, 0)}, {"dims": ()}])
def test_settings_below_one_are_refused(change):
    with pytest.raises(InputError, match=f"--{next(iter(change))} is 0"):
        run_bench(replace(SketchConfig(), **change))


def test_one_prompt_has_no_variance():
    with pytest.raises(InputError, match="--prompts is 1; pass at least 2"):
        run_bench(SketchConfig(prompts=1))
