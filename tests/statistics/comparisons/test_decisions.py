"""Which estimator is better than another one: on gradients whose law is known, and worked out slowly."""

import numpy as np
import pytest

from otb_analysis.figures.comparison import comparison_info
from otb_analysis.statistics import (
    REFERENCE,
    Gram,
    Interval,
    Proved,
    decide,
    is_informative,
    paired_ratios,
    pooled_statistics,
)

NAMES = [(f"loo{k}", "proxy") for k in range(6)]
MEAN, OTB, TURN = ("group_mean", "none"), ("otb", "proxy"), ("otb_turn", "proxy")
SHARED = 1 / np.sqrt(1 + 0.3**2)
"""Size at which a noise with an own part is as large as the reference's."""


def unbiased(*labels):
    return Proved({REFERENCE: 1.0, **dict.fromkeys(labels, 1.0)}, frozenset((REFERENCE, *labels)))


def gradients(seed, sizes, n_prompts=64, length=3.0, own=0.3, dim=12):
    """Gradients [M, P, D] of prompts: one mean of some length, noise of the given sizes, mostly shared."""
    rng = np.random.default_rng(seed)
    truth, shared = length * np.eye(dim)[0], rng.normal(size=(n_prompts, dim))
    return np.stack([truth + s * (shared + own * (k > 0) * rng.normal(size=shared.shape)) for k, s in enumerate(sizes)])


def gram(vectors, labels=None):
    inner = np.einsum("mpd,nqd->mnpq", vectors, vectors)
    return Gram(inner, tuple(labels or (REFERENCE, *NAMES))[: len(vectors)], 4 * vectors.shape[1])


def measured(seed, sizes, n_prompts=64, labels=None, **law):
    return gram(gradients(seed, sizes, n_prompts, **law), labels)


def lost(labels, sizes=(1, 0.3)):
    """24 prompts whose pairs have negative products on average: no ∇J can be seen."""
    g = np.random.default_rng(1).normal(size=(len(sizes), 24, 30))
    g = (g[:1] + 0.1 * g) * np.array(sizes)[:, None, None]
    return gram(g - g.mean(axis=1, keepdims=True), labels)


def test_quieter_and_noisier_estimators_are_told_apart_and_the_best_is_named():
    found = decide([measured(0, [1, 0.6, 0.8, 1.5, SHARED])], known=unbiased(*NAMES))
    assert [one.label for one in found.better] == NAMES[:2] and found.best == found.better[0]
    assert [one.label for one in found.worse] == [NAMES[2]]
    assert (found.cause, found.n_prompts, found.update, len(found.tested)) == ("", 64, 64, 4)


def test_a_proved_pair_is_decided_by_the_difference_of_mean_squared_norms_whatever_the_update():
    for seed in range(20):
        g = gradients(seed, [1, SHARED], n_prompts=20)
        (one,) = decide([gram(g)], known=unbiased(NAMES[0])).comparisons
        power = (g**2).sum(axis=2).mean(axis=1)
        assert one.by == "variance"
        assert np.sign(one.one_look.estimate - 1) == np.sign(power[1] - power[0])
        for update in (1, 20, 10_000):
            (pair,) = paired_ratios([gram(g)], n_prompts=update, known=unbiased(NAMES[0]))
            ends = [getattr(pair.sf, name) for name in ("estimate", "low", "high")]
            assert ends == pytest.approx([getattr(one.one_look, name) for name in ("estimate", "low", "high")])


def test_the_ratio_of_a_proved_pair_is_that_of_its_slow_twin():
    # Both stand for ∇J: M is the mean product of different prompts' mean gradients, each step with its prompts' weight.
    steps = [gradients(3, [1, 0.8], n_prompts=9), gradients(4, [1.2, 1.0], n_prompts=14)]
    powers, signal = np.zeros(2), 0.0
    for g in steps:
        prompts = g.shape[1]
        both = g.mean(axis=0)
        total = 0.0
        for p in range(prompts):
            for q in range(prompts):
                total += float(both[p] @ both[q]) * (p != q)
        signal += prompts * total / (prompts * (prompts - 1))
        powers += [sum(float(row @ row) for row in one) for one in g]
    (one,) = decide([gram(g) for g in steps], known=unbiased(NAMES[0])).comparisons
    assert one.one_look.estimate == pytest.approx((powers[1] - signal) / (powers[0] - signal), rel=1e-10)


