"""Token weights: worked numbers, what each reads, and what must be refused."""

from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.config import ObjectiveConfig
from otb_analysis.errors import InputError
from otb_analysis.objectives.aggregation import (
    CovarianceOptions,
    CriticalOptions,
    DelightOptions,
    PenaltyOptions,
    StapoOptions,
    TokenWeightInputs,
    drift_penalty,
    token_weights,
)
from otb_analysis.training.update import Objective

MASK = np.array([[True, True, True], [True, True, False]])
ADVANTAGE = np.array([[1.0, 1.0, 1.0], [-1.0, -1.0, np.nan]])
PROBABILITY = np.array([[0.5, 0.004, 0.004], [0.004, 1.0, np.nan]])
ENTROPY = np.array([[0.1, 0.1, 2.0], [0.1, 0.0, np.nan]])


def worked():
    return TokenWeightInputs(MASK, ADVANTAGE, np.log(PROBABILITY), ENTROPY)


def test_stapo_silences_rare_good_tokens_of_confident_positions_alone():
    # likely, silenced, high entropy; bad, likely, padding
    assert token_weights("stapo", worked()).tolist() == [[1, 0, 1], [1, 1, 0]]
    assert token_weights("stapo", worked(), StapoOptions(entropy=3.0)).tolist() == [[1, 0, 0], [1, 1, 0]]
    assert token_weights("stapo", worked(), StapoOptions(probability=0.0)).tolist() == [[1, 1, 1], [1, 1, 0]]


def test_delight_is_the_logistic_of_advantage_times_surprisal():
    # σ(log 2) = 2/3, σ(log 250) = 250/251 and σ(−log 250) = 1/251; a certain token has σ(0)
    expected = [[2 / 3, 250 / 251, 250 / 251], [1 / 251, 0.5, 0]]
    np.testing.assert_allclose(token_weights("delightful", worked()), expected, rtol=1e-12)
    # η = ½ squares the odds: 4/5
    assert token_weights("delightful", worked(), DelightOptions(0.5))[0, 0] == pytest.approx(0.8, rel=1e-12)


def test_critical_tokens_of_bad_rollouts_are_blamed_and_the_others_spared():
    contrast = np.array([[0.9, 0.2, 0.5], [0.75, 0.0, np.nan]])
    inputs = replace(worked(), contrast=contrast)
    assert token_weights("critical", inputs).tolist() == [[1, 1, 1], [0.25, 1, 0]]
    assert token_weights("critical", inputs, CriticalOptions(0.5)).tolist() == [[1, 1, 1], [0.625, 1, 0]]


def covaried():
    """A = 1 1 −1 −1, log π = −1 −3 −1 −3: means 0 and −2, covariances 1 −1 −1 1."""
    mask = np.array([[True, True], [True, True], [False, False]])
    advantage, logprob = np.array([[1.0, 1], [-1, -1], [9, 9]]), np.array([[-1.0, -3], [-1, -3], [-9, -9]])
    return TokenWeightInputs(mask, advantage, logprob, np.zeros(mask.shape))


def test_clip_cov_silences_a_share_of_the_tokens_that_vary_together():
    # two candidates of which one is drawn: ½ each; both where the share is half of the four tokens
    inputs = covaried()
    assert inputs.covariance.tolist() == [[1, -1], [-1, 1], [0, 0]]
    assert token_weights("clip_cov", inputs, CovarianceOptions(low=0.5)).tolist() == [[0.5, 1], [1, 0.5], [0, 0]]
    assert token_weights("clip_cov", inputs, CovarianceOptions(0.5, 0.5)).tolist() == [[0, 1], [1, 0], [0, 0]]
    assert token_weights("clip_cov", inputs, CovarianceOptions(low=0.5, high=0.9)).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_clip_cov_takes_each_update_by_itself():
    # rollouts 0 and 1 are two updates: A does not vary within either
    apart = replace(covaried(), update=np.array([0, 1, 1]))
    assert token_weights("clip_cov", apart, CovarianceOptions(low=0.5)).tolist() == [[1, 1], [1, 1], [0, 0]]


def test_kl_cov_weighs_all_alike_and_penalises_the_largest_covariances():
    # ⌊.5 · 4⌋ = 2 tokens, by default the first of the largest
    inputs = covaried()
    assert token_weights("kl_cov", inputs).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert drift_penalty(inputs, PenaltyOptions(0.5, 3.0)).tolist() == [[3, 0], [0, 3], [0, 0]]
    assert drift_penalty(inputs, PenaltyOptions()).tolist() == [[1, 0], [0, 0], [0, 0]]


def test_no_weight_is_one_inside_the_mask():
    assert token_weights("none", worked()).tolist() == MASK.tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: token_weights("stapoo", worked()), "stapo"),
        (lambda: StapoOptions(probability=2.0), "probability from 0 to 1"),
        (lambda: DelightOptions(0.0), "must be positive"),
        (lambda: CriticalOptions(2.0), "strength is 2.0; choose it from 0 to 1"),
        (lambda: CovarianceOptions(low=5.0), "low=5.0.* low < high"),
        (lambda: PenaltyOptions(share=0.0), "share=0.0.* share above 0"),
        (lambda: token_weights("critical", worked()), "set measure.contrast.every to 1"),
        (lambda: TokenWeightInputs(MASK, np.full(MASK.shape, np.nan), ENTROPY, ENTROPY), "advantage is nan"),
        (lambda: TokenWeightInputs(MASK, ADVANTAGE, ENTROPY[:, :2], ENTROPY), "logprob has shape"),
        (lambda: Objective(ObjectiveConfig(token_weight="delight")), "delightful"),
        (
            lambda: Objective(ObjectiveConfig(token_weight="stapo", token_weight_options={"tau": ".1"})),
            "option 'tau' does not exist",
        ),
    ],
)
def test_bad_input_gets_a_sentence(make, words):
    with pytest.raises(InputError, match=words):
        make()
