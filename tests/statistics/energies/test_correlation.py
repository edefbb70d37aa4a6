"""Correlations of drawn tokens: each counts as many as it stands for."""

import numpy as np
import pytest

from otb_analysis.statistics.energies import correlation, log_correlation


def test_a_weight_of_three_is_the_same_entry_three_times():
    random = np.random.default_rng(0)
    x, y, prompt = random.normal(size=200), random.normal(size=200), np.repeat(np.arange(20), 10)
    weight = random.integers(1, 4, 200)
    found = correlation(x, y, prompt, weight=weight.astype(float))
    often = correlation(*(np.repeat(v, weight) for v in (x, y, prompt)))
    assert found is not None and often is not None
    for name in ("estimate", "low", "high"):
        assert getattr(found, name) == pytest.approx(getattr(often, name))


def test_tokens_drawn_by_their_proxy_give_the_correlation_of_all_of_them():
    random = np.random.default_rng(1)
    proxy = np.exp(random.normal(size=20_000))
    exact = proxy * np.exp(random.normal(size=20_000) * (proxy > 1))  # agrees where tokens are seldom drawn
    prompt, chance = np.arange(20_000) % 40, np.minimum(0.02 + 0.1 * proxy, 1.0)
    drawn = random.random(20_000) < chance
    every = log_correlation(proxy, exact, prompt)
    some = log_correlation(proxy[drawn], exact[drawn], prompt[drawn], weight=1 / chance[drawn])
    plain = log_correlation(proxy[drawn], exact[drawn], prompt[drawn])
    assert every is not None and some is not None and plain is not None
    assert some.low < every.estimate < some.high and not plain.low < every.estimate < plain.high
