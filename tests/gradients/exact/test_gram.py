import re

import numpy as np
import pytest
import torch

from otb_analysis.errors import InputError
from otb_analysis.gradients import group_gradient_gram, sketch_score_norms
from otb_analysis.gradients.exact import gram

GROUP = np.array([7, -1, 7, 7, 2])


def weights_of(seed=0, rows=3):
    weights = np.random.default_rng(seed).normal(size=(5, rows, 12))
    weights[:, -1] = 0.0
    return weights


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("limit", [1 << 16, 1 << 13])  # several parameters at a time, and parts of one
def test_a_gram_matrix_in_stretches_is_the_same(make_model, sample, monkeypatch, family, limit):
    model, batch = make_model(family), sample["both"]
    args = (model, *batch.args, weights_of(), GROUP, batch.attention_mask)
    whole = group_gradient_gram(*args, engine="reference")
    monkeypatch.setattr(gram, "GRADIENT_BYTES", limit)
    np.testing.assert_allclose(group_gradient_gram(*args, engine="reference"), whole, rtol=1e-12, atol=1e-12)


def test_stretches_cover_every_entry_once_and_fit():
    parameters = [torch.zeros(3, 5), torch.zeros(2), torch.zeros(4, 4), torch.zeros(1)]
    for limit, count in ((gram.GRADIENT_BYTES, 2), (96, 2), (40, 2), (8, 2), (4, 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gram, "GRADIENT_BYTES", limit)
            found = gram.stretches(parameters, count)
        for index, parameter in enumerate(parameters):
            spans = [s for stretch in found for i, s in stretch if i == index]
            assert [i for s in spans for i in range(s.start, s.stop)] == list(range(parameter.numel()))
        sizes = [sum(s.stop - s.start for _, s in stretch) * 4 * count for stretch in found]
        assert max(sizes) <= max(limit, 4 * count)
    assert len(gram.stretches(parameters, 2)) == 1


def test_only_one_stretch_of_the_gradients_is_held_and_the_rounds_are_told(make_model, sample, monkeypatch, caplog):
    model, batch = make_model("qwen2"), sample["both"]
    sizes = []
    real = gram.gram_matrix

    def spy(gradients):
        sizes.append(sum(t.untyped_storage().nbytes() for g in gradients for t in g))
        return real(gradients)

    monkeypatch.setattr("otb_analysis.gradients.exact.reference.gram_matrix", spy)
    monkeypatch.setattr(gram, "GRADIENT_BYTES", 1 << 13)
    group_gradient_gram(model, *batch.args, weights_of(), GROUP, batch.attention_mask, engine="reference")
    assert len(sizes) > 10 and max(sizes) <= 1 << 13
    assert re.search(r"6 gradients exceed .* rounds of backward passes; gradient_sketch estimates it", caplog.text)


def test_a_gram_matrix_larger_than_the_memory_allowed_is_refused(make_model, sample, monkeypatch):
    # 128 bytes hold 16 float64 entries, a 4 × 4 matrix; two rows in use on three prompts are 6, in any scope.
    model, batch = make_model("qwen2"), sample["both"]
    monkeypatch.setattr(gram, "GRADIENT_BYTES", 128)
    with pytest.raises(
        InputError,
        match=r"weights has 6 rows, .*at most 4 .*gradient_sketch",
    ):
        group_gradient_gram(model, *batch.args, weights_of(), GROUP, batch.attention_mask)
    with pytest.raises(InputError, match="weights has 6 rows, "):
        group_gradient_gram(model, *batch.args, weights_of(), GROUP, batch.attention_mask, scope="lm_head")


def test_features_of_the_sketch_estimate_the_exact_matrix(make_model, sample):
    model, batch = make_model("qwen2"), sample["both"]
    exact = group_gradient_gram(model, *batch.args, weights_of(), GROUP, batch.attention_mask)
    draws = []
    for seed in range(20):
        found = sketch_score_norms(
            model, *batch.args, batch.attention_mask, directions=64, method="rank_one", features=True, seed=seed
        )
        masked = weights_of() * batch.mask[:, None].numpy()
        sums = np.einsum("nmt,ntk->nmk", masked, found.features)
        by_prompt = np.stack([sums[p == GROUP].sum(0) for p in np.unique(GROUP)])
        draws.append(np.einsum("pmk,qnk->mnpq", by_prompt, by_prompt))
    error = np.std(draws, axis=0, ddof=1) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - exact) <= 4.5 * error).all()


@pytest.mark.parametrize("value", [1e-30, 3.0, 1e30])
def test_a_squared_norm_of_float32_tensors_is_right_where_squares_leave_their_range(value):
    # 3 · 4 + 5 + 1 entries of the same value; (1e-30)² and (1e30)² are no float32 numbers.
    tensors = [torch.full((3, 4), value), torch.full((5,), value), torch.tensor(value)]
    assert gram.norm_sq_of(tensors) == pytest.approx(18 * value**2, rel=1e-6)


def test_a_squared_norm_of_float32_tensors_is_summed_in_float64():
    # A float32 sum of ones stops growing at 2^24.
    assert gram.norm_sq_of([torch.ones(20_000_000 // 40, 40)]) == pytest.approx(20_000_000, rel=1e-7)


def test_squared_norms_of_bfloat16_and_of_long_rows_are_those_of_float64():
    generator = torch.Generator().manual_seed(0)
    narrow = torch.randn(40, 300, generator=generator).bfloat16()
    long = torch.randn(3_000_000, generator=generator)
    exact = float(narrow.double().square().sum() + long.double().square().sum())
    assert gram.norm_sq_of([narrow, long]) == pytest.approx(exact, rel=1e-8)
    assert gram.norm_sq_of([narrow]) == pytest.approx(float(narrow.double().square().sum()), rel=1e-6)
