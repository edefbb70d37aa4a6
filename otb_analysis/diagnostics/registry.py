"""All detectors by name, and a run's diagnosis."""

from collections.abc import Callable

from otb_analysis.diagnostics.certificate import sampling_certificate
from otb_analysis.diagnostics.changes import entropy_collapse, entropy_rise, gradient_surge, length_drift
from otb_analysis.diagnostics.decline import not_finite, reward_fall, vanished_gradient
from otb_analysis.diagnostics.findings import SEVERITY, Finding, StepSeries
from otb_analysis.diagnostics.shares import clip_fraction, ratio_tails, tail_index, zero_variance_groups

DETECTORS: dict[str, Callable[[StepSeries], Finding]] = {
    "reward_fall": reward_fall,
    "vanished_gradient": vanished_gradient,
    "not_finite": not_finite,
    "gradient_surge": gradient_surge,
    "entropy_collapse": entropy_collapse,
    "entropy_rise": entropy_rise,
    "length_drift": length_drift,
    "zero_variance_groups": zero_variance_groups,
    "ratio_tails": ratio_tails,
    "tail_index": tail_index,
    "clip_fraction": clip_fraction,
    "sampling_certificate": sampling_certificate,
}
"""Each is a pure function of a run's scalars; its rate of false alarms is in docs/results/alarms.md."""


def diagnose(series: StepSeries) -> list[Finding]:
    """Return what every detector says, the worst first, in the order of `DETECTORS` among equals."""
    return sorted((detect(series) for detect in DETECTORS.values()), key=lambda finding: SEVERITY[finding.level])
