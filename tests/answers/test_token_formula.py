"""The worked group of theory: R = [1, 0, 0, 1], lengths 2, 4, 4, 2."""

import numpy as np
import pytest

from otb_analysis.answers.token_formula import token_formula
from otb_analysis.estimators import ESTIMATORS, EstimatorInputs, available, estimate

ENERGY = np.array([[0.02, 0.02, 9, 9], [0.5, 0.5, 0.5, 0.5], [0.02, 0.02, 1.28, 1.28], [0.02, 0.02, 9, 9]])
MASK = np.array([[True, True, False, False], [True] * 4, [True] * 4, [True, True, False, False]])
REWARD = np.array([[0, 1, 0, 0], [0] * 4, [0] * 4, [0, 1, 0, 0]], float)
ROLLOUTS = np.array([4, 5, 6, 7])


def group(**other) -> EstimatorInputs:
    return EstimatorInputs(**({"reward": REWARD, "mask": MASK, "group": np.zeros(4, int), "energy": ENERGY} | other))


def test_otb_weighs_returns_by_realized_energy():
    found = token_formula("otb", group(), ROLLOUTS, 4, 1)
    # W at the second token: .04, 1, .04, .04; Σ 1.12; B = (.04 + .04)/1.12
    np.testing.assert_allclose(found.terms["weight"], np.array([0.04, 1, 0.04, 0.04]) / 1.12)
    np.testing.assert_allclose(found.terms["W"], [0.04, 1, 0.04, 0.04])
    assert found.terms["rollout"].tolist() == [4, 5, 6, 7]
    assert found.baseline == pytest.approx(0.0714, abs=5e-5)
    assert dict(found.lines) == {
        "formula": "B = Σ_j W_{j,t} G_{j,t} / Σ_j W_{j,t}, j alive at t",
        "with numbers": "B = 0.893·0 + 0.0357·1.00 + 0.0357·0 + 0.0357·1.00 = 0.0714",
        "advantage": "A = G − B = 1.00 − 0.0714 = 0.929",
    }


def test_leave_one_out_gives_the_rollout_itself_no_weight():
    # rollout 2 of theory at its third token: only rollout 3 is alive beside it
    found = token_formula("otb_loo", group(), ROLLOUTS, 5, 0)
    np.testing.assert_allclose(found.terms["weight"], [1 / 3, 0, 1 / 3, 1 / 3])
    assert found.baseline == pytest.approx(0.6667, abs=5e-5)


def test_rollouts_that_ended_have_no_energy_here_and_keep_their_realized_one():
    found = token_formula("otb", group(), ROLLOUTS, 6, 3)
    assert np.isnan(found.terms["w"][[0, 3]]).all()
    np.testing.assert_allclose(found.terms["W"], [0.04, 2, 2.6, 0.04])
    np.testing.assert_allclose(found.terms["weight"], [0, 2 / 4.6, 2.6 / 4.6, 0])


def test_tool_tokens_do_not_move_positions():
    mask = np.insert(MASK, 1, False, axis=1)
    moved = group(mask=mask, reward=np.insert(REWARD, 1, 0, axis=1), energy=np.insert(ENERGY, 1, np.nan, axis=1))
    assert token_formula("otb_turn", moved, ROLLOUTS, 4, 1) is None
    found = token_formula("otb_turn", moved, ROLLOUTS, 4, 2)
    assert found.baseline == pytest.approx(0.08 / 1.12)
    np.testing.assert_allclose(found.terms["weight"], np.array([0.04, 1, 0.04, 0.04]) / 1.12)


def test_a_scaled_advantage_says_so():
    found = dict(token_formula("grpo", group(), ROLLOUTS, 4, 0).lines)
    assert found["advantage"] == "A = G − B = 1.00 − 0.500 = 0.500, rescaled to 0.866"


def test_a_median_is_no_weighted_sum():
    found = token_formula("mc_grpo", group(), ROLLOUTS, 4, 0)
    assert not found.is_sum
    assert dict(found.lines)["with numbers"] == "B = 0.500"


def test_what_other_prompts_say_is_told_apart():
    two = EstimatorInputs(
        np.vstack([REWARD, REWARD[::-1]]), np.vstack([MASK, MASK]), np.repeat([0, 1], 4), np.vstack([ENERGY, ENERGY])
    )
    found = token_formula("energy_across_loo", two, np.arange(8), 0, 0)
    assert found.others == pytest.approx(found.baseline) and (found.terms["weight"] == 0).all()
    mixed = token_formula("batch_mean", two, np.arange(8), 0, 0)
    # eight rollouts; the other prompt's two paid ones give 2/8
    assert mixed.others == pytest.approx(0.25)
    assert dict(mixed.lines)["with numbers"].endswith("+ 0.250 from other prompts = 0.500")


def test_rewards_on_the_way_count_from_the_position_on_or_in_total():
    paid = REWARD.copy()
    paid[1, 0] = 3.0
    # at the third token rollout 5 has 0 left; the mean of the group counts its 3
    by_position = token_formula("otb", group(reward=paid), ROLLOUTS, 6, 2)
    assert by_position.by_position and by_position.terms["return"].tolist() == [0, 0, 0, 0]
    total = token_formula("rloo", group(reward=paid), ROLLOUTS, 6, 2)
    assert not total.by_position and total.terms["return"].tolist() == [1, 3, 0, 1]
    assert total.baseline == pytest.approx(5 / 3)


def test_every_estimator_is_written_out_as_it_is_computed():
    inputs = group(entropy=np.ones((4, 4)), token_id=np.arange(16).reshape(4, 4), turn=np.zeros((4, 4), int))
    names = available(inputs)
    assert len(names) > 20
    for name in names:
        found = token_formula(name, inputs, ROLLOUTS, 5, 1)
        whole = estimate(name, inputs)
        assert found.baseline == pytest.approx(whole.baseline[1, 1]), name
        assert found.advantage == pytest.approx(whole.advantage[1, 1]), name
        if found.is_sum:
            weighed = found.others + (found.terms["weight"] * found.terms["return"]).sum()
            assert weighed == pytest.approx(found.baseline, abs=1e-6), name
        assert found.formula == ESTIMATORS[name].formula
