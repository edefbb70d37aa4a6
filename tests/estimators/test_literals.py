"""Values worked by hand on one group: w rows .02 .02 | .5 ×4 | .02 .02 1.28 1.28 | .02 .02, R = 1 0 0 1."""

import numpy as np
import pytest

from otb_analysis.estimators import DecayOptions, EstimatorInputs, TailOptions, estimate


def baseline(name, inputs, options=None):
    return estimate(name, inputs, options).baseline


def test_otb_weights_by_realized_energy(worked):
    # W = .02 .04 | .5 1 1.5 2 | .02 .04 1.32 2.6 | .02 .04; t = 1: (.02 + .02)/.56; t = 2: .08/1.12; then R = 0 only
    expected = np.array([[1 / 14, 1 / 14, 0, 0]] * 4)
    np.testing.assert_allclose(baseline("otb", worked), expected, atol=1e-15)


def test_otb_loo_leaves_its_own_weight_out(worked):
    # rollout 1: .02/.54; rollout 2: .04/.06; rollout 3: .04/.54; rollout 4 as 1; the same ratios at t = 2
    first = np.array([1 / 27, 2 / 3, 2 / 27, 1 / 27])
    expected = np.stack([first, first, np.zeros(4), np.zeros(4)], axis=1)
    np.testing.assert_allclose(baseline("otb_loo", worked), expected, atol=1e-15)


def test_otb_carry_keeps_counting_finished_rollouts(worked):
    # t = 3: (.04 + .04)/(.04 + 1.5 + 1.32 + .04); t = 4: .08/(.04 + 2 + 2.6 + .04)
    expected = [1 / 14, 1 / 14, 0.08 / 2.9, 0.08 / 4.68]
    np.testing.assert_allclose(baseline("otb_carry", worked)[1], expected, atol=1e-15)


@pytest.mark.parametrize("name", ["sequence_optimal", "classic_optimal"])
def test_scalar_optimum_weights_by_whole_rollouts(worked, name):
    # (.04 + .04)/(.04 + 2 + 2.6 + .04) = .08/4.68 = .0171
    np.testing.assert_allclose(baseline(name, worked)[:, 0], 0.08 / 4.68, atol=1e-15)


@pytest.mark.parametrize("name", ["sequence_optimal_loo", "classic_optimal_loo"])
def test_scalar_optimum_without_oneself(worked, name):
    np.testing.assert_allclose(baseline(name, worked)[:, 0], [0.04 / 4.64, 0.08 / 2.68, 0.08 / 2.08, 0.04 / 4.64])


@pytest.mark.parametrize("name", ["group_mean", "batch_mean"])
def test_mean_of_two_successes_in_four(worked, name):
    np.testing.assert_allclose(baseline(name, worked)[:, 0], 0.5)


def test_grpo_divides_by_std_with_ddof_one(worked):
    # deviations ±.5, Σ = 1, std = √(1/3) = .57735; .5/(.57735 + 1e-6) = .86602
    np.testing.assert_allclose(
        estimate("grpo", worked).advantage[:, 0], np.array([1, -1, -1, 1]) * 0.5 / (3**-0.5 + 1e-6)
    )


