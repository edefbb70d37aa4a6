"""Values worked by hand on one group: w rows .02 .02 | .5 ×4 | .02 .02 1.28 1.28 | .02 .02, R = 1 0 0 1."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import (
    DecayOptions,
    EstimatorInputs,
    TailOptions,
    ValueOptions,
    estimate,
    prefix_values,
)


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


def test_james_stein_shrinks_by_what_the_other_prompts_say():
    # others of prompt 1: means ¼ and 1, variances ¼ and 0: v² = (¼/4 + 0)/2 = 1/32, s² = (3/8)² = 9/64,
    # λ = 2/11 = .182; first sample: mean of the others 2/3, of the other prompts 5/8 → B = .659
    reward = np.array([[1, 1, 0, 1, 0, 0, 0, 1, 1, 1, 1, 1.0]]).T
    inputs = EstimatorInputs(reward, np.ones((12, 1), bool), np.repeat([4, 2, 9], 4))
    shrinkage = (1 / 32) / (1 / 32 + 9 / 64 + 1e-6)
    got = baseline("james_stein", inputs)
    assert abs(got[0, 0] - ((1 - shrinkage) * 2 / 3 + shrinkage * 5 / 8)) < 1e-15
    assert abs(shrinkage - 0.182) < 5e-4 and abs(got[0, 0] - 0.659) < 5e-4
    np.testing.assert_allclose(got[2, 0], (1 - shrinkage) * 1 + shrinkage * 5 / 8)


def test_opob_weights_by_squared_sequence_ratios(worked):
    # ρ = 2 .5 1 .1: (4·.04 + .01·.04)/(4·.04 + .25·2 + 2.6 + .01·.04) = .1604/3.2604 = .049; spread over two tokens
    ratio = np.array([[4, 0.5, 9, 9], [0.5, 1, 1, 1], [1, 1, 1, 1], [0.2, 0.5, 9, 9]])
    got = estimate("opob", replace(worked, ratio=ratio))
    np.testing.assert_allclose(got.baseline[worked.mask], 0.1604 / 3.2604, rtol=1e-14)
    none = estimate("opob", replace(worked, ratio=np.zeros((4, 4))))
    np.testing.assert_allclose(none.baseline[worked.mask], 0.5)
    assert none.fallback[worked.mask].all()


TREE = EstimatorInputs(  # ab, ac, de, de paid 1 0 0 0, as token ids
    reward=np.array([[0, 1], [0, 0], [0, 0], [0, 0.0]]),
    mask=np.ones((4, 2), bool),
    group=np.zeros(4, np.int64),
    token_id=np.array([[10, 11], [10, 12], [13, 14], [13, 14]]),
)


def test_tempo_adds_the_change_of_the_prefix_value():
    # V: root ¼, a ½, ab 1, ac 0, d 0, de 0; std √(3/16); y1: (¾ + ½ − ¼, ¾ + 1 − ½)/std
    std = 3**0.5 / 4
    got = estimate("tempo", TREE).advantage
    np.testing.assert_allclose(got[0], [1 / std, 1.25 / std])
    np.testing.assert_allclose(got, [[2.31, 2.89], [0, -1.73], [-1.15, -0.58], [-1.15, -0.58]], atol=6e-3)


def test_tempo_loo_takes_the_others_that_share_the_prefix():
    # first token: mean of the other three; after a: the other one that starts with a; after d: the other d
    got = estimate("tempo_loo", TREE)
    np.testing.assert_allclose(got.baseline, [[0, 0], [1 / 3, 1], [1 / 3, 0], [1 / 3, 0]])
    assert not got.fallback.any()


def test_tempo_loo_keeps_the_longest_prefix_that_is_shared():
    # a b c | a b d | e f g paid 1 0 4: after ab both know the other; what e starts nobody shares, so it keeps ½
    inputs = EstimatorInputs(
        reward=np.array([[0, 0, 1], [0, 0, 0], [0, 0, 4.0]]),
        mask=np.ones((3, 3), bool),
        group=np.zeros(3, np.int64),
        token_id=np.array([[1, 2, 3], [1, 2, 4], [5, 6, 7]]),
    )
    got = estimate("tempo_loo", inputs)
    np.testing.assert_allclose(got.baseline, [[2, 0, 0], [2.5, 1, 1], [0.5, 0.5, 0.5]])
    assert got.fallback.tolist() == [[False] * 3, [False] * 3, [False, True, True]]


def test_prefix_values_are_the_targets_of_a_token_level_value_model():
    # through a ½, d 0; before the first token the group's mean ¼
    np.testing.assert_allclose(prefix_values(TREE), [[0.25, 0.5], [0.25, 0.5], [0.25, 0], [0.25, 0]])


def test_prefix_values_skip_tool_tokens_and_padding():
    nan = np.nan
    mask = np.array([[True, False, True, False], [True, True, False, False]])
    inputs = EstimatorInputs(
        reward=np.where(mask, [[0, nan, 1, nan], [0, 0, nan, nan]], nan),
        mask=mask,
        group=np.zeros(2, np.int64),
        token_id=np.where(mask, [[8, nan, 2, nan], [8, 3, nan, nan]], nan),
    )
    np.testing.assert_allclose(prefix_values(inputs), [[0.5, 0, 0.5, 0], [0.5, 0.5, 0, 0]])
    short = replace(inputs, mask=np.array([[True, False, False, False], [True, False, False, False]]))
    np.testing.assert_allclose(prefix_values(short), np.zeros((2, 4)))


def test_prefix_values_need_token_ids():
    with pytest.raises(InputError, match="prefix_values needs token_id"):
        prefix_values(replace(TREE, token_id=None))


def test_trloo_compares_turns_with_turns():
    # turns 0 0 1 | 0 1 1 | 0: returns at turn 0: 3 1 4, at turn 1: 2 0; the third has no second turn
    inputs = EstimatorInputs(
        reward=np.array([[0, 1, 2], [1, 0, 0], [4, 0, 0.0]]),
        mask=np.array([[True] * 3, [True] * 3, [True, False, False]]),
        group=np.zeros(3, np.int64),
        turn=np.array([[0, 0, 1], [0, 1, 1], [0, 7, 7]]),
    )
    got = estimate("trloo", inputs)
    np.testing.assert_allclose(got.baseline, [[2.5, 2.5, 0], [3.5, 2, 2], [2, 0, 0]])
    # inside a turn each token keeps its own return-to-go
    np.testing.assert_allclose(got.advantage, [[0.5, 0.5, 2], [-2.5, -2, -2], [2, 0, 0]])
    assert not got.fallback.any()
    lone = estimate("trloo", replace(inputs, turn=np.array([[0, 0, 1], [0, 2, 2], [0, 0, 0]])))
    assert lone.fallback.tolist() == [[False, False, True], [False, True, True], [False] * 3]
    np.testing.assert_allclose(lone.advantage[0], [0.5, 0.5, 2])


def test_generalized_advantages_by_hand():
    # r = 0 1, V = .5 .8, γ = 1, λ = ½: δ = .3 .2, A = .3 + ½·.2 = .4, .2; γ = .9: δ = .22 .2, A = .22 + .45·.2
    inputs = EstimatorInputs(
        np.array([[0, 1.0]]), np.ones((1, 2), bool), np.zeros(1, np.int64), value=np.array([[0.5, 0.8]])
    )
    np.testing.assert_allclose(estimate("value", inputs, ValueOptions(decay=0.5)).advantage, [[0.4, 0.2]])
    got = estimate("value", inputs, ValueOptions(discount=0.9, decay=0.5))
    np.testing.assert_allclose(got.advantage, [[0.31, 0.2]])
    np.testing.assert_allclose(got.baseline + got.advantage, [[1, 1]])


def test_tvm_subtracts_what_its_critic_says():
    inputs = replace(TREE, value=prefix_values(TREE))
    # the critic that knows these rollouts by heart leaves nothing where a prefix is unique
    np.testing.assert_allclose(estimate("tvm", inputs).advantage, [[0.75, 0.5], [-0.25, -0.5], [-0.25, 0], [-0.25, 0]])


def two_rollouts(energy, reward, *, ratio=None, mask=None):
    shape = np.shape(reward)
    return EstimatorInputs(
        reward=np.array(reward, float),
        mask=np.ones(shape, bool) if mask is None else np.array(mask),
        group=np.zeros(len(reward), np.int64),
        energy=np.array(energy, float),
        ratio=None if ratio is None else np.array(ratio, float),
    )
