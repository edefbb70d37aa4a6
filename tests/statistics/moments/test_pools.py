import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import EstimatorInputs, estimate
from otb_analysis.statistics import (
    Partition,
    Proved,
    gradient_statistics,
    group_gradients,
    held_out,
    paired_ratios,
    partitions,
    pool_gram,
    pool_statistics,
    position_optimum,
)

RLOO, MEAN = ("rloo", "none"), ("group_mean", "none")


def draw(rng, n_prompts, n, dim=3):
    """One-token rollouts: Gaussian scores, reward 1 where the score and noise point along the prompt's direction."""
    direction = np.array([1.0, 0.5, 0]) + rng.normal(scale=0.5, size=(n_prompts, dim))
    prompt = np.repeat(np.arange(n_prompts), n)
    score = rng.normal(size=(n_prompts * n, dim))
    reward = ((score * direction[prompt]).sum(axis=1) + rng.normal(size=prompt.size) > 0).astype(float)
    return prompt, score, reward


def advantages(reward, group, names=("rloo", "group_mean")):
    kept = group >= 0
    out = np.zeros((len(names), reward.size))
    inputs = EstimatorInputs(reward[kept, None], np.ones((kept.sum(), 1), dtype=bool), group[kept])
    for m, name in enumerate(names):
        out[m, kept] = estimate(name, inputs).advantage[:, 0]
    return out


def pool_of(prompt, score, reward, size, shuffles=4):
    cuts = partitions(prompt, size, shuffles)
    vectors = [group_gradients(score, advantages(reward, cut.group), cut) for cut in cuts]
    return pool_gram(vectors, cuts, [RLOO, MEAN])


def test_groups_are_disjoint_whole_and_of_one_prompt():
    prompt = np.random.default_rng(0).permutation(np.repeat([3, 7, 9], [8, 11, 9]))
    for cut in partitions(prompt, 4, shuffles=3):
        assert np.bincount(cut.group[cut.group >= 0]).tolist() == [4] * 6
        assert cut.prompt.tolist() == [0, 0, 1, 1, 2, 2]
        kept = cut.group >= 0
        np.testing.assert_array_equal(np.unique(prompt)[cut.prompt[cut.group[kept]]], prompt[kept])
        assert [(cut.group[prompt == p] < 0).sum() for p in (3, 7, 9)] == [0, 3, 1]


def test_shuffles_differ_and_are_seeded():
    prompt = np.repeat([0, 1], 16)
    first, again = partitions(prompt, 4, seed=1), partitions(prompt, 4, seed=1)
    assert all((a.group == b.group).all() for a, b in zip(first, again, strict=True))
    assert (first[0].group != first[1].group).any()


def test_a_pool_smaller_than_two_groups_is_named():
    with pytest.raises(InputError, match=r"prompt np.str_\('b'\)|prompt 'b'"):
        partitions(["a"] * 8 + ["b"] * 7, 4)
    with pytest.raises(InputError, match="at least one"):
        partitions([0, 0], 0)


def test_two_groups_of_one_rollout_by_hand():
    # Prompt 0: g = (1,0), (3,0); prompt 1: g = (0,2), (2,2). Group variance: 10/2 − 3 = 2; (4+8)/2 − 4 = 2. Prompt
    # means (2,0), (1,2): ‖m‖² = 2; power mean (5 + 6)/2 = 5.5; P·variance = 3.5 = within 2 + between 1.5.
    cut = Partition(np.arange(4), np.array([0, 0, 1, 1]))
    pool = pool_gram([np.array([[[1.0, 0], [3, 0], [0, 2], [2, 2]]])], [cut], [RLOO])
    row = pool_statistics(pool)[0]
    assert pool.group_variance(RLOO) == pytest.approx([2, 2])
    assert row.total_power == pytest.approx(5.5)
    assert (row.within, row.between) == pytest.approx((2, 1.5))
    assert row.variance == pytest.approx(1.75)
    assert row.n_rollouts == 2


