import numpy as np
import pytest

from otb_analysis.diagnostics import AttributedTokens, attribute_step
from otb_analysis.errors import InputError

# Two prompts: prompt 0 has rollouts 0 (two tokens) and 1 (one token), prompt 1 has rollout 2 (two tokens).
GROUP, ROLLOUT, T = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 2, 2]), np.array([0, 1, 0, 0, 1])
SIGNAL, NOISE = np.array([1.0, -2.0, 0.5, 0.0, 1.0]), np.array([3.0, 1.0, 0.5, -1.5, 0.5])
TOKENS = AttributedTokens(GROUP, ROLLOUT, T, SIGNAL + NOISE, SIGNAL, NOISE)  # shares 4, −1, 1, −1.5, 1.5


def test_shares_add_up_to_the_norm_at_every_level():
    found = attribute_step(7, TOKENS, grad_norm=2.0)
    assert found.norm_sq == 4.0 and found.recorded_norm_sq == 4.0 and found.gap == 0.0
    for level in ("prompt", "rollout", "token"):
        assert found.at_level(level).share.sum() == 4.0
        np.testing.assert_array_equal(
            found.at_level(level).signal + found.at_level(level).noise, found.at_level(level).share
        )
    assert (found.signal_total, found.noise_total) == (0.5, 3.5)


def test_the_largest_come_first_whatever_their_sign():
    found = attribute_step(7, TOKENS)
    assert found.prompts.group.tolist() == [0, 1] and found.prompts.share.tolist() == [4.0, 0.0]
    assert found.rollouts.rollout.tolist() == [0, 1, 2] and found.rollouts.share.tolist() == [3.0, 1.0, 0.0]
    assert found.tokens.share.tolist() == [4.0, -1.5, 1.5, -1.0, 1.0]
    assert list(zip(found.tokens.rollout, found.tokens.t, strict=True))[:2] == [(0, 0), (2, 0)]
    assert found.prompts.n_tokens.tolist() == [3, 2] and found.prompts.rollout.tolist() == [-1, -1]


def test_half_of_all_shares_is_held_by_so_many():
    found = attribute_step(7, TOKENS)  # |shares| 4, 1.5, 1.5, 1, 1 of 9
    assert [found.tokens.holding(part) for part in (0.4, 0.5, 0.6, 1.0)] == [1, 2, 2, 5]
    assert len(found.tokens.head(2)) == 2 and found.tokens.head(2).share.tolist() == [4.0, -1.5]


def test_order_of_the_tokens_does_not_matter():
    order = np.random.default_rng(0).permutation(5)
    mixed = AttributedTokens(*(x[order] for x in (GROUP, ROLLOUT, T, SIGNAL + NOISE, SIGNAL, NOISE)))
    for level in ("prompt", "rollout", "token"):
        a, b = (attribute_step(7, tokens).at_level(level) for tokens in (TOKENS, mixed))
        assert a.group.tolist() == b.group.tolist() and a.share.tolist() == b.share.tolist()


def test_without_the_split_shares_are_all_there_is():
    found = attribute_step(7, AttributedTokens(GROUP, ROLLOUT, T, SIGNAL + NOISE))
    assert found.signal_total is None and found.tokens.signal is None and found.norm_sq == 4.0 and found.gap is None


def test_a_gradient_of_zero_has_no_gap_and_nobody_to_blame():
    found = attribute_step(0, AttributedTokens(GROUP, ROLLOUT, T, np.zeros(5)), grad_norm=0.0)
    assert found.gap is None and found.tokens.holding() == 0


def test_bad_input_is_one_sentence():
    with pytest.raises(InputError, match="not finite"):
        attribute_step(3, AttributedTokens(GROUP, ROLLOUT, T, np.full(5, np.nan)))
    with pytest.raises(InputError, match="step 3 has no attributed token"):
        attribute_step(3, AttributedTokens(*(np.zeros(0, int),) * 3, np.zeros(0)))