def test_rloo_is_the_mean_of_the_others(worked):
    np.testing.assert_allclose(baseline("rloo", worked)[:, 0], [1 / 3, 2 / 3, 2 / 3, 1 / 3])
    np.testing.assert_allclose(estimate("rloo", worked).advantage[:, 0], [2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_opo_weights_by_length(worked):
    # (2 + 2)/(2 + 4 + 4 + 2); without rollout 1: 2/10; without rollout 2: 4/8
    np.testing.assert_allclose(baseline("opo", worked)[:, 0], 1 / 3)
    np.testing.assert_allclose(baseline("opo_loo", worked)[:, 0], [0.2, 0.5, 0.5, 0.2])


def test_token_optimal_weights_by_the_token_alone(worked):
    # t = 2: (.02 + .02)/.56, where realized energy gives the same only because energies repeat
    np.testing.assert_allclose(baseline("token_optimal", worked)[0], [1 / 14, 1 / 14, 0, 0])


def test_energy_ema_forgets_at_its_rate():
    # energies 4 1 | 1 1, λ = ½: weights at t = 2 are ½·4 + 1 = 3 and ½·1 + 1 = 1.5; R = 1 0 → 3/4.5
    inputs = two_rollouts([[4, 1], [1, 1]], [[0, 1], [0, 0]])
    got = baseline("energy_ema", inputs, DecayOptions(decay=0.5))
    np.testing.assert_allclose(got[0], [4 / 5, 2 / 3])


def test_ratios_enter_squared_and_accumulated():
    # w = 1, ρ = 2 1 | 1 1: W = 4 5 | 1 2 → B = 4/5, 5/7; instantaneous: 4/5, 1/2
    inputs = two_rollouts([[1, 1], [1, 1]], [[0, 1], [0, 0]], ratio=[[2, 1], [1, 1]])
    np.testing.assert_allclose(baseline("otb", inputs)[0], [4 / 5, 5 / 7])
    np.testing.assert_allclose(baseline("token_optimal", inputs)[0], [4 / 5, 1 / 2])
    np.testing.assert_allclose(baseline("sequence_optimal", inputs)[0], [5 / 7, 5 / 7])


def test_token_rewards_use_the_return_to_go():
    # rewards 1 2 | 3 0: G = 3 2 | 3 0; equal energy 1: W = 1 2 | 1 2 → B = 3, 1
    inputs = two_rollouts([[1, 1], [1, 1]], [[1, 2], [3, 0]])
    np.testing.assert_allclose(baseline("otb", inputs), [[3, 1], [3, 1]])
    np.testing.assert_allclose(estimate("group_mean", inputs).advantage, [[0, -1], [0, -3]])


def test_tail_policies_decide_where_nobody_else_is_alive():
    # lengths 1 and 2, R = 1 and 2, final W = 1 and 2; t = 2 of rollout 2 is the tail
    inputs = two_rollouts([[1, 0], [1, 1]], [[1, 0], [0, 2]], mask=[[True, False], [True, True]])
    for tail, b, a in [("own_return", 0, 2), ("group", 1, 1), ("zero", 2, 0)]:
        for name in ("otb", "otb_loo"):
            got = estimate(name, inputs, TailOptions(tail=tail))
            assert (got.baseline[1, 1], got.advantage[1, 1]) == (b, a)
            assert got.fallback.tolist() == [[False, False], [False, True]]


def test_group_tail_weights_finished_rollouts_by_their_final_energy():
    # finished: R = 1, W = 3 and R = 0, W = 1 → B = 3/4 at the tail of the third
    mask = np.array([[True, False, False], [True, True, False], [True, True, True]])
    inputs = EstimatorInputs(
        reward=np.array([[1, 0, 0], [0, 0, 0], [0, 0, 1.0]]),
        mask=mask,
        group=np.array([7, 7, 7]),
        energy=np.array([[3, 0, 0], [0.5, 0.5, 0], [1, 1, 1]]),
    )
    assert baseline("otb", inputs, TailOptions(tail="group"))[2, 2] == 0.75


def test_given_baselines_are_subtracted():
    inputs = two_rollouts([[1, 1], [1, 1]], [[0, 1], [0, 0]])
    given = np.array([[0.25, 0.5], [0.75, 1.0]])
    for name, field in (("value", "value"), ("position_optimal", "position_baseline")):
        got = estimate(name, EstimatorInputs(inputs.reward, inputs.mask, inputs.group, **{field: given}))
        np.testing.assert_array_equal(got.advantage, [[0.75, 0.5], [-0.75, -1.0]])


def two_rollouts(energy, reward, *, ratio=None, mask=None):
    shape = np.shape(reward)
    return EstimatorInputs(
        reward=np.array(reward, float),
        mask=np.ones(shape, bool) if mask is None else np.array(mask),
        group=np.zeros(len(reward), np.int64),
        energy=np.array(energy, float),
        ratio=None if ratio is None else np.array(ratio, float),
    )
