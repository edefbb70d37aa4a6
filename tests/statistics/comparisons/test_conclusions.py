"""Who is told from the reference, who is as good as it, and what would decide: on gradients whose law is known."""

import numpy as np
import pytest

from otb_analysis.statistics import Gram, Proved, conclude, paired_ratios
from otb_analysis.statistics.moments.gram import REFERENCE

NAMES = [(f"loo{k}", "proxy") for k in range(6)]
MEAN, OTB = ("group_mean", "none"), ("otb", "proxy")


def unbiased(*labels):
    return Proved({REFERENCE: 1.0, **dict.fromkeys(labels, 1.0)}, frozenset((REFERENCE, *labels)))


@pytest.fixture
def measured(gram_of):
    """One step of P prompts: a gradient of some length, noise of the given sizes, mostly shared."""

    def make(seed, sizes, n_prompts=64, length=3.0, own=0.3, dim=12, labels=None):
        rng = np.random.default_rng(seed)
        truth, shared = length * np.eye(dim)[0], rng.normal(size=(n_prompts, dim))
        noise = [size * (shared + own * (k > 0) * rng.normal(size=shared.shape)) for k, size in enumerate(sizes)]
        return Gram(gram_of(np.stack([truth + x for x in noise])), labels or (REFERENCE, *NAMES)[: len(sizes)], 256)

    return make


def test_quieter_and_noisier_estimators_are_told_apart_and_the_best_is_named(measured):
    found = conclude([measured(0, [1, 0.6, 0.8, 1.5, 1.0])], unbiased(*NAMES))
    assert {v.label for v in found.different if v.better} == {NAMES[0], NAMES[1]}
    assert {v.label for v in found.different if v.worse} >= {NAMES[2]}
    assert found.best is not None and found.worst is not None
    assert (found.best.label, found.worst.label) == (NAMES[0], NAMES[2])
    assert found.cause == ""


def test_interval_of_the_best_holds_for_the_choice_and_still_excludes_one(measured):
    gram = measured(0, [1, 0.6, 0.8, 1.5, 1.0])
    found = conclude([gram], unbiased(*NAMES))
    alone = paired_ratios([gram], known=unbiased(*NAMES))[0].sf
    assert found.best.sf.estimate == alone.estimate
    assert found.best.sf.low < alone.low < alone.high < found.best.sf.high < 1


def test_identical_rows_and_multiples_of_the_reference_are_no_comparison(gram_of):
    rng = np.random.default_rng(1)
    rloo, other = 2 + rng.normal(size=(2, 32, 6))
    labels = (REFERENCE, ("trloo", "none"), MEAN, OTB, ("otb_turn", "proxy"))
    gram = Gram(gram_of(np.stack([rloo, rloo, 0.75 * rloo, other, other])), labels, 128)
    found = conclude([gram])
    assert [v.label for v in found.verdicts] == [OTB]
    assert found.alike[MEAN].factor == pytest.approx(0.75)
    assert conclude([gram], first=[("otb_turn", "proxy")]).verdicts[0].label == ("otb_turn", "proxy")


def test_intervals_within_fifteen_percent_conclude_without_a_difference(measured):
    found = conclude([measured(3, [1, 1, 1, 1], own=0.05)], unbiased(*NAMES))
    assert (len(found.within), found.different, found.undecided) == (3, (), ())
    assert found.best is found.worst is None


def test_undecided_says_how_many_prompts_would_decide_and_that_many_do(measured):
    sizes = [1, 0.93, 1, 1]
    found = conclude([measured(4, sizes, n_prompts=32)], unbiased(*NAMES))
    assert found.undecided
    assert found.n_needed is not None and found.n_needed > 32
    more = conclude([measured(5, sizes, n_prompts=2 * found.n_needed)], unbiased(*NAMES))
    assert NAMES[0] in [v.label for v in (*more.different, *more.within)]


def test_fewer_than_sixteen_prompts_equal_rewards_and_a_missing_reference_are_named(measured):
    few = measured(6, [1, 0.5], n_prompts=15)
    assert (conclude([few]).cause, conclude([few]).n_prompts) == ("few prompts", 15)
    silent = Gram(np.zeros((2, 2, 20, 20)), (REFERENCE, OTB), 80)
    assert conclude([silent]).cause == "equal rewards"
    assert conclude([measured(6, [1, 0.5], labels=(OTB, MEAN))]).cause == "no reference"
    assert conclude([measured(6, [1])]).cause == "alone"


def test_without_a_proof_noise_that_exceeds_the_signal_is_the_cause_and_with_one_it_is_none(gram_of):
    g = np.random.default_rng(1).normal(size=(2, 24, 30))
    g = g - g.mean(axis=1, keepdims=True)  # pairs of prompts have negative products on average
    gram = Gram(gram_of(np.stack([g[0], 0.3 * g[1]])), (REFERENCE, OTB), 96)
    assert conclude([gram]).cause == "noise"
    assert not conclude([gram]).signal.positive
    assert [v.label for v in conclude([gram], unbiased(OTB)).different] == [OTB]


def test_one_run_without_signal_does_not_blank_what_the_other_decides(measured, gram_of):
    good, known = measured(0, [1, 0.6]), unbiased(NAMES[0])
    noise = np.random.default_rng(2).normal(size=(2, 24, 12)) * 25
    noise -= noise.mean(axis=1, keepdims=True)
    bad = Gram(gram_of(np.stack([noise[0], 0.6 * noise[0] + 0.1 * noise[1]])), good.labels, 96)
    pooled = conclude([good, bad], known)
    assert not pooled.signal.positive
    assert conclude([good]).different and not conclude([good, bad]).different  # as long as c is estimated
    assert [v.label for v in pooled.different] == [NAMES[0]]


def test_estimators_with_a_proof_are_tested_once_and_others_by_efficiency_too(measured):
    found = conclude([measured(0, [1, 0.6, 0.6])], unbiased(NAMES[0]))
    proved, estimated = found.verdicts
    assert (proved.efficiency, proved.differs_in) == (None, ("sf",))
    assert estimated.efficiency is not None and set(estimated.differs_in) == {"sf", "efficiency"}


def test_best_is_one_that_needs_no_exact_norms_where_one_was_told_apart(measured):
    labels = (REFERENCE, ("otb_loo", "exact"), ("otb_loo", "proxy"), ("otb_loo", "calibrated"))
    gram = measured(0, [1, 0.5, 0.6, 0.4], labels=labels)
    assert conclude([gram], unbiased(*labels[1:3])).best.label == ("otb_loo", "proxy")
    only = measured(0, [1, 0.5, 1, 1], labels=labels)
    assert conclude([only], unbiased(*labels[1:3])).best.label == ("otb_loo", "exact")


def test_false_discoveries_and_missed_choices_are_as_rare_as_stated(measured):
    # All estimators have the variance of the reference but one, which is a little quieter: its interval may be chosen.
    runs, truth = 200, 0.85**2 * (1 + 0.3**2)
    sizes = [1, 0.85, *[1 / np.sqrt(1 + 0.3**2)] * 4]
    wrong = missed = 0
    for seed in range(runs):
        found = conclude([measured(seed, sizes, n_prompts=32)], unbiased(*NAMES))
        wrong += any(v.label != NAMES[0] for v in found.different)
        if found.best is not None:
            exact = truth if found.best.label == NAMES[0] else 1.0
            missed += not found.best.sf.low <= exact <= found.best.sf.high
    slack = 3 * np.sqrt(0.05 * 0.95 / runs)
    assert wrong / runs < 0.05 + slack
    assert missed / runs < 0.05 + slack
