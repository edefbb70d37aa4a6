"""Adapters as PEFT makes them: B starts at zero, so that A has no gradient until the first update."""

import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError
from otb_analysis.gradients import (
    ENGINES,
    gradient_attribution,
    gradient_sketch,
    group_gradient_gram,
    sampled_score_norms,
    signal_noise,
    sketch_score_norms,
    token_score_norms,
    weighted_score_norms,
)

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # inside peft
LONG = 30
GROUP = np.array([0, 1])


@pytest.fixture
def adapted(make_model):
    """A model with adapters in every linear layer, put in place as training does: the inner model is measured."""
    peft = pytest.importorskip("peft")
    model = make_model("qwen2")
    torch.manual_seed(1)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.double().eval()


def update(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


@pytest.fixture(params=["as made", "updated", "updated after a measurement"])
def lora(request, adapted, long_batch):
    batch = long_batch(LONG)
    if request.param == "updated after a measurement":
        token_score_norms(adapted, *batch.args, batch.attention_mask)
    if request.param != "as made":
        update(adapted)
    return adapted, batch


def weights_of(batch, rows=3):
    return np.random.default_rng(0).normal(size=(len(batch.input_ids), rows, batch.input_ids.shape[1]))


@pytest.mark.parametrize("engine", ["auto", "generic"])
def test_norms_of_adapters_are_the_reference_ones(lora, engine):
    model, batch = lora
    got, expected = (
        token_score_norms(model, *batch.args, batch.attention_mask, engine=e, path=True) for e in (engine, "reference")
    )
    assert got.engine == "generic"
    for name in ("norm_sq", "path_norm_sq", "logprob"):
        np.testing.assert_allclose(getattr(got, name), getattr(expected, name), rtol=2e-6, atol=1e-12)


def test_weighted_norms_of_adapters_are_the_reference_ones(lora):
    model, batch = lora
    got, expected = (
        weighted_score_norms(model, *batch.args, weights_of(batch), batch.attention_mask, engine=e)
        for e in ("generic", "reference")
    )
    np.testing.assert_allclose(got, expected, rtol=2e-6)


def test_the_gram_matrix_of_adapters_is_the_reference_one(lora):
    model, batch = lora
    got, expected = (
        group_gradient_gram(model, *batch.args, weights_of(batch), GROUP, batch.attention_mask, engine=e)
        for e in ("auto", "reference")
    )
    np.testing.assert_allclose(got, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("method", ["jvp", "difference"])
def test_attribution_over_adapters_is_the_reference_one(lora, method):
    model, batch = lora
    weights = weights_of(batch)[:, 0]
    got, expected = (
        gradient_attribution(model, *batch.args, weights, batch.attention_mask, **options)
        for options in ({"method": method}, {"engine": "reference"})
    )
    scale = np.abs(expected.share).max()
    np.testing.assert_allclose(got.share, expected.share, atol=(1e-6 if method == "jvp" else 1e-3) * scale)


def test_projections_of_adapters_are_the_reference_ones(lora):
    model, batch = lora
    got, expected = (
        sketch_score_norms(
            model, *batch.args, batch.attention_mask, directions=4, method="rank_one", engine=e, features=True
        )
        for e in ("generic", "reference")
    )
    scale = np.abs(expected.features).max()
    np.testing.assert_allclose(got.features, expected.features, atol=1e-5 * scale)


def test_hybrid_sketches_of_adapters_are_unbiased(lora):
    model, batch = lora
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference")
    got = sketch_score_norms(model, *batch.args, batch.attention_mask, directions=512, engine="generic")
    kept = batch.mask.numpy()
    error = (got.norm_sq - exact.norm_sq)[kept]
    # One seed serves all tokens, so their errors go together: five standard errors of each.
    assert (np.abs(error) <= 5 * got.norm_sq_stderr[kept] + 1e-6 * exact.norm_sq[kept]).all()


def test_count_sketches_of_adapters_keep_the_inner_products(lora):
    model, batch = lora
    weights = weights_of(batch)
    gram = group_gradient_gram(model, *batch.args, weights, GROUP, batch.attention_mask, engine="reference")
    sketch = gradient_sketch(model, *batch.args, weights, GROUP, batch.attention_mask, dim=1 << 20).astype(np.float64)
    norms = np.einsum("pmd,pmd->mp", sketch, sketch)
    np.testing.assert_allclose(norms, np.einsum("mmpp->mp", gram), rtol=0.02)


@pytest.mark.parametrize("by", ["above_cut", "uniform"])
def test_drawn_tokens_of_adapters_have_the_reference_norms(lora, by):
    model, batch = lora
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    got = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=12, by=by)
    assert got.engine != "reference"
    drawn = np.isfinite(got.norm_sq)
    np.testing.assert_allclose(got.norm_sq[drawn], exact[drawn], rtol=2e-6)


@pytest.mark.parametrize("scope", ["lora_A", "lora_B", "layers.1.mlp", "layers.1", "layers.0", "q_proj.lora_A"])
def test_any_part_of_the_adapters_may_be_in_scope(lora, scope):
    model, batch = lora
    got, expected = (
        token_score_norms(model, *batch.args, batch.attention_mask, engine=e, scope=scope)
        for e in ("generic", "reference")
    )
    np.testing.assert_allclose(got.norm_sq, expected.norm_sq, rtol=2e-6, atol=1e-12)


def test_the_hand_written_engine_refuses_adapters(lora):
    assert set(ENGINES) == {"fast", "generic", "reference"}
    model, batch = lora
    with pytest.raises(ValueError, match="engine does not follow"):
        token_score_norms(model, *batch.args, batch.attention_mask, engine="fast")


@pytest.fixture
def dora(make_model, long_batch):
    peft = pytest.importorskip("peft")
    model = make_model("qwen2")
    torch.manual_seed(1)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM"))
    update(model.double().eval())
    return model, long_batch(LONG)


def test_norms_rows_and_gram_matrices_of_dora_are_the_reference_ones(dora, agree_with_reference):
    # The lengths of a matrix' rows are parameters too, and B A is read a second time for a norm that has no gradient.
    model, batch = dora
    for scope in ("all", "magnitude", r"layers\.1\.mlp", "lora_A|lora_B"):
        agree_with_reference("generic", model, batch, scope=scope)
    for measure, tail in ((weighted_score_norms, ()), (group_gradient_gram, (GROUP,))):
        got, expected = (
            measure(model, *batch.args, weights_of(batch), *tail, batch.attention_mask, engine=e)
            for e in ("generic", "reference")
        )
        np.testing.assert_allclose(got, expected, atol=2e-6 * np.abs(expected).max())
    exact = token_score_norms(model, *batch.args, batch.attention_mask, engine="reference").norm_sq
    drawn = sampled_score_norms(model, *batch.args, batch.attention_mask, tokens=12)
    known = np.isfinite(drawn.norm_sq)
    assert drawn.engine != "reference"
    np.testing.assert_allclose(drawn.norm_sq[known], exact[known], rtol=2e-6)


def test_dora_is_attributed_by_forward_mode_where_differences_see_what_its_gradient_does_not(dora, caplog):
    # The norm that lengths are divided by is held constant in the gradient; two points differ by it all the same.
    model, batch = dora
    args = (model, *batch.args, weights_of(batch)[:, 0], batch.attention_mask)
    expected = gradient_attribution(*args, engine="reference")
    for method in ("jvp", "difference"):
        got = gradient_attribution(*args, method=method)
        np.testing.assert_allclose(got.share, expected.share, atol=1e-6 * np.abs(expected.share).max())
        assert got.method == "jvp" and abs(got.sum_error) < 1e-6
    assert "more than 0.001: forward mode is used" in caplog.text
    with pytest.raises(InputError, match=r"shares sum to .* pass method=\"jvp\""):
        signal_noise(*args[:4], GROUP, args[4], method="difference")
    assert signal_noise(*args[:4], GROUP, args[4]).norm_sq == pytest.approx(expected.norm_sq, rel=1e-6)
