"""Moments from vectors against those of the Gram matrix."""

from dataclasses import astuple

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import deleted_moments
from otb_analysis.statistics.moments import vector_moments
from otb_analysis.types import Gram


@pytest.mark.parametrize("prompts", [2, 3, 20])
def test_they_are_those_of_the_gram_matrix(prompts):
    g = np.random.default_rng(prompts).normal(size=(2, prompts, 5)) + 0.3
    gram = Gram(np.einsum("mpk,nqk->mnpq", g, g), (("otb", "proxy"), ("rloo", "none")), prompts)
    power = (g**2).sum(axis=2)
    fast = vector_moments(g[0], power[0], g[1], power[1])
    slow = deleted_moments([gram], ("otb", "proxy"), ("rloo", "none"))
    for x, y in zip(astuple(fast), astuple(slow), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_wrong_shapes_are_one_sentence():
    with pytest.raises(InputError, match=r"power \(3,\)"):
        vector_moments(np.zeros((2, 5)), np.zeros(3), np.zeros((2, 5)), np.zeros(2))
