"""Importance ratios: which keep the mean, which move it, and where the optimum goes."""

from dataclasses import replace

import numpy as np
import pytest

from studies.lib.enumeration.off_policy import CASES, Case, case_moments, drifted, mean_gradient, mean_shift, touched
from studies.lib.enumeration.population import population_moments, position_optimum, regret
from studies.lib.enumeration.trees import TreeSpec

SHARED = TreeSpec(shared=6)
KEEPING = [label for label, case in CASES.items() if case.keeps_mean]
MOVING = [label for label, case in CASES.items() if not case.keeps_mean]
KNOWN = [label for label in KEEPING if CASES[label].name != "sequence"]  # known at the token
SEQUENCE = Case("sequence")


def mean_error(tree, case):
    return case_moments(tree, case).relative_bias


def weights(tree, name):
    return CASES[name].ratio(tree).value


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("spec", [SHARED, TreeSpec(horizon=3, end_token=True), TreeSpec(shared=5, dense=True)])
@pytest.mark.parametrize("seed", range(3))
def test_ratios_said_to_keep_the_mean_take_any_constant(name, spec, seed):
    tree = drifted(spec, seed)
    assert mean_shift(tree, CASES[name]) < 1e-12
    assert mean_shift(tree, CASES[name], 1.0) < 1e-12


@pytest.mark.parametrize("name", MOVING)
def test_every_other_ratio_lets_a_constant_move_the_mean(name):
    shift = [mean_shift(tree, CASES[name]) for tree in (drifted(SHARED, seed) for seed in range(10))]
    assert np.median(shift) > 0.02


def log_shift(name, spec, n=60):
    return np.log([mean_shift(drifted(spec, seed), CASES[name]) for seed in range(n)])


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ("`tis`, cap 1.2", "`cumulative_truncated`"),
        ("`cumulative_truncated`", "`ppo`"),
        ("`ppo`", "`sequence_mask` ± .05"),
        ("`gspo` without its clip", "`gspo`"),
        ("`cumulative_truncated`", "`ctpo`"),
    ],
)
def test_harder_truncation_moves_the_mean_further(less, more):
    gap = log_shift(more, TreeSpec()) - log_shift(less, TreeSpec())
    assert gap.mean() > 4 * gap.std(ddof=1) / len(gap) ** 0.5


def test_without_drift_nothing_moves():
    tree = drifted(SHARED, 1, drift=0.0)
    for case in CASES.values():
        assert mean_shift(tree, case) < 1e-12 and mean_error(tree, case) < 1e-12 and touched(tree, case) == 0


def test_only_the_whole_sequence_s_ratio_recovers_the_gradient_off_policy():
    error = {
        label: np.median([mean_error(drifted(SHARED, s), case) for s in range(5)]) for label, case in CASES.items()
    }
    assert error.pop("`sequence`") < 1e-12
    assert min(error.values()) > 0.02


def test_cumulative_ratio_with_a_sampler_that_errs_on_the_first_token_only_recovers_the_gradient():
    # prefix and token are corrected and what follows is sampled from the policy itself
    tree = drifted(TreeSpec(), 3)
    first = np.arange(tree.mask.shape[1]) == 0
    tree = replace(tree, behavior_logprob=np.where(first, tree.behavior_logprob, tree.logprob))
    assert mean_error(tree, Case("cumulative")) < 1e-12
    assert mean_error(tree, Case("token")) > 0.01


def test_whole_sequence_ratio_recovers_the_gradient_with_any_constant():
    # E_μ[Πρ · S (R − B)] = ∇J
    tree = drifted(SHARED, 4)
    for b in (0.0, 0.7):
        np.testing.assert_allclose(mean_gradient(tree, SEQUENCE, b), tree.gradient, atol=1e-14)


def correlations(tree, ratio):
    scaled = ratio[:, :, None] * tree.score
    return tree.expect(np.einsum("mtd,mkd->mtk", scaled, scaled)) * (1 - np.eye(4))


@pytest.mark.parametrize("name", KNOWN)
def test_weighted_scores_stay_uncorrelated(name):
    tree = drifted(SHARED, 5)
    np.testing.assert_allclose(correlations(tree, weights(tree, name)), 0, atol=1e-13)


def test_whole_sequence_ratio_correlates_the_positions():
    tree = drifted(SHARED, 5)
    assert np.abs(correlations(tree, SEQUENCE.ratio(tree).value)).max() > 1e-3


@pytest.mark.parametrize("name", KNOWN)
def test_regret_identity_holds_with_ratios_known_at_the_token(name):
    tree = drifted(SHARED, 6)
    ratio = weights(tree, name)
    best = population_moments(tree, position_optimum(tree, ratio), ratio).variance
    for baseline in np.random.default_rng(0).normal(size=(4, 4)):
        excess = population_moments(tree, baseline, ratio).variance - best
        assert abs(excess - regret(tree, baseline, ratio)) < 1e-10


def test_regret_identity_fails_for_the_whole_sequence_ratio():
    tree = drifted(SHARED, 6)
    ratio = SEQUENCE.ratio(tree).value
    best = population_moments(tree, position_optimum(tree, ratio), ratio).variance
    excess = population_moments(tree, np.ones(4), ratio).variance - best
    assert abs(excess - regret(tree, np.ones(4), ratio)) > 1e-3
