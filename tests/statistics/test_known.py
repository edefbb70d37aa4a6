"""Projections that are proved: what no longer depends on ∇J, and how ∇J is pooled over unbiased estimators."""

import numpy as np
import pytest

from otb_analysis.statistics import Gram, Proved, deleted_moments, paired_ratios, pooled_statistics
from otb_analysis.statistics.moments import REFERENCE
from studies.lib.enumeration.coverage import NOMINAL_FLOOR, OTHER, enumerated, measure

NONE, OTB = ("none", "none"), ("otb", "proxy")
BOTH = Proved({REFERENCE: 1.0, OTHER: 1.0}, frozenset((REFERENCE, OTHER)))
KNOWN = Proved({REFERENCE: 1.0, NONE: 1.0}, frozenset((REFERENCE, NONE)))


@pytest.fixture
def steps(gram_of, noisy_prompts):
    """Two steps of 12 prompts: rloo and none unbiased, otb half as long."""
    rng = np.random.default_rng(0)
    draws = [noisy_prompts(rng, [[2, 0, 0], [2, 0, 0], [1, 0.2, 0]], 12) for _ in range(2)]
    return [Gram(gram_of(g), (REFERENCE, NONE, OTB), 48) for g in draws]


def test_sf_ratio_of_unbiased_estimators_is_their_variance_ratio_with_its_interval(steps):
    none, otb = paired_ratios(steps, known=KNOWN)
    for name in ("estimate", "low", "high", "p_value"):
        assert getattr(none.sf, name) == getattr(none.variance, name)
    assert otb.sf.estimate > 2 * otb.variance.estimate  # its projection is still estimated


def test_efficiency_of_an_unbiased_estimator_is_that_of_its_variance_and_the_pooled_gradient(steps):
    rloo, none, otb = pooled_statistics(steps, known=KNOWN)
    pooled = deleted_moments(steps, REFERENCE, KNOWN.truth).truth_sq[0]
    for row in (rloo, none):
        assert (row.projection, row.relative_bias, row.c_known) == (1.0, 0.0, True)
        assert row.sf == row.variance
        # V = E‖g‖² − ‖∇J‖² for both, with one ‖∇J‖²; the variance by itself is around the row's own mean.
        assert row.efficiency == pytest.approx(1 / (1 + (row.total_power - pooled) / (12 * pooled)))
    ratio = paired_ratios(steps, known=KNOWN)[0].sf
    assert none.rollout_equivalents == pytest.approx(48 / ratio.estimate)  # one comparison, one number
    assert none.intervals["rollout_equivalents"].low == pytest.approx(48 / ratio.high)
    assert rloo.rollout_equivalents == pytest.approx(48)
    assert not otb.c_known


def test_known_length_other_than_one_is_taken_out(steps):
    shrunk = Proved(KNOWN.projection | {OTB: 0.5}, KNOWN.truth)
    otb = pooled_statistics(steps, known=shrunk)[2]
    assert otb.sf == pytest.approx(4 * otb.variance)
    assert (otb.projection, otb.relative_bias) == (0.5, 0.5)


def test_unbiased_rows_stay_decided_where_the_gradient_is_lost_in_the_noise(gram_of):
    rng = np.random.default_rng(1)
    g = rng.normal(size=(3, 24, 30))
    g = g - g.mean(axis=1, keepdims=True)  # the mean over prompts is 0, so pairs of prompts have negative products
    g[1] *= 0.5
    gram = Gram(gram_of(g), (REFERENCE, NONE, OTB), 96)
    _, none, otb = pooled_statistics([gram], known=KNOWN)
    assert deleted_moments([gram], REFERENCE, KNOWN.truth).truth_sq[0] < 0
    assert (none.projection, none.efficiency) == (1.0, None)
    assert (otb.projection, otb.sf) == (None, None)
    against_none, against_otb = paired_ratios([gram], known=KNOWN)
    assert against_none.sf.high < 1
    assert none.rollout_equivalents == pytest.approx(96 / against_none.sf.estimate)
    assert (against_none.efficiency, against_otb.sf) == (None, None)


def test_step_without_an_unbiased_estimator_does_not_count_where_others_have_one(steps, gram_of, noisy_prompts):
    alone = Gram(gram_of(noisy_prompts(np.random.default_rng(5), [[1, 0, 0]], 12)), (OTB,), 48)
    assert pooled_statistics([*steps, alone], known=KNOWN)[2] == pooled_statistics(steps, known=KNOWN)[2]


def test_without_the_reference_rollouts_are_counted_against_nothing(gram_of, noisy_prompts):
    gram = Gram(gram_of(noisy_prompts(np.random.default_rng(2), [[2, 0], [1, 0]], 20)), (NONE, OTB), 80)
    none, otb = pooled_statistics([gram], known=KNOWN)
    assert none.reference == otb.reference == "none"
    assert (none.rollout_equivalents, otb.rollout_equivalents) == (None, None)


@pytest.mark.parametrize("seed", [2, 8])
def test_pooled_gradient_is_unbiased_and_less_noisy_than_that_of_rloo_alone(seed):
    names = ("rloo", "none", "otb_loo", "sequence_optimal_loo", "token_optimal_loo")
    law, rng = enumerated(seed, names=names), np.random.default_rng(0)
    labels = (REFERENCE, *((name, "exact") for name in names[1:]))
    found = []
    for _ in range(2000):
        g = law.draw(rng, 24)
        gram = Gram(np.einsum("mpd,nqd->mnpq", g, g), labels, 96)
        found.append([deleted_moments([gram], REFERENCE, t).truth_sq[0] for t in (REFERENCE, frozenset(labels))])
    alone, pooled = np.array(found).T
    stderr = pooled.std() / np.sqrt(len(pooled))
    assert abs(pooled.mean() - law.moments.truth_sq[0]) < 4 * stderr
    assert pooled.std() < 0.97 * alone.std()


def test_intervals_with_a_known_projection_cover_and_are_always_given_where_prompts_suffice():
    law = enumerated(2, names=("rloo", "otb_loo"))
    known = measure(law, 1, 24, repetitions=200, known=BOTH)
    slack = 2 * np.sqrt(NOMINAL_FLOOR * (1 - NOMINAL_FLOOR) / 200)
    assert known["SF ratio"].covered > NOMINAL_FLOOR - slack
    assert known["SF"].covered > 0.85  # rare prompts decide in this law, as docs/coverage.md says
    assert known["SF ratio"].given == known["SF"].given == 1.0
    assert measure(law, 1, 24, repetitions=200)["SF ratio"].given < 0.9


def test_known_projection_shortens_the_interval_of_the_sf_ratio():
    law, rng = enumerated(8, names=("rloo", "otb_loo")), np.random.default_rng(0)
    widths = []
    for _ in range(60):
        g = law.draw(rng, 64)
        gram = Gram(np.einsum("mpd,nqd->mnpq", g, g), (REFERENCE, OTHER), 256)
        pairs = [paired_ratios([gram], known=known)[0].sf for known in (BOTH, Proved())]
        if all(pair is not None and pair.low is not None for pair in pairs):
            widths.append([np.log(pair.high / pair.low) for pair in pairs])
    known, estimated = np.median(widths, axis=0)
    assert len(widths) > 40
    assert known < 0.8 * estimated
