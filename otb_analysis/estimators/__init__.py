"""Advantage estimators: `estimate(name, EstimatorInputs(...))` for every name in `ESTIMATORS`."""

from otb_analysis.estimators.evaluate import (
    available,
    counting_tokens,
    entry_of,
    estimate,
    missing,
    options_from_dict,
    with_limit,
)
from otb_analysis.estimators.proved import (
    proved,
    proved_in_all,
    standing_for_truth,
    trained_label,
    trained_labels,
    unproved_because,
)
from otb_analysis.estimators.published import prefix_values
from otb_analysis.estimators.registry import ESTIMATORS, registered
from otb_analysis.estimators.spec import (
    DecayOptions,
    DiscountOptions,
    EstimatorSpec,
    KalmanOptions,
    LengthOptions,
    NoOptions,
    QuantileOptions,
    RegressionOptions,
    TailOptions,
    ValueOptions,
)
from otb_analysis.types import Estimate, EstimatorInputs, NormalEquations, Tallies

__all__ = [
    "ESTIMATORS",
    "DecayOptions",
    "DiscountOptions",
    "Estimate",
    "EstimatorInputs",
    "EstimatorSpec",
    "KalmanOptions",
    "LengthOptions",
    "NoOptions",
    "NormalEquations",
    "QuantileOptions",
    "RegressionOptions",
    "TailOptions",
    "Tallies",
    "ValueOptions",
    "available",
    "counting_tokens",
    "entry_of",
    "estimate",
    "missing",
    "options_from_dict",
    "prefix_values",
    "proved",
    "proved_in_all",
    "registered",
    "standing_for_truth",
    "trained_label",
    "trained_labels",
    "unproved_because",
    "with_limit",
]
