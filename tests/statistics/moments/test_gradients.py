import dataclasses

import numpy as np
import pytest

from otb_analysis import schema
from otb_analysis.errors import InputError
from otb_analysis.statistics import Gram, gradient_statistics, paired_ratios, pooled_statistics
from otb_analysis.statistics import moments as measures
from otb_analysis.statistics.moments import deleted_moments

RLOO, OTB, MEAN = ("rloo", "none"), ("otb", "exact"), ("group_mean", "none")


def brute(g, r):
    """The same figures from explicit gradients [P, D] of an estimator and of the reference, one pair at a time."""
    p = len(g)
    pairs = [(i, j) for i in range(p) for j in range(p) if i != j]
    mean_sq = np.mean([g[i] @ g[j] for i, j in pairs])
    along = np.mean([g[i] @ r[j] for i, j in pairs])
    truth = np.mean([r[i] @ r[j] for i, j in pairs])
    mean = g.mean(axis=0)
    variance = sum((row - mean) @ (row - mean) for row in g) / (p * (p - 1))
    return {
        "total_power": np.mean([row @ row for row in g]),
        "mean_norm_sq": mean @ mean,
        "variance": variance,
        "relative_bias": np.sqrt(max(mean_sq - 2 * along + truth, 0) / truth),
        "projection": along / truth,
        "sf": variance / (along / truth) ** 2,
        "efficiency": along**2 / (truth * (mean_sq + variance)),
    }


def test_two_prompts_by_hand(gram_of):
    # rloo gradients (2,0),(1,1); otb gradients (1,0),(1,0).
    # rloo: powers 4 and 2, mean 3; ḡ = (1.5,.5), ‖ḡ‖² = 2.5; variance ((.5²+.5²)·2)/2 = .5; ‖∇J‖² = (2,0)·(1,1) = 2.
    # otb: power 1, ‖ḡ‖² = 1, variance 0; ⟨m,∇J⟩ = ((1,0)·(1,1) + (1,0)·(2,0))/2 = 1.5; c = .75; ‖m‖² = 1,
    # bias² = 1 − 3 + 2 = 0; efficiency 2.25/(2·1) = 1.125, above 1 through noise.
    g = np.array([[[2, 0], [1, 1]], [[1, 0], [1, 0]]], dtype=float)
    rloo, otb = gradient_statistics(gram_of(g), [RLOO, OTB], 16)
    assert (rloo.total_power, rloo.mean_norm_sq, rloo.variance) == pytest.approx((3, 2.5, 0.5))
    assert (rloo.projection, rloo.relative_bias, rloo.sf) == pytest.approx((1, 0, 0.5))
    assert rloo.efficiency == pytest.approx(2 / 2.5)
    assert rloo.rollout_equivalents == pytest.approx(16)
    assert rloo.variance * rloo.n_rollouts == pytest.approx(8)
    assert (otb.total_power, otb.mean_norm_sq, otb.variance) == pytest.approx((1, 1, 0))
    assert (otb.projection, otb.relative_bias, otb.sf) == pytest.approx((0.75, 0, 0))
    assert otb.efficiency == pytest.approx(1.125)
    assert otb.rollout_equivalents == np.inf
    assert rloo.variance_low is None and rloo.intervals["variance"] is not None


def test_every_figure_equals_the_one_from_explicit_gradients(gram_of, noisy_prompts):
    rng = np.random.default_rng(0)
    g = noisy_prompts(rng, [[2, 1, 0, 0, 0], [1, 1, 0.5, 0, 0], [0.2, 0, 0, 0, 1]], 20)
    found = gradient_statistics(gram_of(g), [RLOO, OTB, MEAN], 160)
    for m, row in enumerate(found):
        expected = brute(g[m], g[0])
        assert {key: getattr(row, key) for key in expected} == pytest.approx(expected)


