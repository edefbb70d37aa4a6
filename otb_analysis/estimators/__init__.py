"""Advantage estimators: `estimate(name, EstimatorInputs(...))` for every name in `ESTIMATORS`."""

from otb_analysis.estimators.entry import DecayOptions, Entry, NoOptions, TailOptions
from otb_analysis.estimators.evaluate import available, entry_of, estimate, missing, options_from_dict
from otb_analysis.estimators.registry import ESTIMATORS
from otb_analysis.types import Estimate, EstimatorInputs

__all__ = [
    "ESTIMATORS",
    "DecayOptions",
    "Entry",
    "Estimate",
    "EstimatorInputs",
    "NoOptions",
    "TailOptions",
    "available",
    "entry_of",
    "estimate",
    "missing",
    "options_from_dict",
]
