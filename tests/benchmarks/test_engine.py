"""The engine table: the loop is right, every engine of the registry is in it, refusals are rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks import engine
from benchmarks.config import EngineConfig
from benchmarks.engine import (
    LOOP,
    STEP,
    Exact,
    candidates,
    error_of,
    forward_backward,
    make_case,
    model_config,
    plain_loop,
)
from benchmarks.peer_side import make_model
from benchmarks.publish import run_bench
from otb_analysis.errors import InputError
from otb_analysis.gradients import ENGINES, Engine, batch_gradient, token_score_norms

TINY = EngineConfig(sizes=("S",), tokens=(6,), repeats=1)


@pytest.fixture
def tiny(monkeypatch):
    """S made of one layer of width 16, and no fresh processes."""
    small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 19}
    monkeypatch.setitem(engine.SIZES, "S", small)
    monkeypatch.setattr(engine, "in_fresh_process", lambda call, config, name, size, places: [3 << 20] * len(places))


@pytest.fixture
def case(tiny):
    return make_case(make_model(model_config("S"), "cpu", "float64"), 6)


def test_plain_loop_gives_the_norms_of_the_reference(case):
    seconds, norm_sq = plain_loop(case)
    expected = token_score_norms(case.model, case.input_ids, case.mask, engine="reference").norm_sq
    np.testing.assert_allclose(norm_sq, expected, rtol=1e-6)
    assert seconds > 0 and (expected[:, 1:] > 0).all()


def test_sizes_have_the_parameters_that_the_table_says():
    for size, millions in (("S", 0.85), ("M", 29.4), ("L", 110.0)):
        with torch.device("meta"):
            model = Qwen2ForCausalLM(Qwen2Config(**model_config(size)))
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_same_case_is_made_every_time(tiny):
    first, second = (make_case(make_model(model_config("S"), "cpu", "float32"), 6) for _ in range(2))
    assert torch.equal(first.input_ids, second.input_ids)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_every_engine_is_a_row_with_ratios_memory_and_error(tiny):
    report = run_bench(TINY)
    rows = {row["name"]: row for row in report.rows}
    assert {LOOP, STEP, *ENGINES, *engine.OPACUS} <= set(rows)
    generic, loop, step = rows["generic"], rows[LOOP], rows[STEP]
    assert generic["loop_ratio"] == pytest.approx(loop["seconds"] / generic["seconds"])
    assert generic["step_ratio"] == pytest.approx(generic["seconds"] / step["seconds"])
    assert (loop["loop_ratio"], step["step_ratio"]) == (1, 1)
    assert generic["memory"] == 3 << 20
    for name in (LOOP, "generic", "generic, path=True", "generic, 8 weighted rows", "reference", "attribution, jvp"):
        assert 0 <= rows[name]["error"] < 5e-6, name
    assert 0 < rows["attribution, difference"]["error"] < 1e-2
    assert report.cells[-1][2:4] == ["Opacus ghost norms (untied)", "not measured"]


def test_a_batch_is_attributed_beside_one_forward_and_backward_pass_of_it(tiny, monkeypatch):
    monkeypatch.setattr(EngineConfig, "places", lambda self: {"S": [(1, 4), (3, 5)]})
    rows = [row for row in run_bench(EngineConfig(sizes=("S",), repeats=2)).rows if row["rollouts"] == 3]
    step, jvp, difference, own = rows
    assert [row["name"] for row in rows] == [
        STEP, "attribution, jvp", "attribution, difference", "attribution, jvp, its own gradient",
    ]  # fmt: skip
    facts = {(row["tokens"], row["repeats"], row["memory"], row["loop_ratio"]) for row in rows}
    assert facts == {(5, 2, 3 << 20, None)}
    assert jvp["step_ratio"] == pytest.approx(jvp["seconds"] / step["seconds"])
    # Shares sum to the squared norm of the batch's own gradient: to rounding, and as well as a step allows.
    assert max(jvp["error"], own["error"]) < 1e-6 and difference["error"] < 1e-3 and step["error"] is None


def test_the_yardstick_of_a_batch_is_the_gradient_of_all_its_rollouts(tiny):
    case = make_case(make_model(model_config("S"), "cpu", "float64"), 4, 3)
    ones = np.ones(case.mask.shape)
    expected = batch_gradient(case.model, case.input_ids, case.mask, ones)
    for got, want in zip(forward_backward(case), expected.values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_an_engine_added_to_the_registry_is_measured_without_further_ado(tiny, monkeypatch):
    monkeypatch.setitem(ENGINES, "twin", ENGINES["generic"])
    names = {row["name"] for row in run_bench(TINY).rows}
    assert {"twin", "twin, path=True", "twin, 8 weighted rows"} <= names


def test_an_engine_that_refuses_the_model_is_a_row_that_says_why(tiny, monkeypatch):
    def refuse(*_):
        raise InputError("parameter x has no rule; pass engine='reference'.")

    monkeypatch.setitem(ENGINES, "picky", Engine(refuse, refuse))
    (row,) = [row for row in run_bench(TINY).rows if row["name"] == "picky"]
    assert row["seconds"] is None and row["remark"].startswith("parameter x has no rule")


def test_errors_are_zero_for_the_exact_values_and_grow_with_the_distance(case):
    exact = Exact.of_case(case)
    runs = candidates(case)
    for name in ("reference", "generic", "generic, path=True", "generic, 8 weighted rows", "attribution, jvp"):
        assert error_of(name, runs[name](), exact) < 1e-6
    found = runs["reference"]()
    off = replace(found, norm_sq=found.norm_sq * 1.5)
    assert error_of("reference", off, exact) == pytest.approx(0.5, rel=1e-5)
    assert error_of("sketch", off, exact) == pytest.approx(0.5, rel=1e-5)
    assert error_of("gradient_sketch", runs["gradient_sketch"](), exact) is None


def test_memory_is_that_of_the_row_at_each_of_its_places(tiny, monkeypatch):
    monkeypatch.setattr(engine, "peak", lambda run, device: (run().norm_sq.shape, device))
    assert engine.peaks(TINY, "generic", "S", [(1, 3), (1, 6)]) == [((1, 4), "cpu"), ((1, 7), "cpu")]


def test_a_gpu_that_is_not_there_is_one_sentence():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(InputError, match=r"cuda but .* no accelerator"):
        run_bench(replace(TINY, device="cuda"))


@pytest.fixture
def fetched(tiny, monkeypatch):
    """A tiny model in the place of the pretrained one."""
    model = make_model(model_config("S"), "cpu", "float32")
    model.config.bos_token_id = 0
    monkeypatch.setattr(engine, "load_policy", lambda name: (model, None))
    return model


def test_a_pretrained_model_has_the_rows_that_matter_and_a_report_of_its_own(fetched, monkeypatch):
    monkeypatch.setattr(EngineConfig, "places", lambda self: {"R": [(1, 5), (2, 3)]})
    report = run_bench(EngineConfig(sizes=("R",), repeats=2, threads=2, memory=False))
    rows = {row["name"]: row for row in report.rows if row["rollouts"] == 1}
    assert report.name == "engine_smollm2_float32_2" and "2 threads" in report.title
    assert {LOOP, STEP, "fast", "generic", "sketch hybrid, K=16", "sketch hybrid, K=32", "gradient_sketch"} <= set(rows)
    assert not {"reference", "generic, path=True", "fast, 8 weighted rows", *engine.OPACUS} & set(rows)
    assert (rows[LOOP]["repeats"], rows["generic"]["repeats"]) == (1, 2)  # the loop would take minutes
    assert rows["generic"]["error"] < 5e-6 and rows["generic"]["memory"] is None
    assert next(row["name"] for row in report.rows if row["rollouts"] == 2) == STEP


def test_a_pretrained_model_writes_its_rollouts_itself(fetched):
    case = make_case(fetched, 6, 3, written=True)
    assert case.input_ids.shape == (3, 7) and (case.input_ids[:, 0] == 0).all()
    assert torch.equal(case.input_ids, make_case(fetched, 6, 3, written=True).input_ids)


def test_a_pretrained_model_that_was_not_fetched_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="otb model fetch smollm2"):
        run_bench(replace(TINY, sizes=("R",)))


def test_texts_then_batches_are_measured_unless_a_length_is_asked_for():
    texts, batches = [(1, 32), (1, 128), (1, 512)], [(8, 128), (4, 512)]
    assert EngineConfig().places() == {"S": texts + batches, "M": [(1, 32), (1, 128), (8, 128)]}
    assert EngineConfig(sizes=("L",), tokens=(7,)).places() == {"L": [(1, 7)]}