def test_deleting_a_prompt_equals_leaving_it_out(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(1), [[2, 1], [1, 1]], 18)
    moments = deleted_moments([Gram(gram_of(g), (RLOO, OTB), 1)], OTB)
    for k in range(18):
        rest = np.delete(g, k, axis=1)
        expected = brute(rest[1], rest[0])
        assert measures.batch_variance(moments, 17)[k + 1] == pytest.approx(expected["variance"])
        assert measures.projection(moments)[k + 1] == pytest.approx(expected["projection"])
        assert measures.efficiency(moments, 17)[k + 1] == pytest.approx(expected["efficiency"])


def test_rotating_all_gradients_changes_nothing(gram_of, noisy_prompts):
    rng = np.random.default_rng(2)
    g = noisy_prompts(rng, [[2, 1, 0], [1, 1, 1]], 20)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    before = gradient_statistics(gram_of(g), [RLOO, OTB], 20)
    after = gradient_statistics(gram_of(g @ turn), [RLOO, OTB], 20)
    for a, b in zip(before, after, strict=True):
        assert [v for v in b.as_row().values() if isinstance(v, float)] == pytest.approx(
            [v for v in a.as_row().values() if isinstance(v, float)], rel=1e-9, abs=1e-12
        )


def test_permuting_prompts_changes_nothing(gram_of, noisy_prompts):
    rng = np.random.default_rng(3)
    g = noisy_prompts(rng, [[2, 1, 0], [1, 1, 1]], 20)
    before = gradient_statistics(gram_of(g), [RLOO, OTB], 20)[1]
    after = gradient_statistics(gram_of(g[:, rng.permutation(20)]), [RLOO, OTB], 20)[1]
    assert (after.variance_low, after.sf, after.efficiency) == pytest.approx(
        (before.variance_low, before.sf, before.efficiency)
    )


def test_a_smaller_step_lowers_the_variance_but_neither_sf_nor_efficiency(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(4), [[2, 1], [2, 1]], 20)
    g[1] = 0.25 * g[0]
    full, small = gradient_statistics(gram_of(g), [RLOO, OTB], 80)
    assert full.variance and full.sf and full.efficiency
    assert small.variance == pytest.approx(full.variance / 16)
    assert small.projection == pytest.approx(0.25)
    assert small.relative_bias == pytest.approx(0.75)
    assert small.sf == pytest.approx(full.sf)
    assert small.efficiency == pytest.approx(full.efficiency)
    assert small.rollout_equivalents == pytest.approx(80)


def test_moments_are_unbiased(gram_of, noisy_prompts):
    # m = (1,.5), ∇J = (2,1): ‖m‖² = 1.25, ⟨m,∇J⟩ = 2.5, ‖∇J‖² = 5; noise 2·(.25 + 1) per prompt, so V = 2.5.
    rng = np.random.default_rng(5)
    found = []
    for _ in range(2000):
        g = noisy_prompts(rng, [[2, 1], [1, 0.5]], 4)
        m = deleted_moments([Gram(gram_of(g), (RLOO, OTB), 1)], OTB)
        found.append([m.mean_sq[0], m.along[0], m.truth_sq[0], measures.batch_variance(m, 4)[0]])
    mean, stderr = np.mean(found, axis=0), np.std(found, axis=0) / np.sqrt(len(found))
    assert (np.abs(mean - [1.25, 2.5, 5, 2.5 / 4]) < 4 * stderr).all()


def test_paired_ratio_is_shorter_than_the_two_intervals_suggest(gram_of, noisy_prompts):
    rng = np.random.default_rng(6)
    g = noisy_prompts(rng, [[2, 1], [2, 1]], 32)
    g[1] = g[0] + 0.1 * rng.normal(size=g[0].shape)
    gram = Gram(gram_of(g), (RLOO, OTB), 32)
    (pair,) = paired_ratios([gram])
    alone = gradient_statistics(gram.inner, gram.labels, 32)[1].intervals["variance"]
    assert pair.variance is not None and pair.variance.low is not None and pair.variance.high is not None
    assert alone is not None and alone.low is not None and alone.high is not None
    assert pair.variance.high / pair.variance.low < (alone.high / alone.low) ** 0.5
    assert pair.variance.low < 1.1 and pair.variance.high > 0.9
    assert "ratio of the batch variance" in pair.variance.estimand


