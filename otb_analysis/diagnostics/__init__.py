"""Diagnosis of a run: detectors of collapse, change points, attribution of a step's gradient, group sizes.

NumPy in, frozen records out; a quantity that was not measured is a finding that says what measures it.
"""

from otb_analysis.diagnostics.attribution import LEVELS, AttributedTokens, Holders, StepAttribution, attribute_step
from otb_analysis.diagnostics.changes import ChangePoint, change_points, fall
from otb_analysis.diagnostics.detectors import DETECTORS, diagnose
from otb_analysis.diagnostics.findings import Finding, StepSeries
from otb_analysis.estimators import trained_label, trained_labels

__all__ = [
    "DETECTORS",
    "LEVELS",
    "AttributedTokens",
    "ChangePoint",
    "Finding",
    "Holders",
    "StepAttribution",
    "StepSeries",
    "attribute_step",
    "change_points",
    "diagnose",
    "fall",
    "trained_label",
    "trained_labels",
]
