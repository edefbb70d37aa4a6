"""Engines ask for their memory before they measure; what has no values or no positions is refused."""

import logging

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peer_side import peak
from benchmarks.timing import in_fresh_process
from otb_analysis import gradients
from otb_analysis.errors import InputError
from otb_analysis.gradients import ENGINES, group_gradient_gram, token_score_norms, weighted_score_norms
from otb_analysis.gradients.batch.inputs import Batch, prepare


def rows(length, count=1, vocabulary=17):
    ids = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    return ids, mask


def needs(model, batch):
    checked = prepare(model, Batch(*batch), "all", 1.0)
    return {name: engine.needed_bytes(checked, False) for name, engine in ENGINES.items()}


def test_auto_takes_the_next_engine_that_fits_and_says_so_once(make_model, monkeypatch, caplog):
    model, batch = make_model("llama", dtype=torch.float32), rows(60)
    expected = token_score_norms(model, *batch)
    assert expected.engine == "fast"
    asked = needs(model, batch)
    monkeypatch.setattr(gradients, "free_bytes", lambda _device: min(asked.values()))
    least = min(asked, key=asked.__getitem__)
    assert least != "fast"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = token_score_norms(model, *batch)
    assert got.engine == least and len(caplog.messages) == 1
    assert f"{least} measures, because fast needs" in caplog.text and "rollout 0 of 60 tokens" in caplog.text
    np.testing.assert_allclose(got.norm_sq, expected.norm_sq, rtol=1e-4)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("weighted", [False, True])
def test_memory_that_no_engine_has_is_refused(make_model, monkeypatch, engine, weighted):
    model, (ids, mask) = make_model("llama"), rows(40, 2)
    token_score_norms(model, ids, mask, engine=engine)
    monkeypatch.setattr(gradients, "free_bytes", lambda _device: 1000)
    named = "fast needs .* generic needs .* reference needs" if engine == "auto" else f"{engine} needs"
    with pytest.raises(InputError, match=rf"{named} .*GiB for rollout 0 .* are free") as e:
        if weighted:
            weighted_score_norms(model, ids, mask, torch.ones(2, 20, 40), engine=engine)
        else:
            token_score_norms(model, ids, mask, engine=engine)
    assert ('engine="auto"' in str(e.value)) == (engine != "auto")


