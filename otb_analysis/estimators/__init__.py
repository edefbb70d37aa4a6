"""Advantage estimators: `estimate(name, EstimatorInputs(...))` for every name in `ESTIMATORS`."""

from otb_analysis.estimators.evaluate import available, entry_of, estimate, missing, options_from_dict, with_limit
from otb_analysis.estimators.prefixes import prefix_values
from otb_analysis.estimators.proved import proved, proved_in_all, standing_for_truth, unproved_because
from otb_analysis.estimators.registry import ESTIMATORS
from otb_analysis.estimators.spec import (
    DecayOptions,
    EstimatorSpec,
    NoOptions,
    RegressionOptions,
    TailOptions,
    ValueOptions,
)
from otb_analysis.types import Estimate, EstimatorInputs, NormalEquations

__all__ = [
    "ESTIMATORS",
    "DecayOptions",
    "Estimate",
    "EstimatorInputs",
    "EstimatorSpec",
    "NoOptions",
    "NormalEquations",
    "RegressionOptions",
    "TailOptions",
    "ValueOptions",
    "available",
    "entry_of",
    "estimate",
    "missing",
    "options_from_dict",
    "prefix_values",
    "proved",
    "proved_in_all",
    "standing_for_truth",
    "unproved_because",
    "with_limit",
]
