"""Which estimators are unbiased, by enumerating every group; the catalogue names these tests."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, DecayOptions, EstimatorInputs, TailOptions, estimate
from studies.lib.enumeration.groups import group_gradients, group_moments, multisets

GROUPS = np.array([0, 0, 1, 1])
UNBIASED = [name for name, entry in ESTIMATORS.items() if entry.unbiased]
BIASED = [name for name, entry in ESTIMATORS.items() if not entry.unbiased]
WITH_TAIL = [n for n in UNBIASED if ESTIMATORS[n].options in (TailOptions, DecayOptions)]


def options_of(name, tail):
    kind = ESTIMATORS[name].options
    return kind(tail=tail) if kind in (TailOptions, DecayOptions) else None


@pytest.mark.parametrize("name", UNBIASED)
def test_entries_called_unbiased_have_no_bias(name, tree):
    for n in (1, 2) if ESTIMATORS[name].batch_coupled else (1, 2, 3):
        for tail in ("own_return", "group") if name in WITH_TAIL else (None,):
            for source in ("exact", "proxy") if "energy" in ESTIMATORS[name].needs else ("exact",):
                assert group_moments(name, tree, n, options_of(name, tail), source).relative_bias < 1e-10


@pytest.mark.parametrize("name", BIASED)
def test_entries_called_biased_have_a_bias(name, tree, draw):
    # two rollouts of one prompt, paid 0 or 1: Σ_{k<N} (1 − p)^{k−1} is 1, and one of two is paid where the mean is ½
    n, policy = (3, draw(7, vocabulary=2, horizon=3, end_token=True)) if name in ("maxrl", "gpg") else (2, tree)
    assert group_moments(name, policy, n).relative_bias > 0.01


@pytest.mark.parametrize("name", WITH_TAIL)
def test_tail_zero_is_biased(name, draw):
    bias = [
        group_moments(name, draw(seed, horizon=3, end_token=True), 3, options_of(name, "zero")).relative_bias
        for seed in range(10)
    ]
    assert np.median(bias) > 0.02


@pytest.mark.parametrize("name", ["otb_loo", "token_optimal_loo", "otb_carry_loo", "sequence_optimal_loo"])
def test_unclipped_ratios_leave_the_mean_where_no_baseline_has_it(name, draw):
    tree = draw(0, horizon=3, shared=5, end_token=True).sampled_by(draw(1, horizon=3, shared=5, end_token=True))
    np.testing.assert_allclose(group_moments(name, tree, 3).mean, group_moments("none", tree, 3).mean, atol=1e-13)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_group_mean_is_shorter_by_one_over_n_and_no_more(n, draw):
    tree = draw(2, horizon=3, shared=5, end_token=True)
    np.testing.assert_allclose(group_moments("group_mean", tree, n).mean, (1 - 1 / n) * tree.gradient, atol=1e-14)


def test_group_mean_and_rloo_have_equal_variance_at_equal_progress(draw):
    tree = draw(2, horizon=3, shared=5)
    assert abs(group_moments("group_mean", tree, 4).sf / group_moments("rloo", tree, 4).sf - 1) < 1e-12


def test_rloo_rollouts_of_one_group_are_correlated(draw):
    # V(ḡ) = Var(ĝ)/N + (1 − 1/N)·Cov, Cov = ‖∇J‖²/(N − 1)², and Var(ĝ) = E‖S‖²(R − R_{−i})² − ‖∇J‖²
    tree, n = draw(2, horizon=3, shared=5), 3
    norm = (tree.score.sum(axis=1) ** 2).sum(axis=1)
    mean, spread = tree.expect(tree.total), tree.expect(tree.total**2) - tree.objective**2
    single = tree.expect(norm * ((tree.total - mean) ** 2 + spread / (n - 1))) - tree.gradient @ tree.gradient
    covariance = tree.gradient @ tree.gradient / (n - 1) ** 2
    assert abs(group_moments("rloo", tree, n).variance - single / n - (1 - 1 / n) * covariance) < 1e-13


def test_grpo_aims_at_the_arcsine_of_the_success_rate(draw):
    # ∇ 2·arcsin√p = ∇p/√(p(1 − p)): in direction exact for one prompt, in length approached as N grows
    tree = draw(3, vocabulary=2, horizon=2)
    p = tree.objective
    target = tree.gradient / np.sqrt(p * (1 - p))
    off = []
    for n in (4, 16, 32):
        moments = group_moments("grpo", tree, n)
        cosine = moments.mean @ tree.gradient / np.linalg.norm(moments.mean) / np.linalg.norm(tree.gradient)
        assert abs(cosine - 1) < 1e-12
        off.append(np.linalg.norm(moments.mean - target) / np.linalg.norm(target))
    assert off[0] > off[1] > off[2] and off[2] < 0.05


def test_variance_over_prompts_and_rollouts_adds_up(draw):
    # prompts drawn uniformly, P = 2, N = 2: total = (E_x V(x) + tr Cov_x m(x))/P, against all pairs of groups
    trees = [draw(seed, horizon=2, shared=4) for seed in range(2)]
    moments = [group_moments("otb", tree, 2) for tree in trees]
    means = np.stack([m.mean for m in moments])
    predicted = (np.mean([m.variance for m in moments]) + means.var(axis=0).sum()) / 2
    grads, probs = [], []
    for tree in trees:
        members, prob = multisets(tree, 2)
        grads.append(group_gradients("otb", tree, members))
        probs.append(prob / 2)
    g, p = np.concatenate(grads), np.concatenate(probs)
    pair = (g[:, None] + g[None]).reshape(-1, g.shape[1]) / 2
    weight = np.outer(p, p).reshape(-1)
    total = weight @ (pair**2).sum(axis=1) - ((weight @ pair) ** 2).sum()
    assert abs(total - predicted) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("dense", "sign"), [(False, 1), (True, -1)])
def test_plain_rloo_beats_otb_loo_in_small_groups_unless_rewards_are_dense(dense, sign, draw):
    # terminal: RLOO quieter on every policy. Dense: its baseline is one total for all positions, OTB's a return-to-go
    trees = [draw(seed, horizon=3, shared=None if dense else 5, dense=dense) for seed in range(12)]
    log = np.log([group_moments("otb_loo", t, 4).variance / group_moments("rloo", t, 4).variance for t in trees])
    assert sign * log.mean() > 2 * log.std(ddof=1) / 12**0.5
    assert dense or (log > 0).all()


@pytest.mark.parametrize(("name", "length"), [("batch_mean", 1 - 1 / 4), ("batch_mean_loo", 1.0), ("james_stein", 1.0)])
def test_only_the_batch_mean_of_two_prompts_is_shorter_and_by_one_over_all_rollouts(name, length, draw):
    # every pair of groups of two from two prompts, as one batch of four: (1 − 1/4)·∇J of each prompt
    trees = [draw(seed, vocabulary=2, horizon=2, shared=3) for seed in (0, 1)]
    (first, p), (second, q) = (multisets(tree, 2) for tree in trees)
    mean = [np.zeros(3), np.zeros(3)]
    for i, j in np.ndindex(len(first), len(second)):
        members = (first[i], second[j])
        parts = [tree.inputs(rows, GROUPS[:2]) for tree, rows in zip(trees, members, strict=True)]
        reward, mask = (np.concatenate([getattr(part, field) for part in parts]) for field in ("reward", "mask"))
        advantage = estimate(name, EstimatorInputs(reward, mask, GROUPS)).advantage
        for k, rows in enumerate(members):
            gradient = np.einsum("nt,ntd->d", advantage[2 * k : 2 * k + 2], trees[k].score[rows]) / 2
            mean[k] += p[i] * q[j] * gradient
    for k in (0, 1):
        np.testing.assert_allclose(mean[k], length * trees[k].gradient, atol=1e-14)


def test_groups_too_many_to_enumerate_are_refused(draw):
    with pytest.raises(InputError, match="1929501 groups but at most 200000"):
        group_moments("rloo", draw(0), 4)