def measured(engine, length):
    """Forecast and peak bytes of an engine on a small real shape; for a fresh process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, mask = rows(length, vocabulary=512)
    token_score_norms(model, ids[:, :40], mask[:, :40], engine=engine)
    mask[:, : length - 40] = False
    needed = ENGINES[engine].needed_bytes(prepare(model, Batch(ids, mask), "all", 1.0), False)
    return needed, peak(lambda: token_score_norms(model, ids, mask, engine=engine), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("engine", list(ENGINES))
def test_what_is_asked_for_is_about_what_is_taken(engine):
    needed, taken = in_fresh_process(measured, engine, 1500)
    assert taken is None or 0.7 * taken < needed < 2 * taken


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=17, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(InputError, match=r"'model\.embed_tokens\.weight' is on the meta device"):
        token_score_norms(model.eval(), *rows(5))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_texts_beyond_the_positions_of_the_model_are_refused(make_model, family):
    model = make_model(family)
    assert token_score_norms(model, *rows(65)).norm_sq.all() == np.False_  # the 65th token is predicted, not read
    for call in (token_score_norms, gradients.sampled_score_norms):
        with pytest.raises(InputError, match=r"66 tokens .* 64 positions.* 65"):
            call(model, *rows(66), **({} if call is token_score_norms else {"tokens": 3}))


@pytest.fixture
def half_and_double(make_model):
    def pair(family, tied=True, dtype=torch.bfloat16):
        return make_model(family, tied, dtype=dtype), make_model(family, tied).to(dtype).double()

    return pair


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("scope", ["all", "lm_head", "attn"])
@pytest.mark.parametrize("engine", ["generic", "reference"])
def test_half_precision_is_measured_like_its_float64_twin(half_and_double, sample, dtype, family, scope, engine):
    (half, double), batch = half_and_double(family, dtype=dtype), sample["both"]
    weights = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    more = {"attention_mask": batch.attention_mask, "scope": scope}
    got = token_score_norms(half, *batch.args, engine=engine, path=True, **more)
    expected = token_score_norms(double, *batch.args, engine="reference", path=True, **more)
    assert got.engine == engine
    for name in ("norm_sq", "path_norm_sq"):
        largest = getattr(expected, name).max()
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=5e-6 * largest, rtol=0)
    one = weighted_score_norms(half, *batch.args, weights, engine=engine, **more)
    two = weighted_score_norms(double, *batch.args, weights, engine="reference", **more)
    np.testing.assert_allclose(one, two, atol=5e-6 * two.max(), rtol=0)


def test_the_gram_matrix_of_a_bfloat16_model_is_that_of_its_float64_twin(half_and_double, sample):
    (half, double), batch = half_and_double("qwen3"), sample["both"]
    weights = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    group = np.array([0, 0, 1, 1, 1])
    got, expected = (
        group_gradient_gram(model, *batch.args, weights, group, batch.attention_mask) for model in (half, double)
    )
    np.testing.assert_allclose(got, expected, atol=5e-6 * expected.max(), rtol=0)


@pytest.mark.parametrize(
    "name", ["sampled", "sketch", "features", "attribution", "split", "gradient", "counts", "gram"]
)
def test_what_is_drawn_projected_or_attributed_in_half_precision_is_like_its_float64_twin(
    half_and_double, sample, name
):
    (half, double), (ids, mask), real = half_and_double("qwen3"), sample["both"].args, sample["both"].attention_mask
    weights = torch.randn(5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    group = np.array([0, 0, 1, 1, 1])
    calls = {
        "sampled": lambda m: np.nan_to_num(
            gradients.sampled_score_norms(m, ids, mask, real, tokens=4, by="uniform", seed=1).norm_sq
        ),
        "sketch": lambda m: gradients.sketch_score_norms(m, ids, mask, real, directions=4).norm_sq,
        "features": lambda m: gradients.sketch_score_norms(
            m, ids, mask, real, directions=4, method="rank_one", features=True
        ).features,
        "attribution": lambda m: gradients.gradient_attribution(m, ids, mask, weights, real).share,
        "split": lambda m: gradients.signal_noise(m, ids, mask, weights, group, real).signal,
        "gradient": lambda m: gradients.batch_gradient(m, ids, mask, weights, real)["lm_head.weight"].numpy(),
        "counts": lambda m: gradients.gradient_sketch(m, ids, mask, weights[:, None], group, real, dim=64),
        "gram": lambda m: gradients.sketched_group_gram(m, ids, mask, weights[:, None], group, real, dim=64),
    }  # fmt: skip
    if name == "gradient":
        half, double = half_and_double("qwen3", tied=False)
    got, expected = (np.asarray(calls[name](model)) for model in (half, double))
    assert got.dtype != np.float16
    np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


def test_sketches_of_a_model_whose_copies_do_not_fit_are_in_its_own_precision_and_say_so_once(
    half_and_double, sample, monkeypatch, caplog
):
    (half, double), batch = half_and_double("llama"), sample["both"]
    monkeypatch.setattr("otb_analysis.gradients.batch.inputs.free_bytes", lambda _device: 1 << 10)
    rows, group = torch.ones(5, 1, 12), np.arange(5)
    with caplog.at_level(logging.WARNING):
        got, _ = (gradients.gradient_sketch(half, *batch.args, rows, group, batch.attention_mask) for _ in range(2))
    expected = gradients.gradient_sketch(double, *batch.args, rows, group, batch.attention_mask)
    assert len(caplog.messages) == 1 and "half precision" in caplog.text
    assert 1e-4 < np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.1


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_in_half_precision_is_left_as_found(make_model, sample, monkeypatch, fails):
    model, batch = make_model("gpt2", dtype=torch.bfloat16), sample["left"]
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters(remove_duplicate=False)}
    if fails:
        monkeypatch.setattr(gradients, "free_bytes", lambda _device: 0)
        with pytest.raises(InputError, match="reference needs"):
            token_score_norms(model, *batch.args, batch.attention_mask, engine="reference")
    else:
        token_score_norms(model, *batch.args, batch.attention_mask, engine="generic")
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    for name, (identity, values) in before.items():
        assert id(after[name]) == identity and after[name].grad is None and torch.equal(after[name], values)


def test_copies_that_do_not_fit_are_refused(make_model, sample, monkeypatch):
    model, batch = make_model("llama", dtype=torch.bfloat16), sample["left"]
    monkeypatch.setattr("otb_analysis.gradients.batch.inputs.free_bytes", lambda _device: 1 << 10)
    with pytest.raises(InputError, match=r"copies of the weights in half precision .* are free"):
        token_score_norms(model, *batch.args, batch.attention_mask)