def test_paired_efficiency_can_be_that_of_another_number_of_prompts(gram_of, noisy_prompts):
    # As P grows both efficiencies tend to 1 when both are unbiased, and so does their ratio.
    g = noisy_prompts(np.random.default_rng(8), [[2, 1], [2, 1]], 20)
    gram = Gram(gram_of(g), (RLOO, OTB), 20)
    (few,), (many,) = (paired_ratios([gram], n_prompts=p) for p in (20, 10**7))
    assert few == paired_ratios([gram])[0]
    assert few.efficiency is not None and many.efficiency is not None and many.variance is not None
    own, base = (row.efficiency for row in reversed(pooled_statistics([gram], n_prompts=10**7)))
    assert own is not None and base is not None
    assert many.efficiency.estimate == pytest.approx(own / base)
    assert many.efficiency.estimate != few.efficiency.estimate
    assert few.variance is not None and many.variance.estimate == pytest.approx(few.variance.estimate)


def test_paired_ratio_of_a_copy_is_one(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(7), [[2, 1], [2, 1]], 20)
    g[1] = g[0]
    (pair,) = paired_ratios([Gram(gram_of(g), (RLOO, OTB), 20)])
    for ratio in (pair.variance, pair.sf, pair.efficiency):
        assert ratio is not None
        assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((1, 1, 1))


def test_paired_efficiency_is_stated_for_any_size_of_update(gram_of, noisy_prompts):
    rng = np.random.default_rng(9)
    gram = Gram(gram_of(noisy_prompts(rng, [[3, 1], [3, 1.5]], 20)), (RLOO, OTB), 20)
    for prompts in (5, 500):
        (pair,) = paired_ratios([gram], n_prompts=prompts)
        plain, other = pooled_statistics([gram], n_prompts=prompts)
        assert pair.efficiency is not None and plain.efficiency and other.efficiency
        assert pair.efficiency.estimate == pytest.approx(other.efficiency / plain.efficiency)
        assert f"{prompts} prompts" in pair.efficiency.estimand
    own, stated = paired_ratios([gram])[0], paired_ratios([gram], n_prompts=5)[0]
    assert own.sf is not None and stated.sf is not None and stated.sf.low == pytest.approx(own.sf.low)


def test_fifteen_prompts_give_points_and_sixteen_an_interval(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(8), [[3, 1]], 16)
    few = gradient_statistics(gram_of(g[:, :15]), [RLOO], 15)[0]
    enough = gradient_statistics(gram_of(g), [RLOO], 16)[0]
    assert few.variance is not None and few.variance_low is None and few.variance_high is None
    assert enough.variance and enough.variance_low and enough.variance_high
    assert enough.variance_low < enough.variance < enough.variance_high


@pytest.mark.parametrize("n_prompts", [0, 1])
def test_too_few_prompts_leave_none_where_a_figure_is_undefined(n_prompts):
    row = gradient_statistics(np.full((2, 2, n_prompts, n_prompts), 4.0), [RLOO, OTB], n_prompts)[1]
    assert row.n_prompts == n_prompts
    assert row.variance is row.variance_low is row.projection is row.sf is row.efficiency is row.relative_bias is None
    assert row.total_power == row.mean_norm_sq == (4.0 if n_prompts else None)


def test_equal_rewards_everywhere_give_zeros_and_none():
    row = gradient_statistics(np.zeros((2, 2, 20, 20)), [RLOO, OTB], 20)[1]
    assert (row.total_power, row.mean_norm_sq, row.variance) == (0, 0, 0)
    assert row.variance_low is row.projection is row.sf is row.efficiency is row.rollout_equivalents is None


def test_without_the_reference_only_power_and_variance_are_known(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(9), [[2, 1]], 20)
    row = gradient_statistics(gram_of(g), [OTB], 20)[0]
    assert row.variance is not None and row.variance_low is not None
    assert row.projection is row.sf is row.efficiency is row.relative_bias is row.reference is None