def test_group_gradients_by_token_equal_a_loop():
    rng = np.random.default_rng(1)
    features, weights = rng.normal(size=(6, 3, 4)), rng.normal(size=(2, 6, 3))
    cut = Partition(np.array([0, 1, 0, -1, 1, 0]), np.array([0, 0]))
    found = group_gradients(features, weights, cut)
    for m in range(2):
        for a, members in enumerate(([0, 2, 5], [1, 4])):
            slow = np.mean([sum(weights[m, i, t] * features[i, t] for t in range(3)) for i in members], axis=0)
            assert found[m, a] == pytest.approx(slow)


def test_within_and_between_agree_with_fresh_groups():
    # Prompts are fresh on both sides, which estimate the same expectations: P·variance and its part given the prompt.
    rng = np.random.default_rng(3)
    found, fresh = [], []
    for _ in range(300):
        row = pool_statistics(pool_of(*draw(rng, 6, 16), 4))[0]
        found.append([row.within, row.between])
        _, score, reward = draw(rng, 6, 8)
        cut = Partition(np.arange(48) // 4, np.repeat(np.arange(6), 2))
        g = group_gradients(score, advantages(reward, cut.group), cut)[0].reshape(6, 2, -1)
        within = ((g[:, 0] - g[:, 1]) ** 2).sum(axis=1).mean() / 2
        total = g[:, 0].var(axis=0, ddof=1).sum()
        fresh.append([within, total - within])
    a, b = np.array(found, dtype=float), np.array(fresh)
    stderr = np.sqrt(a.var(axis=0) / len(a) + b.var(axis=0) / len(b))
    assert (np.abs(a.mean(axis=0) - b.mean(axis=0)) < 4 * stderr).all()
    # The point of a pool: the same quantity with much less noise.
    assert (a.std(axis=0) < 0.7 * b.std(axis=0)).all()


def test_group_mean_shrinks_by_one_over_n_and_has_no_other_bias():
    pool = pool_of(*draw(np.random.default_rng(4), 8, 32), 4)
    rloo, mean = pool_statistics(pool)
    assert mean.projection == pytest.approx(0.75)
    assert rloo.within is not None and rloo.sf is not None
    assert mean.within == pytest.approx(rloo.within * 0.75**2)
    assert mean.sf == pytest.approx(rloo.sf)


def test_overlapping_groups_would_understate_the_variance():
    # Eight groups of 8 drawn from one pool of 16 share rollouts: their dispersion is far below the disjoint one.
    rng = np.random.default_rng(6)
    disjoint, overlapping = [], []
    for _ in range(200):
        prompt, score, reward = draw(rng, 1, 16)
        pool = pool_of(prompt, score, reward, 8, shuffles=2)
        disjoint.append(pool.group_variance(RLOO)[0])
        groups = [rng.choice(16, 8, replace=False) for _ in range(8)]
        cut = Partition(np.zeros(8, dtype=int), np.zeros(1, dtype=int))
        g = [group_gradients(score[i], advantages(reward[i], cut.group), cut)[0, 0] for i in groups]
        overlapping.append(np.var(g, axis=0, ddof=1).sum())
    assert np.mean(overlapping) < 0.7 * np.mean(disjoint)


def test_pool_statistics_have_intervals_over_prompts():
    rloo, mean = pool_statistics(pool_of(*draw(np.random.default_rng(7), 20, 16), 4))
    assert rloo.n_clusters == 20 and rloo.variance_low is not None
    assert mean.intervals["projection"] is not None and mean.intervals["projection"].low is not None


def test_a_proved_projection_of_a_pool_is_not_estimated():
    # The group mean is exactly 3/4 of rloo, whatever the estimate of ∇J.
    pool = pool_of(*draw(np.random.default_rng(3), 20, 8), 4)
    known = Proved({RLOO: 1.0, MEAN: 0.75}, frozenset((RLOO,)))
    for n_prompts in (None, 64):
        rloo, mean = pool_statistics(pool, n_prompts=n_prompts, known=known)
        assert (rloo.projection, mean.projection, rloo.c_known, mean.c_known) == (1.0, 0.75, True, True)
        assert rloo.sf == rloo.variance and mean.sf == pytest.approx(rloo.sf)
        assert mean.within is not None and rloo.within is not None
        assert mean.within == pytest.approx(0.75**2 * rloo.within)  # the two parts stay those of the variance
    (pair,) = paired_ratios([pool.gram()], known=known)
    assert pair.c_known and pair.sf is not None and pair.variance is not None
    assert pair.sf.estimate == pytest.approx(pair.variance.estimate / 0.75**2) == pytest.approx(1)
    assert not paired_ratios([pool.gram()])[0].c_known


def test_a_single_prompt_has_a_group_variance_but_no_batch_variance():
    pool = pool_of(*draw(np.random.default_rng(8), 1, 16), 4)
    assert pool.group_variance(RLOO)[0] > 0
    row = pool_statistics(pool)[0]
    assert row.variance is row.within is row.between is None


def test_a_pool_gram_is_a_gram():
    pool = pool_of(*draw(np.random.default_rng(9), 6, 8), 4)
    gram = pool.gram()
    np.testing.assert_allclose(gram.inner, gram.inner.transpose(1, 0, 3, 2))
    assert gradient_statistics(gram.inner, gram.labels, 24)[0].variance == pool_statistics(pool)[0].variance


def test_held_out_takes_half_of_every_prompt():
    prompt = np.random.default_rng(10).permutation(np.repeat([4, 5], [10, 7]))
    chosen = held_out(prompt)
    assert [chosen[prompt == p].sum() for p in (4, 5)] == [5, 3]
    assert (held_out(prompt) == chosen).all()


def test_shapes_that_do_not_fit_are_named():
    cut = Partition(np.array([0, 0, 1, 1]), np.array([0, 0]))
    with pytest.raises(InputError, match="features has shape"):
        group_gradients(np.zeros((4, 3)), np.zeros((1, 5)), cut)
    with pytest.raises(InputError, match="one per partition"):
        pool_gram([], [], [RLOO])
    with pytest.raises(InputError, match="G = 2"):
        pool_gram([np.zeros((1, 3, 2))], [cut], [RLOO])


def coin():
    """Four rollouts of one token, exactly in the proportions of π = (1/4, 3/4); reward 1 for the first token."""
    score = np.array([[0.75, -0.75], [-0.25, 0.25], [-0.25, 0.25], [-0.25, 0.25]])
    return score[:, None, :], np.array([[1.0], [0], [0], [0]]), np.ones((4, 1), dtype=bool)


def test_the_optimum_of_a_coin_is_one_minus_p():
    # B* = p·2(1−p)²/(p·2(1−p)² + (1−p)·2p²) = 1 − p.
    assert position_optimum(*coin()) == pytest.approx([0.75])


def test_positions_that_share_no_parameters_have_the_energy_weighted_return():
    rng = np.random.default_rng(0)
    features = np.zeros((10, 2, 4))
    features[:, 0, :2], features[:, 1, 2:] = rng.normal(size=(2, 10, 2))
    returns = rng.random((10, 2))
    w = (features**2).sum(axis=2)
    found = position_optimum(features, returns, np.ones((10, 2), dtype=bool))
    assert found == pytest.approx((w * returns).sum(axis=0) / w.sum(axis=0))


def test_padding_of_an_optimum_is_never_read():
    rng = np.random.default_rng(1)
    features, returns = rng.normal(size=(6, 3, 4)), rng.random((6, 3))
    mask = np.arange(3) < rng.integers(1, 3, size=(6, 1))
    clean = position_optimum(features, returns, mask)
    dirty = position_optimum(np.where(mask[..., None], features, np.nan), np.where(mask, returns, np.inf), mask)
    np.testing.assert_array_equal(clean, dirty)
    assert clean[2] == 0


def test_shapes_of_an_optimum_that_do_not_fit_are_named():
    with pytest.raises(InputError, match=r"pass \[R, T, K\]"):
        position_optimum(np.zeros((2, 3)), np.zeros((2, 3)), np.ones((2, 3), dtype=bool))
