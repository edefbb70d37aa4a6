"""The record of what was measured: exact norms stand, estimates fill what nobody measured."""

from types import SimpleNamespace

import numpy as np

from otb_analysis.energies import calibrate
from otb_analysis.measurement.table import (
    DrawnTokens,
    TokenMeasurements,
    TokenTable,
    rollout_rows,
    token_rows,
    token_texts,
)
from otb_analysis.rollouts.models import character_tokenizer
from otb_analysis.tasks import Prompt
from otb_analysis.types import Estimate, LogitStats

GROUP = np.array([0, 0, 1, 2])
MASK = np.array([[True, True], [True, False], [True, True], [True, True]])
NAN = np.nan
ZERO = np.zeros(MASK.shape)
TABLE = TokenTable(
    mask=MASK, present=np.ones(MASK.shape, bool), group=GROUP, turn=ZERO.astype(int), token_id=ZERO.astype(int),
    behavior_logprob=ZERO, stats=LogitStats(ZERO, ZERO, ZERO, ZERO, None, ZERO, ZERO), reward=ZERO,
    total_reward=ZERO[:, 0], value=None, ratio=None, keep=np.ones(4, bool),
)  # fmt: skip
ROLLOUTS = SimpleNamespace(
    prompts=[Prompt("a", "a", ""), Prompt("b", "b", ""), Prompt("c", "c", "")], group=GROUP, turns=[[]] * 4,
    finish_reason=["stop"] * 4, reward_parts={},
)  # fmt: skip


def exact():
    return TokenMeasurements.exact(
        np.array([[1.0, 2.0], [3.0, NAN], [NAN, NAN], [NAN, NAN]]), np.array([4.0, 3.0, NAN, NAN]), GROUP
    )


def drawn():
    norm_sq = np.array([[1.0, 2.0], [3.0, NAN], [5.0, NAN], [NAN, NAN]])
    probability = np.array([[1.0, 1.0], [1.0, NAN], [0.5, 0.25], [NAN, NAN]])
    fit = calibrate(norm_sq, np.where(MASK, np.arange(1.0, 9.0).reshape(4, 2), 0.0), probability)
    return exact().with_drawn(norm_sq, DrawnTokens(probability, 2 / 3, fit, np.full(MASK.shape, 9.0)))


def test_nothing_measured_is_unknown_everywhere():
    nothing = TokenMeasurements.nothing((4, 2))
    assert not np.isfinite(nothing.norm_sq).any() and set(nothing.measured_by.flat) == {"none"}
    assert nothing.energy_total is None and "score_norm_sq" not in rollout_rows(ROLLOUTS, TABLE, nothing)


def test_groups_measured_whole_have_the_share_of_the_groups_as_their_chance():
    found = exact()
    assert found.measured_by.tolist() == [["exact", "exact"], ["exact", "none"], ["none"] * 2, ["none"] * 2]
    np.testing.assert_array_equal(found.inclusion_prob[0], [1 / 3, 1 / 3])
    assert found.fully_measured.tolist() == [True, True, False, False]


def test_drawn_tokens_count_as_exact_but_their_groups_not_as_whole():
    found = drawn()
    assert found.measured_by[2].tolist() == ["exact", "none"]
    np.testing.assert_allclose(found.inclusion_prob[2], [1 / 3, 1 / 6])  # also of the token that was not drawn
    assert np.isnan(found.whole_norm_sq[2]).all() and found.whole_norm_sq[0].tolist() == [1.0, 2.0]
    assert found.energy_total is None  # a group was left out


def test_estimates_fill_only_what_nobody_measured():
    guess = np.array([[NAN, NAN], [NAN, NAN], [NAN, NAN], [7.0, -0.5]])
    found = drawn().with_groups(guess, 1 / 3, "sketch")
    assert found.norm_sq[0].tolist() == [1.0, 2.0] and found.norm_sq[3].tolist() == [7.0, -0.5]
    assert found.measured_by[3].tolist() == ["sketch", "sketch"] and found.measured_by[2, 0] == "exact"
    assert found.drawn is not None


def test_each_tokenizer_has_texts_of_its_own_and_is_asked_once(monkeypatch):
    one, other = character_tokenizer("abc"), character_tokenizer("xyz")
    ids = list(range(len(one)))
    alone = {tokenizer: [tokenizer.decode([i]) for i in ids] for tokenizer in (one, other)}
    assert token_texts(one, []) == []
    assert token_texts(one, ids[:2]) + token_texts(one, ids[2:]) == alone[one]
    assert token_texts(other, ids) == alone[other] and alone[other] != alone[one]
    monkeypatch.setattr(one, "batch_decode", None)
    assert token_texts(one, ids[::-1]) == alone[one][::-1]


def test_columns_leave_what_is_no_policy_token_unmeasured():
    columns = token_rows(TABLE, Estimate(ZERO, ZERO, ZERO > 0), exact(), character_tokenizer("0123456789"))
    assert np.ma.getmaskarray(columns["grad_norm_sq"]).tolist() == [False, False, False, True] + [True] * 4
    assert columns["measured_by"].tolist()[:4] == ["exact", "exact", "exact", "none"]
    assert "grad_norm_sq_stderr" not in columns and "energy_calibrated" not in columns
