"""Alarms as a table, how levels, detectors and marks are called and drawn, and how far an alarm can be trusted.

Rates of false alarms are from docs/results/alarms.md, collapses from the table of detectors in
studies/05_collapse/README.md; a test compares the numbers with both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from otb_analysis.diagnostics import Finding
from otb_analysis.figures.styles import AMBER, GREY

SIGNS = {
    "alarm": "▲ alarm",
    "watch": "△ watch",
    "not measured": "○ not measured",
    "too short": "○ too short",
    "ok": "· no alarm",
}
"""A level as a word with a sign that is found at a glance, and in any font."""

TITLES = {
    "reward_fall": "Falling reward",
    "vanished_gradient": "No gradient",
    "not_finite": "NaN or infinite",
    "gradient_surge": "Gradient-norm surge",
    "entropy_collapse": "Entropy collapse",
    "entropy_rise": "Entropy rise",
    "length_drift": "Length drift",
    "zero_variance_groups": "Equal-reward groups",
    "ratio_tails": "Sampler far from trainer",
    "tail_index": "A few huge gradients",
    "clip_fraction": "Clipped steps",
    "sampling_certificate": "Sampler is not the policy",
}
PANELS = {"n_zero_variance_groups": "zero_variance_share", "clipped": "clipped_share"}
"""Column of the evidence → column of the panel that shows it, where they differ."""

RED = "#CC1F2B"
MARKS = {
    "watch": ("first watch", "triangle-up-open", AMBER),
    "alarm": ("first alarm", "triangle-up", RED),
    "change": ("change point", "triangle-down", GREY),
    "outlier": ("single-step outlier", "diamond", RED),
}
"""Kind of an event → its name, marker and colour."""


def fired_first(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that fired, in the order in which they did, and the others."""
    fired = sorted((f for f in findings if f.fired), key=lambda f: int(f.watch_step or 0))
    return fired, [f for f in findings if not f.fired]


def alarms_table(findings: Mapping[str, Sequence[Finding]]) -> pd.DataFrame:
    """Return one row per run and detector, the worst first, runs in their order among equals."""
    worst = list(SIGNS)
    every = [(run, finding) for run, several in findings.items() for finding in several]
    every.sort(key=lambda pair: worst.index(pair[1].level))
    columns = ["run", "level", "detector", "first watch", "first alarm", "why"]
    rows = [(run, SIGNS[f.level], TITLES[f.detector], f.watch_step, f.alarm_step, f.reason) for run, f in every]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(**{name: table[name].astype("Float64").astype("Int64") for name in columns[3:5]})


COLLAPSED = 93
"""Runs of study 05 that collapsed."""


@dataclass(frozen=True)
class Rates:
    """One detector; None where study 05 did not measure it."""

    false_alarms: float  # Largest share of simulated calm series of 50, 100, 200 or 500 steps in which it ever fires
    in_time: int | None = None  # Runs of study 05 that it called before they collapsed, of `COLLAPSED`
    at_all: int | None = None  # Those it called at any step
    stale: bool = False  # It calls old rollouts, in runs that had not collapsed too: no forecast


RATES = {
    "reward_fall": Rates(0.0, 17, 74),
    "vanished_gradient": Rates(0.0, 0, 34),
    "not_finite": Rates(0.0, 0, 0),
    "gradient_surge": Rates(0.014, 5, 7),
    "entropy_collapse": Rates(0.0, 0, 2),
    "entropy_rise": Rates(0.0, 29, 82),
    "length_drift": Rates(0.0, 0, 24),
    "zero_variance_groups": Rates(0.007, 0, 57),
    "ratio_tails": Rates(0.0, 93, 93, stale=True),
    "tail_index": Rates(0.001),
    "clip_fraction": Rates(0.003, 0, 0),
    "sampling_certificate": Rates(0.005, 93, 93, stale=True),
}


def false_alarms(detector: str) -> str:
    """Return the share of calm series in which a detector fires: ``1.4 %``, or ``under 0.1 %``."""
    share = RATES[detector].false_alarms
    return f"{100 * share:.1f} %" if share else "under 0.1 %"


def foresight(detector: str) -> str:
    """Return in how many runs of study 05 a detector fired before the collapse, and at all."""
    rates = RATES[detector]
    if rates.in_time is None:
        return "not measured"
    both = f"{rates.in_time} of {COLLAPSED} before, {rates.at_all} at all"
    return f"{both}; calls old rollouts, not the collapse" if rates.stale else both