def test_a_proved_length_is_taken_out_and_swapping_the_two_inverts_the_ratio():
    g = gradients(5, [1, 0.8])
    shrunk = Proved({REFERENCE: 1.0, MEAN: 0.75}, frozenset({REFERENCE}))
    labels = (REFERENCE, MEAN)
    (whole,) = decide([gram(g, labels)], known=Proved({REFERENCE: 1.0, MEAN: 1.0}, shrunk.truth)).comparisons
    (short,) = decide([gram(g * np.array([1, 0.75])[:, None, None], labels)], known=shrunk).comparisons
    assert short.one_look.estimate == pytest.approx(whole.one_look.estimate)
    (back,) = decide([gram(g, labels)], MEAN, unbiased(MEAN)).comparisons
    (there,) = decide([gram(g, labels)], known=unbiased(MEAN)).comparisons
    assert (1 / back.one_look.high, 1 / back.one_look.low) == pytest.approx((there.one_look.low, there.one_look.high))
    assert there.better and back.worse


def test_a_biased_pair_is_compared_by_efficiency_and_stays_open_without_a_signal():
    both = decide([measured(0, [1, 0.6, 0.6])], known=unbiased(NAMES[0])).comparisons
    assert [one.by for one in both] == ["variance", "efficiency"] and all(one.better for one in both)
    assert both[0].one_look.estimate < 1 < both[1].one_look.estimate
    labels = (REFERENCE, OTB)
    hidden = decide([lost(labels)])
    assert (hidden.signal, hidden.cause, hidden.comparisons[0].one_look) == (False, "noise", None)
    assert [one.label for one in decide([lost(labels)], known=unbiased(OTB)).better] == [OTB]


def test_a_run_without_signal_does_not_blank_the_proved_pairs_of_another():
    good, bad = measured(0, [1, 0.6], labels=(REFERENCE, OTB)), lost((REFERENCE, OTB), (40, 24))
    assert decide([good]).better and not decide([good, bad]).tested
    assert [one.label for one in decide([good, bad], known=unbiased(OTB)).better] == [OTB]


def test_multiples_are_one_comparison_named_after_the_one_that_trained():
    rloo, other = 2 + np.random.default_rng(1).normal(size=(2, 32, 6))
    labels = (REFERENCE, ("trloo", "none"), MEAN, OTB, TURN)
    one = gram(np.stack([rloo, rloo, 0.75 * rloo, other, 2 * other]), labels)
    found = decide([one])
    assert [c.label for c in found.comparisons] == [OTB] and found.alike[MEAN].factor == pytest.approx(0.75)
    assert found.comparison_of(TURN) == found.comparison_of(OTB) and found.comparison_of(MEAN) is None
    assert [c.label for c in decide([one], first=[TURN]).comparisons] == [TURN]
    assert [c.label for c in decide([one], OTB).comparisons] == [REFERENCE]
    assert decide([one], only=[TURN]).comparison_of(TURN) is not None  # asked for by name, it goes by no other


def test_the_interval_of_all_contains_that_of_one_look_which_contains_the_estimate():
    found = decide([measured(0, [1, 0.6, 0.8, 1.5, 1.0])], known=unbiased(*NAMES[:2]))
    for one in found.comparisons:
        wide, narrow = one.together, one.one_look
        assert wide.low < narrow.low < narrow.estimate == wide.estimate < narrow.high < wide.high
    alone = decide([measured(0, [1, 0.6])], known=unbiased(NAMES[0])).comparisons[0]
    assert alone.one_look == alone.together  # one look is all there is
    few = decide([measured(0, [1, 0.6, 0.8, 1.5, 1.0])], known=unbiased(*NAMES), only=NAMES[:1])
    assert few.comparisons[0].one_look == few.comparisons[0].together


def test_a_baseline_that_noise_hides_is_looked_at_too_and_counts_in_the_interval_of_all():
    # 16 prompts, each along a direction of its own: no product of two of them, so ∇J is not seen. rloo's ‖g‖² is 1,
    # otb_loo's by turns .3 and .5, otb's by turns .2 and .9.
    squares = np.array([[1, 1], [0.3, 0.5], [0.2, 0.9]])
    g = np.sqrt(np.tile(squares, 8))[:, :, None] * np.eye(16)
    labels = (REFERENCE, ("otb_loo", "proxy"), OTB)
    known = unbiased(labels[1])
    loo, hidden = decide([gram(g, labels)], known=known).comparisons
    assert hidden.one_look is hidden.together is None
    # Without a prompt the ratio of sums is 6.1/15 or 5.9/15, so log .4 has the standard error
    # √15·log(6.1/5.9)/2 = .064555.
    # Student's t of 15 degrees is 2.13145 at .975, and 2.48988 at .9875, which leaves 2.5 % for each of the two.
    assert (loo.one_look.low, loo.one_look.high) == pytest.approx((0.34858, 0.45900), abs=1e-5)
    assert (loo.together.low, loo.together.high) == pytest.approx((0.34061, 0.46975), abs=1e-4)
    (alone,) = decide([gram(g, labels)], known=known, only=labels[1:2]).comparisons
    assert alone.together == loo.one_look  # nothing else was looked at


