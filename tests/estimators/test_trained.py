"""The estimator that trained, as measurements name it."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.estimators import trained_label, trained_labels
from otb_analysis.types import Gram

MINE = ("mine", "exact")


@pytest.mark.parametrize(
    ("estimator", "label"),
    [
        ({"name": "otb", "energy": "exact"}, ("otb", "exact")),
        ({"name": "otb"}, ("otb", "proxy")),
        ({"name": "rloo", "energy": "proxy"}, ("rloo", "none")),
        ({"name": "classic_optimal"}, ("classic_optimal", "exact")),
        ("group_mean", ("group_mean", "none")),
        ({"name": "mine"}, MINE),  # someone's own, which was measured
    ],
)
def test_the_training_estimator_is_named_as_its_gradients_are(estimator, label):
    assert trained_label({"estimator": estimator}, [MINE]) == label


def test_an_unknown_training_estimator_is_named_and_one_that_was_not_measured_is_none():
    with pytest.raises(InputError, match=r"'otbb'; .*'otb'"):
        trained_label({"estimator": {"name": "otbb"}})
    grams = [Gram(np.zeros((2, 2, 1, 1)), (("rloo", "none"), MINE), 4)]
    assert trained_labels({"estimator": "rloo"}, grams) == (("rloo", "none"),)
    assert trained_labels({"estimator": "otb"}, grams) == trained_labels({"estimator": "otbb"}, grams) == ()
    assert trained_labels({}, grams) == ()
