"""Bad input gets one sentence that names the argument, what was wrong and what to do."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import (
    ESTIMATORS,
    DecayOptions,
    EstimatorInputs,
    TailOptions,
    available,
    estimate,
    options_from_dict,
)

GOOD = EstimatorInputs(
    reward=np.zeros((2, 3)), mask=np.ones((2, 3), bool), group=np.zeros(2, np.int64), energy=np.ones((2, 3))
)
GAPPED = np.array([[True, False, True], [True, True, True]])


def with_value(field, value, at=(1, 2)):
    x = np.array(getattr(GOOD, field), float)
    x[at] = value
    return replace(GOOD, **{field: x})


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            replace(GOOD, reward=np.zeros(2)),
            r"reward has shape \(2,\) but mask has 2 rollouts; pass one reward per token",
        ),
        (replace(GOOD, energy=np.ones((2, 4))), r"energy has shape \(2, 4\) but mask has 2 rollouts; pass shape"),
        (replace(GOOD, group=np.zeros(5, np.int64)), r"group has shape \(5,\) .* but mask has 2 rollouts"),
        (replace(GOOD, group=np.zeros(2)), r"group has shape \(2,\) and dtype float64 .* one integer per rollout"),
        (replace(GOOD, mask=np.ones((2, 3))), r"mask has shape \(2, 3\) and dtype float64; pass booleans"),
        (replace(GOOD, mask=np.ones(2, bool)), r"mask has shape \(2,\) .* \[N, T\]"),
        (with_value("energy", -0.5), r"energy is -0.5 at rollout 1, token 2; an energy is a squared norm"),
        (with_value("energy", np.nan), r"energy is nan at rollout 1, token 2"),
        (with_value("energy", np.inf), r"energy is inf at rollout 1, token 2"),
        (with_value("reward", np.nan), r"reward is nan at rollout 1, token 2"),
        (with_value("reward", -np.inf, (0, 1)), r"reward is -inf at rollout 0, token 1"),
        (replace(GOOD, ratio=-np.ones((2, 3))), r"ratio is -1.0 at rollout 0, token 0; an importance ratio"),
        (replace(GOOD, energy=None), r"otb needs energy, which is None; pass it in EstimatorInputs"),
        (replace(GOOD, mask=GAPPED), r"mask has gaps .* but otb takes .* use otb_turn, which counts policy tokens"),
    ],
)
def test_otb_says_what_does_not_fit(inputs, sentence):
    with pytest.raises(InputError, match=sentence):
        estimate("otb", inputs)


def test_gapped_mask_sends_otb_loo_to_otb_turn_loo():
    with pytest.raises(InputError, match="use otb_turn_loo,"):
        estimate("otb_loo", replace(GOOD, mask=GAPPED))


def test_mask_that_starts_late_counts_as_gapped():
    with pytest.raises(InputError, match="otb_turn"):
        estimate("otb", replace(GOOD, mask=np.array([[False, True, True], [True, True, True]])))


def test_bad_value_is_named_by_the_callers_row_and_column():
    # rollout 1 comes first when sorted by group, and its second policy token is column 2
    inputs = EstimatorInputs(
        np.zeros((2, 3)), GAPPED[::-1], np.array([5, 1]), energy=np.array([[1, 1, 1], [1, 7, -1.0]])
    )
    with pytest.raises(InputError, match=r"energy is -1\.0 at rollout 1, token 2"):
        estimate("otb_turn", inputs)


def test_bad_rollout_norm_is_named_by_its_rollout():
    with pytest.raises(InputError, match=r"rollout_norm_sq is -2\.0 at rollout 1;"):
        estimate("classic_optimal", replace(GOOD, rollout_norm_sq=np.array([1.0, -2.0])))
    with pytest.raises(InputError, match=r"rollout_norm_sq has shape \(2, 3\)"):
        estimate("classic_optimal", replace(GOOD, rollout_norm_sq=np.ones((2, 3))))


def test_inputs_an_estimator_does_not_read_may_be_anything():
    assert estimate("rloo", with_value("energy", np.nan)).advantage.shape == (2, 3)


def test_unknown_estimator_names_the_nearest():
    with pytest.raises(InputError, match=r"'grpoo' .*mean 'grpo'"):
        estimate("grpoo", GOOD)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("otb", {"tial": "zero"}, "option 'tial' does not exist for otb; did you mean 'tail'"),
        ("rloo", {"tail": "zero"}, "option 'tail' does not exist for rloo; it has no options"),
        ("otb", {"tail": "none"}, "tail is 'none'; .*own_return"),
        ("energy_ema", {"decay": 1.5}, r"decay is 1.5 but must lie in \[0, 1\]"),
        ("value", {"decay": -0.1}, r"decay is -0.1 but must lie in \[0, 1\]"),
        ("value", {"gamma": 0.9}, "option 'gamma' does not exist for value"),
        ("otbb", {}, "did you mean 'otb'"),
    ],
)
def test_options_from_a_table_are_checked(name, values, sentence):
    with pytest.raises(InputError, match=sentence):
        options_from_dict(name, values)


def test_options_from_a_table_are_the_entry_s_dataclass():
    assert options_from_dict("energy_ema", {"decay": 0.5}) == DecayOptions(decay=0.5)
    assert options_from_dict("otb", {}) == TailOptions()


def test_options_of_another_estimator_are_refused():
    with pytest.raises(InputError, match="are DecayOptions but must be TailOptions"):
        estimate("otb", GOOD, DecayOptions())


def test_available_lists_every_estimator_whose_inputs_exist():
    assert available(replace(GOOD, energy=None)) == [n for n, e in ESTIMATORS.items() if not e.needs]
    assert "otb" in available(GOOD) and "value" not in available(GOOD)
    gapped = available(replace(GOOD, mask=GAPPED))
    assert "otb_turn" in gapped and "otb" not in gapped and "otb_loo" not in gapped


def test_entries_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        ESTIMATORS["otb"].unbiased = True
