"""B against A: held-out reward first, then gradient noise, and never more than the intervals say."""

import numpy as np
import pytest

from otb_analysis.answers.measured import MeasuredSteps
from otb_analysis.answers.pairs import ENDS, estimator_pair, first_estimators, pair_of, pairing_of
from otb_analysis.errors import InputError
from otb_analysis.statistics import REFERENCE, Gram, Proved


def noisy(seed, gain=0.0, steps=40):
    return 0.5 + gain + 0.05 * np.random.default_rng(seed).normal(size=steps)


def compared(*runs):
    named = dict(zip("ab", runs, strict=True))
    return pair_of(named, pairing_of(named))


def test_a_planted_difference_of_rewards_is_said_with_its_interval_and_none_is_not_told_from_0(run_of):
    found = compared(run_of(name="a", reward=noisy(1)), run_of(name="b", reward=noisy(2, 0.1)))
    assert found.verdict.startswith("Training reward: B − A is +0.1") and "not told" not in found.verdict
    less = compared(run_of(name="a", reward=noisy(1, 0.1)), run_of(name="b", reward=noisy(2)))
    assert "B − A is −0.1" in less.verdict
    same = compared(run_of(name="a", reward=noisy(1)), run_of(name="b", reward=noisy(3)))
    assert "not told from 0" in same.verdict and "other seeds may differ" in same.verdict
    assert all(len(one.verdict.split()) <= 40 for one in (found, less, same))
    begun = [run_of(name=name, reward=noisy(seed)) for seed, name in enumerate("ab")]
    for run in begun:  # evaluated before training only
        known = {name: run.steps["step"].map({0: 0.4}) for name in ENDS}
        run.__dict__["steps"] = run.steps.assign(**known)
    assert compared(*begun).verdict.startswith("Training reward: B − A is")
    late = run_of(name="b", reward=noisy(2))
    late.__dict__["steps"] = late.steps.assign(step=late.steps["step"] + 40)
    assert "share no step" in compared(run_of(name="a", reward=noisy(1)), late).verdict


def test_gradient_noise_is_judged_by_variance_where_lengths_are_proved_else_by_efficiency(gram, run_of):
    a, b = run_of([gram([1, 0.7])]), run_of([gram([0.6, 0.5])], "b")
    assert "times A's variance at equal progress" in compared(a, b).verdict
    late = [
        run_of([gram(sizes)], name, objective={"staleness": 4}) for name, sizes in (("a", [1, 0.7]), ("b", [0.6, 0.5]))
    ]
    assert "times A's efficiency" in compared(*late).verdict
    alarmed = compared(a, run_of([gram([0.6, 0.5])], "b", "Another sampler."))
    assert alarmed.verdict.startswith("b: Another sampler.") and not alarmed.noise.rows


def test_two_estimators_of_a_run_are_compared_on_its_rollouts(gram, run_of):
    run = run_of([gram([1, 0.7, 0.8])])
    found = estimator_pair(run.measured)
    assert (found.a, found.b) == ("rloo", "sequence_optimal_loo · proxy")  # what trained, and what to train with
    assert "times A's variance" in found.verdict and "not told" not in found.verdict
    assert found.noise.rows[0].what.startswith("the rollouts of this run: ")
    later = run_of([gram([1, 0.7, 0.8])] * 8)
    later.__dict__["grams"] = {3 * step: one for step, one in later.grams.items()}  # every third step was measured
    at = estimator_pair(later.measured).panels[0].step
    assert at[-1] > 15 and set(at) <= set(np.arange(0, 22, 0.5))
    alarmed = estimator_pair(run_of([gram([1, 0.7])], alarm="Another sampler.").measured)
    assert alarmed.verdict.startswith("Another sampler.") and not alarmed.noise.rows
    assert estimator_pair(run_of([gram([1])]).measured) is None
    with pytest.raises(InputError, match="'rlo' was not measured"):
        estimator_pair(run.measured, a="rlo")
    with pytest.raises(InputError, match="both rloo"):
        estimator_pair(run.measured, a="rloo", b="rloo")


def test_a_pair_is_called_by_the_ratio_that_holds_together_with_all_others(gram):
    # At one step gpg is rloo times a factor; as what trained it gives both their name, and nothing of it is proved.
    labels = (REFERENCE, ("none", "none"), ("otb_loo", "proxy"), ("gpg", "none"))
    factors = np.array([1, 1, 1, 1.7])
    inner = gram([1, 1.5, 0.7], labels=labels).inner[np.ix_(order := [0, 1, 2, 0], order)]
    inner = inner * np.multiply.outer(factors, factors)[..., None, None]
    known = Proved(dict.fromkeys(labels[:3], 1.0), frozenset(labels[:3]))
    for trained, words in (((), "variance at equal progress"), (labels[3:], "efficiency")):
        measured = MeasuredSteps("", (Gram(inner, labels, 256),), known, trained, {}, "/runs/a")
        found = estimator_pair(measured, "none", "rloo")
        assert f"times A's {words}, all 2" in found.verdict
        if trained:  # rloo is the same update, so it does not stand beside what trained
            assert first_estimators(measured) == ("gpg", "otb_loo")
        # rloo has less variance than none, and so more efficiency.
        assert (found.noise.rows[0].judged.estimate < 1) == (words != "efficiency")
