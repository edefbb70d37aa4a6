"""Reduced Gram matrices say what whole ones say, to the last digit."""

import numpy as np
import pandas as pd

from otb_analysis.figures.comparison import comparison_info, comparison_table
from otb_analysis.statistics import REFERENCE, decide, gain_lost, moments, pooled_statistics
from otb_analysis.types import Gram, Proved

OTHER = ("otb_loo", "exact")
LABELS = (REFERENCE, ("otb", "exact"), ("otb", "proxy"), OTHER)
KNOWN = Proved({REFERENCE: 1.0, OTHER: 1.0}, frozenset({REFERENCE, OTHER}))


def grams():
    rng, every = np.random.default_rng(0), {}
    for step in range(6):
        vectors = 1 + rng.normal(size=(len(LABELS), 8, 30))
        labels = LABELS if step else LABELS[:3]  # the first step lacks one of those that stand for ∇J
        inner = np.einsum("mpd,nqd->mnpq", vectors, vectors)[: len(labels), : len(labels)]
        every[step] = Gram(inner, labels, 32, prompt=tuple(f"{step}-{p // 2}" for p in range(8)))
    return every


def test_statistics_decision_and_gain_lost_are_the_same():
    whole = grams()
    reduced = {step: gram.reduced((REFERENCE, KNOWN.truth)) for step, gram in whole.items()}
    for step in whole:
        first, second = (pooled_statistics([some[step]], known=KNOWN) for some in (whole, reduced))
        assert first == second and len(first) == len(whole[step].labels)
    for against in (REFERENCE, LABELS[1]):
        first, second = (decide(list(some.values()), against, KNOWN) for some in (whole, reduced))
        assert first == second and first.comparisons
    lost = [gain_lost(list(some.values()), ("otb", "proxy"), ("otb", "exact")) for some in (whole, reduced)]
    assert lost[0] == lost[1] is not None


def test_a_reduced_matrix_tells_what_it_was_reduced_for():
    whole = grams()[1]
    reduced = whole.reduced((REFERENCE, KNOWN.truth))
    for some, held in ((KNOWN.truth, True), (frozenset({OTHER}), False), (frozenset({("unmeasured", "none")}), True)):
        assert reduced.stands(some) is held
        assert whole.stands(some)


def test_estimators_that_all_stand_for_the_gradient_are_compared_with_their_mean(monkeypatch):
    # Every label is proved, so the reference is all labels of a batch of them: ⟨m, ∇J⟩ is ⟨m, mean⟩ and never ⟨m, m⟩.
    known = Proved(dict.fromkeys(LABELS, 1.0), frozenset(LABELS))
    for most in (1, 2_000_000, 3 * 8**2 * 2):  # one, all and two estimators at once
        monkeypatch.setattr(moments, "MOST_NUMBERS", most)
        whole = list(grams().values())[1:]
        reduced = [gram.reduced((REFERENCE, known.truth, frozenset(LABELS[:2]))) for gram in whole]
        for label in LABELS:
            for truth in (known.truth, REFERENCE, frozenset(LABELS[:2])):
                first, second = (moments.deleted_moments(some, label, truth) for some in (whole, reduced))
                for name in ("power", "mean_sq", "along", "truth_sq", "reference_power"):
                    np.testing.assert_allclose(getattr(second, name), getattr(first, name), rtol=1e-12)
        first, second = (comparison_table(comparison_info(some, known=known)) for some in (whole, reduced))
        pd.testing.assert_frame_equal(first, second)
