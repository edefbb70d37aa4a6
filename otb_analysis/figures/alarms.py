"""Alarms as a table, the worst first, and how levels, detectors and marks are called and drawn."""

from collections.abc import Mapping, Sequence

import pandas as pd

from otb_analysis.diagnostics import DETECTORS, Finding
from otb_analysis.figures.styles import AMBER, GREY

SIGNS = {
    "alarm": "■ alarm",
    "watch": "▲ watch",
    "not measured": "○ not measured",
    "too short": "○ too short",
    "ok": "· ok",
}
"""A level as a word with a sign that is found at a glance, and in any font."""

TITLES = {
    "reward_fall": "Falling reward",
    "vanished_gradient": "No gradient",
    "not_finite": "Not finite",
    "gradient_surge": "Gradient-norm surge",
    "entropy_collapse": "Entropy collapse",
    "entropy_rise": "Entropy rise",
    "length_drift": "Length drift",
    "zero_variance_groups": "Equal-reward groups",
    "ratio_tails": "Ratio tails",
    "tail_index": "Tail index",
    "clip_fraction": "Clipped steps",
    "sampling_certificate": "Sampling certificate",
}
PANELS = {"n_zero_variance_groups": "zero_variance_share", "clipped": "clipped_share"}
"""Column of the evidence → column of the panel that shows it, where they differ."""

RED = "#C1121F"
MARKS = {
    "watch": ("first watch", "star", AMBER),
    "alarm": ("first alarm", "x", RED),
    "change": ("change point", "triangle-down", GREY),
}
"""Kind of an event → its name, marker and colour."""


def fired_first(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return the findings that fired, in the order in which they did, and the others."""
    fired = sorted((f for f in findings if f.fired), key=lambda f: int(f.watch_step or 0))
    return fired, [f for f in findings if not f.fired]


def alarms_table(findings: Mapping[str, Sequence[Finding]]) -> pd.DataFrame:
    """Return one row per run and detector, the worst first, runs in their order among equals."""
    rows = [
        {
            "run": run,
            "level": SIGNS[finding.level],
            "detector": TITLES[finding.detector],
            "first watch": finding.watch_step,
            "first alarm": finding.alarm_step,
            "why": finding.reason,
            "_order": list(SIGNS).index(finding.level),
        }
        for run, several in findings.items()
        for finding in several
    ]
    columns = ["run", "level", "detector", "first watch", "first alarm", "why", "_order"]
    table = pd.DataFrame(rows, columns=columns).sort_values("_order", kind="stable").drop(columns="_order")
    steps = {name: table[name].astype("Float64").astype("Int64") for name in ("first watch", "first alarm")}
    return table.assign(**steps).reset_index(drop=True)


def alarms_line(findings: Mapping[str, Sequence[Finding]]) -> str:
    """Return how many detectors of each level there are, in words."""
    levels = [finding.level for several in findings.values() for finding in several]
    counts = [f"{levels.count(level)} {level}" for level in SIGNS if level in levels or level != "too short"]
    return f"{len(DETECTORS)} detectors on {len(findings)} run{'s' * (len(findings) != 1)}: {', '.join(counts)}."
