"""A regression's centre, chosen by how well it predicts other prompts: unbiased, by enumeration of whole batches."""

from importlib import import_module
from itertools import product

import numpy as np
import pytest

from otb_analysis.estimators.across import coefficients
from otb_analysis.estimators.spec import FEATURES
from studies.lib.enumeration.groups import multisets
from studies.lib.enumeration.trees import TreeSpec, random_tree

centre = import_module("studies.03_baseline_variance.centre")
SPEC, SIZE, RIDGE = TreeSpec(vocabulary=2, horizon=2, shared=3, end_token=True), 2, 1.0


def enumerated(tree, random):
    """All groups of 2 of a policy as sums, their probabilities, and ΣR·s/N and Σφ·s/N of each [G, K + 2, D]."""
    members, prob = multisets(tree, SIZE)
    z = centre.token_parts(tree.energy, np.asarray(tree.entropy), 2) * tree.mask[:, None]
    inner = np.einsum("mt,mat,mbt->mab", tree.energy, z, z)[members]
    vectors = np.einsum("mat,mtd->mad", z, tree.score)[members]
    probe = random.normal(size=len(tree.prob))[members][:, ::-1]  # any number of the *other* rollout
    total = tree.total[members]
    products = np.einsum("gnad,gmbd->gnamb", vectors, vectors)
    factor = {"1": np.ones(total.shape), "m": total[:, ::-1], "probe": probe}
    parts = [np.einsum("gn,gnd->gd", total, vectors[:, :, 0])]
    parts += [np.einsum("gn,gnd->gd", factor[a], vectors[:, :, centre.PARTS.index(b)]) for a, b in centre.PRODUCTS]
    return centre.groups(total, inner, products, probe), prob, np.stack(parts, axis=1) / SIZE


def largest_bias(peeking, old=0.0):
    """‖E ḡ_p − ∇J_p‖/‖∇J_p‖ of the worst of four prompts, by estimator, over all batches of one group of each."""
    random = np.random.default_rng(5)
    trees = [random_tree(SPEC, random) for _ in range(4)]
    parts = [enumerated(tree, random) for tree in trees]
    names, means, chances = [], 0.0, 0.0
    for chosen in product(*(range(len(prob)) for _, prob, _ in parts)):
        taken = [one.take(np.array([k])) for (one, _, _), k in zip(parts, chosen, strict=True)]
        batch = centre.Groups(*(np.concatenate([vars(one)[key] for one in taken]) for key in vars(taken[0])))
        betas, _, _ = centre.baselines(batch, SIZE, RIDGE, old, peeking)
        names, beta = list(betas), np.stack(list(betas.values()))
        vectors = np.stack([one[2][k] for one, k in zip(parts, chosen, strict=True)])
        chance = np.prod([one[1][k] for one, k in zip(parts, chosen, strict=True)])
        means = means + chance * (vectors[:, 0] - np.einsum("mpk,pkd->mpd", beta, vectors[:, 1:]))
        chances += chance
    assert chances == pytest.approx(1)
    truth = np.stack([tree.gradient for tree in trees])
    off = np.linalg.norm(means - truth, axis=2) / np.linalg.norm(truth, axis=1)
    return dict(zip(names, off.max(axis=1), strict=True))


def test_no_bias_in_batches_of_four_prompts():
    off = largest_bias(peeking=False)
    assert set(off) == {*centre.MEMBERS, *centre.NEW, "probe"}
    assert max(off.values()) < 1e-12


def test_choice_that_sees_the_prompt_itself_is_biased():
    off = largest_bias(peeking=True)
    assert min(off["stacked"], off["picked"]) > 1e-3
    assert max(off[name] for name in set(off) - {"stacked", "picked"}) < 1e-12


def test_what_earlier_steps_left_leaves_it_unbiased():
    random = np.random.default_rng(6)
    _, _, state = centre.baselines(centre.world(-1.0, 1.0, 1.5, random).take(np.arange(4)), SIZE, RIDGE)
    assert max(largest_bias(peeking=False, old=0.9 * state).values()) < 1e-11


def test_slope_zero_is_the_regression_of_the_package_and_a_ridge_without_end_pulls_to_the_slope():
    batch = centre.world(0.0, 1.0, 1.5, np.random.default_rng(7)).take(np.arange(20))
    gram, moment = batch.gram[:, :8, :8], batch.moment[:, :8]
    for ridge in (0.1, 10.0):
        expected = coefficients(gram, moment, tuple(FEATURES), ridge)
        np.testing.assert_allclose(centre.fitted(gram, moment, ridge, np.zeros(20)), expected, atol=1e-10)
    mean = moment[:, 0] / gram[:, 0, 0]
    got = centre.fitted(gram, moment, 1e13, np.full(20, 0.75))
    np.testing.assert_allclose(got[:, 1], 0.75, atol=1e-9)
    # B = slope·m + (1 − slope)·c up to the free constant, which meets the weighted mean of the prompts that fit it
    np.testing.assert_allclose((gram[:, 0] * got).sum(axis=1), moment[:, 0], atol=1e-8)
    assert np.abs(got[:, 2:]).max() < 1e-9 and np.isfinite(mean).all()


def test_stacking_weighs_by_how_well_each_centre_predicts_the_other_prompts_one_by_one():
    batch, ridge = centre.world(0.0, 2.0, 0.0, np.random.default_rng(8)).take(np.arange(6)), 1.0
    everyone = np.arange(6)

    def both(rows):
        part = batch.take(rows)
        gram, moment = part.gram[:, :8, :8].sum(axis=0), part.moment[:, :8].sum(axis=0)
        means, noise = part.stats[:, 1], part.stats[:, 3].mean()
        between = max(means.var(ddof=1) - noise / 4, 0.0)
        slope = np.array(between / (between + noise / 3))
        return centre.fitted(gram, moment, ridge, 0 * slope), centre.fitted(gram, moment, ridge, slope)

    for p in everyone:
        grid, loss = np.linspace(0, 1, 201), np.zeros(201)
        for q in np.delete(everyone, p):
            plain, shrunk = both(np.delete(everyone, [p, q]))
            beta = plain + grid[:, None] * (shrunk - plain)
            gram, moment = batch.gram[q, :8, :8], batch.moment[q, :8]
            loss += np.einsum("ak,kl,al->a", beta, gram, beta) - 2 * beta @ moment
        found, weight, _ = centre.baselines(batch, 4, ridge)
        assert abs(weight[p] - grid[loss.argmin()]) <= 0.005
        plain, shrunk = both(np.delete(everyone, p))
        np.testing.assert_allclose(found["picked"][p, :8], shrunk if loss[-1] < loss[0] else plain, atol=1e-10)
