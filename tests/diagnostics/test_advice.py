from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.diagnostics import advise, trained_label, update_rollouts
from otb_analysis.diagnostics.advice import Choice, judge
from otb_analysis.errors import InputError
from otb_analysis.statistics import paired_ratios
from otb_analysis.types import Gram, Proved

RLOO, MEAN, QUIET = ("rloo", "none"), ("group_mean", "none"), ("otb", "proxy")


def gram(seed, n_prompts=40, noise=(2.0, 2.0, 0.5), size=8):
    """Group gradients around one truth of length 2: two estimators with their own noise, a third that is quieter."""
    random = np.random.default_rng(seed)
    truth = 2 * np.eye(12)[0]
    shared = random.normal(size=(n_prompts, 12))
    g = np.stack([truth + s * (0.9 * shared + 0.3 * random.normal(size=shared.shape)) for s in noise])
    return Gram(np.einsum("mpd,nqd->mnpq", g, g), (RLOO, MEAN, QUIET), n_prompts * size)


STEPS = {seed: gram(seed, 16) for seed in range(8)}
"""At 16 prompts an update of the noisy two has an efficiency of about .6, that of the quiet one of about .97."""


def test_a_quieter_estimator_is_advised_with_the_ratio_that_statistics_give():
    found = advise(STEPS, {}, RLOO)
    assert found.best is not None and found.best.choice == Choice("otb", "proxy", 8)
    same = {p.estimator: p.efficiency for p in paired_ratios(list(STEPS.values()))}["otb"]
    assert found.best.ratio.estimate == pytest.approx(same.estimate)
    # Two comparisons at 97.5 % each: wider than one at 95 %.
    assert found.best.ratio.low < same.low and found.best.ratio.high > same.high
    assert "otb (proxy energies) in groups of 8 was" in found.reason and "with 2 comparisons over 128" in found.reason


def test_proved_projections_are_not_estimated():
    known = Proved({RLOO: 1.0, QUIET: 1.0, MEAN: 1 - 1 / 8}, frozenset({RLOO, QUIET}))
    steps = list(STEPS.values())
    found = advise(STEPS, {2: STEPS}, RLOO, known=known)
    same = {p.estimator: p.efficiency for p in paired_ratios(steps, n_prompts=16, known=known)}
    at = {one.choice: one for one in found.candidates}
    assert at[Choice("otb", "proxy", 8)].ratio.estimate == pytest.approx(same["otb"].estimate)
    assert at[Choice("group_mean", "none", 8)].ratio.estimate == pytest.approx(same["group_mean"].estimate)
    # In groups of 2 the mean's projection is another one, so it is estimated there.
    estimated = paired_ratios(steps, n_prompts=64, known=replace(known, projection={RLOO: 1.0}))
    mean = at[Choice("group_mean", "none", 2)].efficiency / at[Choice("rloo", "none", 2)].efficiency
    assert mean == pytest.approx({p.estimator: p.efficiency for p in estimated}["group_mean"].estimate)


def test_the_quietest_has_nothing_better_to_change_to():
    found = advise(STEPS, {}, QUIET)
    assert found.best is None and found.reason.startswith("No difference shown: nothing was more efficient than otb")
    assert any(one.ratio is not None and one.ratio.high < 1 for one in found.candidates)


def test_alike_estimators_are_called_different_as_rarely_as_promised():
    # 5 % of 100 at most, all comparisons together: more than 12 is beyond three standard errors.
    shown = sum(advise({0: gram(seed, 20, (2.0, 2.0, 2.0))}, {}, RLOO).best is not None for seed in range(100))
    assert shown <= 12


def test_entries_that_agree_are_one_comparison():
    one = gram(1)
    twice = Gram(
        np.pad(one.inner, ((0, 1), (0, 1), (0, 0), (0, 0)), mode="edge"),
        (*one.labels, ("otb_turn", "proxy")),
        one.n_rollouts,
    )
    assert "with 2 comparisons" in advise({0: twice}, {}, RLOO).reason


def test_few_prompts_are_not_tested():
    found = advise({0: gram(2, 8)}, {}, RLOO)
    assert found.best is None and found.reason.startswith("Not tested") and "16 prompts" in found.reason