def test_an_estimate_of_the_gradient_that_is_not_positive_gives_none(gram_of):
    # (1,0) and (−1,0): the only pair has inner product −1.
    row = gradient_statistics(gram_of(np.array([[[1.0, 0], [-1, 0]]])), [RLOO], 2)[0]
    assert row.variance == pytest.approx(1)
    assert row.projection is row.sf is row.efficiency is row.relative_bias is None


def test_an_estimator_that_was_not_measured_does_not_touch_the_others(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(10), [[2, 1], [2, 1]], 20)
    g[1, 3] = np.inf
    with np.errstate(invalid="ignore"):
        gram = gram_of(g)
    rloo, otb = gradient_statistics(gram, [RLOO, OTB], 20)
    assert rloo == gradient_statistics(gram_of(g[:1]), [RLOO], 20)[0]
    assert otb.variance is otb.projection is otb.total_power is None


def test_rows_are_the_columns_of_the_gradients_table(gram_of, noisy_prompts):
    row = gradient_statistics(gram_of(noisy_prompts(np.random.default_rng(11), [[2, 1]], 20)), [RLOO], 20)[0]
    assert ["step", *row.as_row()] == [c.name for c in schema.GRADIENTS]
    names = [f.name for f in dataclasses.fields(row) if f.name != "signal"]  # which says what may be shown
    assert names[: len(row.as_row())] == list(row.as_row())


def test_pooling_one_step_is_that_step(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(12), [[2, 1], [1, 1]], 20)
    gram = Gram(gram_of(g), (RLOO, OTB), 80)
    assert pooled_statistics([gram]) == gradient_statistics(gram.inner, gram.labels, 80)


def test_pooling_divides_sums_over_steps(gram_of, noisy_prompts):
    rng = np.random.default_rng(13)
    steps = [noisy_prompts(rng, [[2, 1], [1, 1]], 6) for _ in range(5)]
    otb = pooled_statistics([Gram(gram_of(g), (RLOO, OTB), 24) for g in steps])[1]
    pairs = [(i, j) for i in range(6) for j in range(6) if i != j]
    along = np.mean([g[1, i] @ g[0, j] for g in steps for i, j in pairs])
    truth = np.mean([g[0, i] @ g[0, j] for g in steps for i, j in pairs])
    assert otb.projection == pytest.approx(along / truth)
    assert otb.variance == pytest.approx(np.mean([brute(g[1], g[0])["variance"] for g in steps]))
    assert (otb.n_prompts, otb.n_rollouts, otb.n_clusters) == (6, 24, 30)
    assert otb.variance_low is not None


def slow_moments(steps, without=None):
    """Means over prompts of their own step's moments, by loops; steps are (gradients [2, P, D], names), otb then rloo.

    A step's pairs are those of prompts with different names; a step without any does not count.
    """
    weights, rows = [], []
    for (own, reference), names in steps:
        kept = [p for p in range(len(names)) if names[p] != without]
        pairs = [(p, q) for p in kept for q in kept if names[p] != names[q]]
        if not pairs:
            continue
        weights.append(len(kept))
        rows.append([
            np.mean([own[p] @ own[p] for p in kept]),
            np.mean([own[p] @ own[q] for p, q in pairs]),
            np.mean([own[p] @ reference[q] for p, q in pairs]),
            np.mean([reference[p] @ reference[q] for p, q in pairs]),
            np.mean([reference[p] @ reference[p] for p in kept]),
        ])  # fmt: skip
    return np.average(rows, axis=0, weights=weights)


def test_steps_of_unlike_numbers_of_prompts_weigh_all_moments_by_their_prompts(gram_of, noisy_prompts):
    # Policies differ between the steps, so that weights that differ between the moments would show. "a" is twice in
    # the second step and back in the third, which has one pair: without "a" or "z" it has none. The fourth never has.
    names = ["abcdefgh", "aaijk", "az", "y"]
    rng, sizes = np.random.default_rng(18), (0.5, 1, 4, 20)
    draws = [noisy_prompts(rng, [[s, 1], [1, s]], len(n)) for s, n in zip(sizes, names, strict=True)]
    grams = [Gram(gram_of(g), (OTB, RLOO), 4, tuple(n)) for g, n in zip(draws, names, strict=True)]
    m = deleted_moments(grams, OTB)
    found = np.array([m.power, m.mean_sq, m.along, m.truth_sq, m.reference_power]).T
    steps = list(zip(draws, names, strict=True))
    every = list(dict.fromkeys("".join(names)))
    np.testing.assert_allclose(found, [slow_moments(steps), *(slow_moments(steps, without=name) for name in every)])


