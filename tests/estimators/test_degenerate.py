"""Legal input with little in it: handled and marked, never an error."""

import numpy as np
import pytest

from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, estimate

GROUP_BASED = sorted(set(ESTIMATORS) - {"none", "value", "tvm", "evpo", "position_optimal"})
SCALED = {"grpo", "tempo", "maxrl"}
WHITENED = {"reinforce_plus_plus_baseline", "ebpo"}  # centre by the whole batch, too
PRIOR = {"dbb", "dbb_loo", "krpo"}  # centre by a guess where they have seen nothing
ACROSS = {"james_stein", "james_stein_corrected", "energy_across_loo", "energy_regression", "blend_otb_regression"}
ZERO_WEIGHT = {"otb", "otb_turn", "token_optimal", "energy_ema", "sequence_optimal", "otb_carry"}


def inputs_of(reward, energy=None, group=None, mask=None):
    reward = np.array(reward, float)
    n, t = reward.shape
    return EstimatorInputs(
        reward=reward,
        mask=np.ones((n, t), bool) if mask is None else np.array(mask),
        group=np.zeros(n, np.int64) if group is None else np.array(group),
        energy=np.ones((n, t)) if energy is None else np.array(energy, float),
        rollout_norm_sq=np.ones(n),
        value=np.zeros((n, t)),
        position_baseline=np.zeros((n, t)),
        ratio=np.ones((n, t)),
        turn=np.zeros((n, t), np.int64),
        token_id=np.zeros((n, t), np.int64),
        entropy=np.zeros((n, t)),
    )


@pytest.mark.parametrize("name", sorted(set(GROUP_BASED) - WHITENED - {"dbb", "dbb_loo"}))
def test_singleton_group_has_zero_baseline(name):
    got = estimate(name, inputs_of([[0, 0, 2]]))
    assert not got.baseline.any()
    assert got.fallback.all()
    # these divide by a standard deviation that one rollout does not have
    np.testing.assert_array_equal(got.advantage, [[0, 0, 0]] if name in SCALED else [[2, 2, 2]])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_entry_says_whether_the_only_rollouts_of_their_prompts_are_centred(name):
    got = estimate(name, inputs_of([[0, 0], [0, 1], [0, 1]], group=[0, 1, 2]))
    assert got.fallback.all() != ESTIMATORS[name].takes_single
    assert got.fallback.any() != ESTIMATORS[name].takes_single


@pytest.mark.parametrize("name", sorted(set(GROUP_BASED) - PRIOR))
def test_equal_rewards_leave_no_advantage(name):
    got = estimate(name, inputs_of([[0, 0.1], [0, 0.1], [0, 0.1]], energy=[[1, 2], [3, 1], [0.1, 5]]))
    np.testing.assert_allclose(got.advantage, 0, atol=1e-9)
    # nothing to divide by; no other prompt to look at
    assert got.fallback.all() == (name in (SCALED | ACROSS | WHITENED) - {"maxrl"})


def test_grpo_takes_totals_summed_in_another_order_for_equal():
    # .1 + .2 + .3 and .3 + .2 + .1 differ in the last bit; dividing by that difference would give advantages of 1e5
    got = estimate("grpo", inputs_of([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]))
    assert not got.advantage.any()
    assert got.fallback.all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_empty_completion_takes_no_part(name):
    mask = [[True, True], [False, False], [True, True]]
    got = estimate(name, inputs_of([[0, 1], [9, 9], [0, 0]], mask=mask))
    pair = estimate(name, inputs_of([[0, 1], [0, 0]]))
    np.testing.assert_array_equal(got.advantage[[0, 2]], pair.advantage)
    np.testing.assert_array_equal(got.fallback[[0, 2]], pair.fallback)
    assert not got.advantage[1].any() and not got.baseline[1].any()


@pytest.mark.parametrize("name", sorted(set(GROUP_BASED) - WHITENED - {"dbb", "dbb_loo"}))
def test_rollout_beside_an_empty_one_is_alone(name):
    got = estimate(name, inputs_of([[0, 1], [0, 0]], mask=[[True, True], [False, False]]))
    assert got.fallback.tolist() == [[True, True], [False, False]]
    assert not got.baseline.any()


@pytest.mark.parametrize("name", sorted(ZERO_WEIGHT))
def test_zero_energy_falls_back_to_the_plain_mean(name):
    got = estimate(name, inputs_of([[0, 3], [0, 0], [0, 0]], energy=np.zeros((3, 2))))
    np.testing.assert_allclose(got.baseline, 1.0)
    assert got.fallback.all()


@pytest.mark.parametrize("name", sorted(f"{name}_loo" for name in ZERO_WEIGHT))
def test_zero_energy_of_the_others_falls_back_to_their_plain_mean(name):
    # only the first has energy: without it the others weigh nothing, and the others' plain mean is (0 + 1)/2
    got = estimate(name, inputs_of([[0, 3], [0, 0], [0, 1]], energy=[[1, 1], [0, 0], [0, 0]]))
    np.testing.assert_allclose(got.baseline[0], 0.5)
    np.testing.assert_allclose(got.baseline[1:], 3.0)
    assert got.fallback.tolist() == [[True, True], [False, False], [False, False]]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_nothing_gives_nothing(name, shape):
    got = estimate(name, inputs_of(np.zeros(shape)))
    assert got.baseline.shape == got.advantage.shape == got.fallback.shape == shape
