"""The variance of a regression as a quadratic form is that of the estimator itself."""

import numpy as np
import pytest

from benchmarks.config import RegressionConfig
from benchmarks.publish import run_bench
from otb_analysis.errors import InputError
from otb_analysis.estimators import RegressionOptions, estimate
from otb_analysis.estimators.across import coefficients
from otb_analysis.estimators.spec import FEATURES
from studies.lib.enumeration.groups import group_moments, multisets
from studies.lib.enumeration.regression import batch_variance, limit_variance, regressed
from studies.lib.enumeration.trees import TreeSpec, random_tree

SPEC = TreeSpec(vocabulary=2, horizon=3, shared=4, end_token=True)
ALL = tuple(FEATURES)


def tree_of(seed):
    return random_tree(SPEC, np.random.default_rng([seed, 4]))


@pytest.mark.parametrize("n", [2, 3])
def test_m_alone_is_rloo_and_no_feature_is_no_baseline(n):
    tree = tree_of(0)
    prompt = regressed(tree, n)
    np.testing.assert_allclose(prompt.variance(("m",), np.ones(1)), group_moments("rloo", tree, n).variance)
    np.testing.assert_allclose(prompt.variance((), np.zeros(0)), group_moments("none", tree, n).variance)


def test_fit_and_variance_are_those_of_the_estimator():
    # one group of each of three prompts: the fit for the first, and then the variance of its advantages over all groups
    n, trees = 2, [tree_of(seed) for seed in (1, 2, 3)]
    picked = [4, 2]
    prompts = [regressed(tree, n) for tree in trees]
    gram = sum(prompt.gram[k] for prompt, k in zip(prompts[1:], picked, strict=True))
    moment = sum(prompt.moment[k] for prompt, k in zip(prompts[1:], picked, strict=True))
    beta = coefficients(gram[None], moment[None], ALL, 0.1)[0]
    members, prob = multisets(trees[0], n)
    gradients = []
    for own in members:
        rows = [own, *(multisets(tree, n)[0][k] for tree, k in zip(trees[1:], picked, strict=True))]
        parts = [vars(tree.inputs(r, np.full(n, p))) for p, (tree, r) in enumerate(zip(trees, rows, strict=True))]
        columns = {k: np.concatenate([part[k] for part in parts]) for k, x in parts[0].items() if x is not None}
        inputs = type(trees[0].inputs(own, np.zeros(n, int)))(**columns)
        advantage = estimate("energy_regression", inputs, RegressionOptions(ridge=0.1, T_max=3)).advantage[:n]
        gradients.append(np.einsum("nt,ntd->d", advantage, trees[0].score[own]) / n)
    g = np.array(gradients)
    variance = prob @ (g**2).sum(axis=1) - ((prob @ g) ** 2).sum()
    np.testing.assert_allclose(prompts[0].variance(ALL, beta), variance, rtol=1e-9)
    np.testing.assert_allclose(prob @ g, trees[0].gradient, atol=1e-12)


def test_batches_of_all_prompts_drawn_often_come_near_the_limit():
    prompts = [regressed(tree_of(seed), 4) for seed in range(4)]
    chosen = np.repeat(np.array([[0, *([1, 2, 3] * 300)]]), 8, axis=0)
    near = batch_variance(prompts, ("1", "m"), (0.0,), chosen, np.random.default_rng(0))[0]
    limit = limit_variance(prompts, ("1", "m"))[0]
    assert abs(near.mean() - limit) < 4 * near.std(ddof=1) / 8**0.5 + 0.01 * limit


def test_table_has_every_feature_set_and_batch():
    rows = run_bench(RegressionConfig(policies=6, prompts=(3, 5), batches=4)).rows
    assert [row["prompts"] for row in rows[-4:]] == ["3", "3", "5", "5"]
    across = next(row for row in rows if str(row["features"]).startswith("1 ("))
    assert across["free"] == pytest.approx(across["ridge_10"])  # the coefficient of 1 is not penalised
    with pytest.raises(InputError, match="has 8 but there are 6"):
        run_bench(RegressionConfig(policies=6, prompts=(8,)))