def test_the_variance_of_unlike_steps_is_that_within_steps(gram_of):
    # Without noise inside a step its variance is 0, however much the steps' gradients and numbers of prompts differ.
    steps = [np.full((1, p, 3), value) for p, value in ((2, 5.0), (7, 1.0), (20, 0.0))]
    row = pooled_statistics([Gram(gram_of(g), (RLOO,), 4) for g in steps])[0]
    assert row.variance == pytest.approx(0)


def test_a_prompt_that_comes_back_is_one_cluster(gram_of, noisy_prompts):
    rng = np.random.default_rng(14)
    names = tuple("abcdefgh")
    steps = [Gram(gram_of(noisy_prompts(rng, [[2, 1]], 8)), (RLOO,), 8, names) for _ in range(4)]
    row = pooled_statistics(steps)[0]
    assert row.n_clusters == 8
    assert row.variance_low is None


def test_two_groups_of_one_prompt_are_not_compared_with_each_other(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(15), [[2, 1]], 3)
    m = deleted_moments([Gram(gram_of(g), (RLOO,), 3, ("a", "a", "b"))], RLOO)
    assert m.truth_sq[0] == pytest.approx((g[0, 0] @ g[0, 2] + g[0, 1] @ g[0, 2]) / 2)
    assert m.power[1:] == pytest.approx([g[0, 2] @ g[0, 2], (g[0, 0] @ g[0, 0] + g[0, 1] @ g[0, 1]) / 2])


def test_a_larger_update_is_more_efficient_by_the_stated_formula(gram_of, noisy_prompts):
    g = noisy_prompts(np.random.default_rng(16), [[2, 1]], 12)
    gram = Gram(gram_of(g), (RLOO,), 48)
    small, large = pooled_statistics([gram])[0], pooled_statistics([gram], n_prompts=1200)[0]
    assert small.variance and small.efficiency and large.efficiency
    assert large.variance == pytest.approx(small.variance / 100)
    # 1/e − 1 = V/(P‖∇J‖²) for the reference.
    assert 1 / large.efficiency - 1 == pytest.approx((1 / small.efficiency - 1) / 100)
    assert (large.n_prompts, large.n_rollouts) == (1200, 4800)


def test_steps_without_the_label_or_the_reference_are_left_out(gram_of, noisy_prompts):
    rng = np.random.default_rng(17)
    both = Gram(gram_of(noisy_prompts(rng, [[2, 1], [2, 1]], 6)), (RLOO, OTB), 6)
    alone = Gram(gram_of(noisy_prompts(rng, [[2, 1]], 6)), (OTB,), 6)
    rloo, otb = pooled_statistics([both, alone])
    assert (rloo, otb) == tuple(pooled_statistics([both]))


def test_no_step_gives_no_row_and_moments_that_are_not_known():
    assert pooled_statistics([]) == []
    assert paired_ratios([]) == []
    assert np.isnan(deleted_moments([], OTB).power).tolist() == [True]


def test_a_matrix_of_the_wrong_shape_is_named():
    with pytest.raises(InputError, match=r"inner has shape \(2, 2, 3, 3\) .* 1 labels"):
        gradient_statistics(np.zeros((2, 2, 3, 3)), [RLOO], 3)
    with pytest.raises(InputError, match="once"):
        gradient_statistics(np.zeros((2, 2, 3, 3)), [RLOO, RLOO], 3)
    with pytest.raises(InputError, match="one per prompt"):
        Gram(np.zeros((1, 1, 3, 3)), (RLOO,), 3, ("a",))
