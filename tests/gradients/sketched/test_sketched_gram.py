"""The Gram matrix of sketched gradients estimates the exact one, and costs as many passes as the weights have rank."""

import numpy as np
import pytest
import torch

from otb_analysis.gradients import group_gradient_gram, sketched_group_gram
from otb_analysis.gradients.sketched import sketch as sketched

GROUP = np.array([7, -1, 7, 7, 2])


@pytest.fixture
def weights():
    """Four rows of weights: two are free, one is twice the first, one is zero."""
    random = np.random.default_rng(0).normal(size=(5, 2, 12))
    return np.concatenate([random, 2 * random[:, :1], np.zeros((5, 1, 12))], axis=1)


def test_it_is_unbiased_with_the_stated_error(make_model, sample, weights):
    model, batch = make_model("qwen3"), sample["both"]
    args = (model, *batch.args, weights, GROUP, batch.attention_mask)
    exact = group_gradient_gram(*args)
    dim, seeds = 512, 40
    estimates = np.array([sketched_group_gram(*args, dim=dim, seed=seed) for seed in range(seeds)])
    power = np.einsum("mmpp->mp", exact)
    stated = np.sqrt((np.einsum("mp,nq->mnpq", power, power) + exact**2) / dim)
    z = (estimates.mean(axis=0) - exact) / np.maximum(stated / seeds**0.5, 1e-12)
    assert np.abs(z).max() < 4
    spread = estimates.std(axis=0, ddof=1)[stated > 0] / stated[stated > 0]
    assert 0.2 < np.median(spread) < 1.1


def test_rows_that_depend_on_others_follow_from_them(make_model, sample, weights):
    model, batch = make_model("llama"), sample["left"]
    gram = sketched_group_gram(model, *batch.args, weights, GROUP, batch.attention_mask, dim=64)
    np.testing.assert_allclose(gram[2], 2 * gram[0], rtol=1e-6, atol=1e-6 * np.abs(gram).max())
    assert not gram[3].any() and not gram[:, 3].any()
    np.testing.assert_allclose(gram, gram.transpose(1, 0, 3, 2), rtol=1e-12)


def test_only_a_basis_is_sketched(make_model, sample, weights, monkeypatch):
    model, batch = make_model("llama"), sample["left"]
    rows = []
    real = sketched.gradient_sketch

    def counting(model, ids, mask, basis, *args, **options):
        rows.append(basis.shape[1])
        return real(model, ids, mask, basis, *args, **options)

    monkeypatch.setattr(sketched, "gradient_sketch", counting)
    sketched_group_gram(model, *batch.args, weights, GROUP, batch.attention_mask, dim=64)
    assert rows == [2]  # of four rows, one is a multiple and one is zero


def test_nothing_sampled_gives_zeros(make_model, sample):
    model, batch = make_model("llama"), sample["left"]
    none = torch.zeros_like(batch.mask)
    gram = sketched_group_gram(model, batch.input_ids, none, np.ones((5, 1, 12)), GROUP, batch.attention_mask, dim=8)
    assert gram.shape == (1, 1, 3, 3) and not gram.any()