@pytest.mark.parametrize(("low", "high", "says"), [(0.1, 9.99, True), (0.1, 10, False), (0, 1, False)])
def test_ends_that_differ_by_a_hundred_say_nothing(low, high, says):
    assert is_informative(Interval(0.5, low, high, 20, "")) is says
    assert not is_informative(Interval(0.5, None, None, 20, "")) and not is_informative(None)


def test_an_interval_that_is_too_wide_is_missing_everywhere():
    g = gradients(0, [1, 1], n_prompts=18)
    g[1, 0] *= 40  # one prompt holds all of its variance
    known = unbiased(NAMES[0])
    assert not is_informative(paired_ratios([gram(g)], known=known)[0].sf)
    found = decide([gram(g)], known=known)
    assert (found.comparisons[0].one_look, found.comparisons[0].together, found.tested) == (None, None, ())
    row = comparison_info([gram(g)], known=known).rows[1]
    assert row.ratios[0] is row.ratios[2] is row.together is None and row.told == ""
    own = pooled_statistics([gram(g)], known=known)[1]
    assert own.shown("sf") is own.shown("rollout_equivalents") is None
    assert own.shown("variance").low is None and own.shown("projection").estimate == 1
    # What rests on an estimated c goes with the signal.
    hidden = pooled_statistics([lost((REFERENCE, OTB))])[1]
    assert all(hidden.shown(name) is None for name in ("relative_bias", "projection", "sf", "rollout_equivalents"))


def test_no_estimated_step_length_is_ahead_of_a_proved_one_and_exact_norms_are_dear():
    labels = (REFERENCE, ("loo", "exact"), ("otb", "proxy"), ("loo", "proxy"), ("loo", "calibrated"), ("otb", "exact"))
    found = decide([measured(0, [1, 0.5, 0.2, 0.7, 0.4, 0.3], labels=labels)], known=unbiased(labels[1], labels[3]))
    by = [one.by for one in found.better]
    assert by == ["variance"] * 2 + ["efficiency"] * 3
    assert [one.label for one in found.better[:2]] == [("loo", "proxy"), ("loo", "exact")]
    assert found.best.label == ("loo", "proxy")


@pytest.mark.parametrize(("sizes", "best"), [([1, 0.5, 1, 1], "exact"), ([1, 1, 1, 0.5], None)])
def test_exact_norms_are_named_where_nothing_else_is_better_and_calibrated_ones_never(sizes, best):
    labels = (REFERENCE, ("otb_loo", "exact"), ("otb_loo", "proxy"), ("otb_loo", "calibrated"))
    found = decide([measured(0, sizes, labels=labels)], known=unbiased(*labels[1:]))
    assert len(found.better) == 1
    assert (found.best and found.best.label[1]) == best


def test_sixteen_prompts_are_needed():
    few, enough = (decide([measured(6, [1, 0.3], n)], known=unbiased(NAMES[0])) for n in (15, 16))
    assert (few.cause, few.n_prompts, few.n_needed, few.better) == ("few prompts", 15, 16, ())
    assert few.comparisons[0].one_look.low is None and few.comparisons[0].together is None
    assert enough.cause == "" and enough.better


def test_why_nothing_can_be_tested_is_named():
    assert decide([gram(np.zeros((2, 20, 3)), (REFERENCE, OTB))]).cause == "equal rewards"
    assert decide([measured(6, [1, 0.5], labels=(OTB, MEAN))]).cause == "no reference"
    assert decide([measured(6, [1, 0.5], labels=(OTB, MEAN))], OTB).cause == "no reference"  # ∇J has no witness
    assert decide([measured(6, [1])]).cause == "alone"


@pytest.mark.slow
def test_as_many_prompts_as_are_said_to_be_needed_show_ten_percent_four_times_in_five():
    # One of three has .9 of the reference's variance, 1 + own² = 2 times its own size squared; the others have as much.
    sizes, known = [1, np.sqrt(0.45), np.sqrt(0.5), np.sqrt(0.5)], unbiased(*NAMES)
    needed = [decide([measured(seed, sizes, 64, own=1.0)], known=known).n_needed for seed in range(20)]
    assert np.median(needed) > 2 * 64
    found = [
        decide([measured(100 + seed, sizes, round(np.median(needed)), own=1.0)], known=known) for seed in range(100)
    ]
    shown = np.mean([one.comparison_of(NAMES[0]).better for one in found])
    assert abs(shown - 0.8) < 3 * np.sqrt(0.16 / 100)


def test_among_equals_a_claim_is_as_rare_as_stated():
    runs = 200
    found = [decide([measured(seed, [1, *[SHARED] * 6], 32)], known=unbiased(*NAMES)) for seed in range(runs)]
    assert all(len(one.tested) == 6 for one in found)
    claims = sum(bool(one.better or one.worse) for one in found)
    assert claims / runs <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)
    # By efficiency likewise, where the step lengths are estimated.
    claims = sum(bool(decide([measured(seed, [1, *[SHARED] * 6], 32)]).better) for seed in range(runs))
    assert claims / runs <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)
