"""Diagnosis of a run: detectors of collapse, change points, outliers, attribution of a step, group sizes.

NumPy in, frozen records out; a quantity that was not measured is a finding that says what measures it.
"""

from otb_analysis.diagnostics.attribution import LEVELS, AttributedTokens, Holders, StepAttribution, attribute_step
from otb_analysis.diagnostics.changes import ChangePoint, change_points, fall
from otb_analysis.diagnostics.detectors import DETECTORS, diagnose
from otb_analysis.diagnostics.findings import Finding, StepSeries
from otb_analysis.diagnostics.outliers import Outlier, single_step_outliers
from otb_analysis.estimators import trained_label, trained_labels

__all__ = [
    "DETECTORS",
    "LEVELS",
    "AttributedTokens",
    "ChangePoint",
    "Finding",
    "Holders",
    "Outlier",
    "StepAttribution",
    "StepSeries",
    "attribute_step",
    "change_points",
    "diagnose",
    "fall",
    "single_step_outliers",
    "trained_label",
    "trained_labels",
]