def test_a_gradient_lost_in_noise_is_not_known():
    values = {Choice("rloo", "none", 8): np.full(31, np.nan), Choice("otb", "proxy", 8): np.full(31, np.nan)}
    found = judge(values, Choice("rloo", "none", 8), 128)
    assert found.reason.startswith("Not known") and "--measure.exact" in found.reason


def test_an_estimator_that_was_not_measured_is_named():
    with pytest.raises(InputError, match="no measured step has both otb_loo/exact and rloo/none"):
        advise({0: gram(0)}, {}, ("otb_loo", "exact"))


def test_a_stored_runs_smaller_groups_are_judged_at_the_same_number_of_rollouts():
    # 16 prompts of 8 rollouts. In the smaller groups of 2, of which an update has 64, the two are as noisy as in
    # groups of 8: noise averaged over four times as many groups, so four times the prompts in the efficiency.
    found = advise(STEPS, {2: STEPS}, RLOO)
    assert {one.choice.size for one in found.candidates} == {2, 8} and found.n_rollouts == 128
    assert found.best.choice.size == 2 and found.best.ratio.low > 1
    small = next(one for one in found.candidates if one.choice == Choice("rloo", "none", 2))
    whole = next(one for one in found.candidates if one.choice == Choice("rloo", "none", 8))
    # 1/e − 1 = V/(P‖∇J‖²) is a quarter at four times the prompts.
    assert (1 / small.efficiency - 1) == pytest.approx((1 / whole.efficiency - 1) / 4)
    assert "Groups of 2 and 8 were compared at the same 128 rollouts" in found.sizes_line


def test_only_steps_that_have_every_size_are_judged():
    steps = {seed: gram(seed, 16) for seed in range(4)}
    found = advise(steps, {4: {1: steps[1], 3: steps[3]}}, RLOO)
    assert found.candidates[0].ratio.n_clusters == 32
    alone = advise(steps, {}, RLOO)
    assert alone.candidates[0].ratio.n_clusters == 64 and {one.choice.size for one in alone.candidates} == {8}
    assert "the level exact measures" in alone.sizes_line


def test_smaller_groups_of_other_prompts_are_refused():
    with pytest.raises(InputError, match="other prompts"):
        advise({0: gram(0, 16)}, {2: {0: gram(0, 20)}}, RLOO)


@pytest.mark.parametrize(
    ("estimator", "label"),
    [
        ({"name": "otb", "energy": "exact"}, ("otb", "exact")),
        ({"name": "otb"}, ("otb", "proxy")),
        ({"name": "rloo", "energy": "proxy"}, ("rloo", "none")),
        ({"name": "classic_optimal"}, ("classic_optimal", "exact")),
        ("group_mean", ("group_mean", "none")),
    ],
)
def test_the_training_estimator_is_named_as_its_gradients_are(estimator, label):
    assert trained_label({"estimator": estimator}) == label


def test_an_unknown_training_estimator_is_named():
    with pytest.raises(InputError, match="estimator 'otbb'; did you mean 'otb'"):
        trained_label({"estimator": {"name": "otbb"}})


def test_efficiency_is_stated_for_the_runs_updates_not_for_the_groups_that_were_measured():
    # 1/e − 1 = V/(P‖∇J‖²): measured on 16 prompts of 8, stated for updates of 64 prompts it is a quarter.
    steps = {seed: gram(seed, 16) for seed in range(8)}
    few, many = (advise(steps, {}, RLOO, n_rollouts=n).candidates for n in (None, 512))
    small, large = (next(one for one in found if one.choice == Choice("rloo", "none", 8)) for found in (few, many))
    assert (1 / large.efficiency - 1) == pytest.approx((1 / small.efficiency - 1) / 4)


@pytest.mark.parametrize("config", [{}, {"sample": {"prompts": 16}}, {"sample": None}])
def test_a_configuration_without_counts_tells_no_rollouts(config):
    assert update_rollouts(config) is None
    assert update_rollouts({"sample": {"prompts": 16, "group_size": 8}}) == 128
