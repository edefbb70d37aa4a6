"""Portfolios: the sum of their members, what they inherit, and names that cannot be."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import (
    ESTIMATORS,
    NoOptions,
    RegressionOptions,
    available,
    entry_of,
    estimate,
    options_from_dict,
    proved,
    registered,
    with_limit,
)
from studies.lib.enumeration.groups import group_moments
from studies.lib.enumeration.trees import TreeSpec, random_tree
from tests.enumerated_batches import batch_means

BLEND = "blend_otb_regression"


def test_blend_by_hand(worked):
    # otb of the first rollout: 1/14 at t = 1, 2 and 0 after (test_literals). The other prompt pays 3 to all, so the
    # regression predicts 3 wherever it looks from there: B = (1/14 + 3)/2
    n = len(worked.group)
    other = replace(worked, reward=np.zeros((4, 4)))
    other.reward[np.arange(4), other.mask.sum(axis=1) - 1] = 3.0
    columns = {k: np.concatenate([getattr(worked, k), getattr(other, k)]) for k in ("reward", "mask", "energy")}
    both = replace(worked, **columns, group=np.repeat([0, 1], n), entropy=np.zeros((8, 4)), rollout_norm_sq=None)
    got = estimate(BLEND, both, RegressionOptions(features=("1",), ridge=0.0))
    np.testing.assert_allclose(got.baseline[0, :2], (1 / 14 + 3) / 2)
    np.testing.assert_allclose(got.baseline[1], [(1 / 14 + 3) / 2] * 2 + [3 / 2] * 2)


@pytest.mark.parametrize("seed", range(3))
def test_advantage_is_the_weighted_sum_of_the_members(seed, make_inputs):
    inputs = make_inputs(seed, sizes=(2, 3, 4))
    # 0.25·grpo rescales, so there B = G − A; the others only subtract
    for weights in (
        {"otb": 0.5, "energy_regression": 0.5},
        {"rloo": 1.5, "none": -0.5},
        {"grpo": 0.25, "energy_across_loo": 0.75},
        {"value": 1.0},
    ):
        got = estimate("+".join(f"{a}*{name}" for name, a in weights.items()), inputs)
        members = {name: estimate(name, inputs) for name in weights}
        np.testing.assert_allclose(
            got.advantage, sum(a * members[name].advantage for name, a in weights.items()), atol=1e-12
        )
        np.testing.assert_array_equal(got.fallback, np.any([m.fallback for m in members.values()], axis=0))
        if "grpo" not in weights:
            expected = sum(a * members[name].baseline for name, a in weights.items())
            np.testing.assert_allclose(got.baseline, expected, atol=1e-12)


def test_blend_is_the_portfolio_of_its_formula_and_takes_tool_tokens(make_inputs):
    inputs = make_inputs(1)
    got, expected = estimate(BLEND, inputs), estimate("0.5*otb+0.5*energy_regression", inputs)
    np.testing.assert_array_equal(got.baseline, expected.baseline)
    assert BLEND in available(make_inputs(1, gaps=True))
    with pytest.raises(InputError, match=r"use 0\.5\*otb_turn\+0\.5\*energy_regression, which"):
        estimate("0.5*otb+0.5*energy_regression", make_inputs(1, gaps=True))


def test_memories_of_two_kinds_are_refused_at_the_first_step(make_inputs):
    inputs = replace(make_inputs(2), prompt=make_inputs(2).group)
    once = estimate("0.5*ebpo+0.5*ebpo_loo", inputs)  # of one kind: the same memory
    assert estimate("0.5*ebpo+0.5*ebpo_loo", replace(inputs, state=once.state)).state is not None
    with pytest.raises(InputError, match="memories of two kinds"):
        estimate("0.5*ebpo_loo+0.5*dbb_loo", inputs)
    estimate("0.5*energy_regression+0.5*ebpo_loo", inputs)  # the regression remembers nothing unless it is told to
    with pytest.raises(InputError, match="memories of two kinds"):
        estimate("0.5*energy_regression+0.5*ebpo_loo", inputs, RegressionOptions(memory=0.5))


def test_options_and_memory_are_those_of_the_regression(make_inputs):
    inputs = make_inputs(2)
    options = options_from_dict(BLEND, {"memory": "0.5", "T_max": "64"})
    assert with_limit(BLEND, None, 64) == RegressionOptions(T_max=64)
    kept = estimate("energy_regression", inputs, options).state
    got = estimate(BLEND, replace(inputs, state=kept), options)
    half = estimate("energy_regression", replace(inputs, state=kept), options)
    assert got.state is not None and half.state is not None
    np.testing.assert_array_equal(got.state.gram, half.state.gram)
    expected = (half.baseline + estimate("otb", inputs).baseline) / 2
    np.testing.assert_allclose(got.baseline, expected, atol=1e-14)
    bare = replace(inputs, entropy=None)
    assert BLEND not in available(bare)
    assert estimate(BLEND, bare, RegressionOptions(features=("1", "m"))).baseline.any()


def test_metadata_follow_from_the_members():
    blend = ESTIMATORS[BLEND]
    assert (blend.needs, blend.uses) == (("energy", "entropy"), ("ratio", "state"))
    assert (blend.unbiased, blend.batch_coupled, blend.takes_gaps, blend.takes_single) == (False, True, True, False)
    assert blend.conditions.startswith("as its members: otb_turn (rollout i is part")
    plain = entry_of("0.3*rloo+0.7*value")
    assert (plain.unbiased, plain.batch_coupled, plain.options) == (True, False, NoOptions)
    assert plain.needs == ("value",) and "critic" in plain.conditions
    assert entry_of("0.5*none+0.5*batch_mean_loo").takes_single
    assert entry_of("1.0*grpo").target == ESTIMATORS["grpo"].target


def test_portfolio_of_unbiased_members_has_no_bias():
    rng = np.random.default_rng(0)
    spec = TreeSpec(vocabulary=2, horizon=2, shared=3, end_token=True)
    for _ in range(3):
        trees = [random_tree(spec, rng) for _ in range(3)]
        means = batch_means("0.4*otb_loo+0.6*energy_regression", trees, 2, RegressionOptions(T_max=2))
        for mean, tree in zip(means, trees, strict=True):
            np.testing.assert_allclose(mean, tree.gradient, atol=1e-13)


def test_bias_of_a_blend_is_the_weighted_bias_of_its_members():
    tree = random_tree(TreeSpec(horizon=3, shared=5, end_token=True), np.random.default_rng(3))
    mean = group_moments("0.25*otb+0.75*none", tree, 2).mean
    otb = group_moments("otb", tree, 2).mean
    np.testing.assert_allclose(mean - tree.gradient, 0.25 * (otb - tree.gradient), atol=1e-14)


def test_projection_of_stored_portfolios_is_proved_where_the_members_are_unbiased():
    config = {"source": {}, "plain_sampling": True}
    labels = [("0.5*rloo+0.5*none", "none"), ("0.5*rloo+0.5*energy_regression", "proxy"), ("0.5*otb+0.5*rloo", "proxy")]
    known = proved([*labels, ("0.5*of_the_future+0.5*rloo", "none")], config)
    assert known.projection == {labels[0]: 1.0, labels[1]: 1.0}
    assert known.truth == {labels[0]}
    assert registered("0.5*of_the_future+0.5*rloo") is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("portfolio", r"has the term 'portfolio'; write it as 0\.5\*otb\+0\.5\*energy_regression"),
        ("0.5*otb+rloo", "has the term 'rloo'; write it as"),
        ("nan*otb+0.5*rloo", r"has the term 'nan\*otb'"),
        ("0.5*otb+0.5*rlo", "has the estimator 'rlo'; did you mean 'rloo'"),
        ("0.5*otb+0.5*otb", "has otb twice; add its weights"),
        ("0.5*otb+0.4*rloo", r"has weights that sum to 0\.9; divide them by that"),
    ],
)
def test_names_that_cannot_be_are_refused(name, sentence, make_inputs):
    with pytest.raises(InputError, match=sentence):
        estimate(name, make_inputs(0))
