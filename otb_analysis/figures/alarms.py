"""Alarms as a table, and as marks on the panels: first firings and change points where they happened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.diagnostics import DETECTORS, ChangePoint, Finding
from otb_analysis.figures.curves import Curve, CurvesInfo
from otb_analysis.figures.numbers import number
from otb_analysis.figures.styles import AMBER, run_styles
from otb_analysis.figures.theme import place

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
KINDS = {"watch": ("first watch", "star", AMBER), "alarm": ("first alarm", "x", RED)}
CHANGE = ("change point", "triangle-down")


@dataclass(frozen=True)
class Mark:
    """One mark on a panel."""

    run: str
    column: str
    step: int
    kind: str  # `watch`, `alarm` or `change`
    text: str


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


def alarm_marks(
    findings: Mapping[str, Sequence[Finding]], points: Mapping[str, Sequence[ChangePoint]]
) -> tuple[Mark, ...]:
    """Return the first firings and the change points of some runs."""
    fired = [
        Mark(run, PANELS.get(one.column, one.column), int(one.step[at]), kind, f"{TITLES[finding.detector]}: {kind}")
        for run, several in findings.items()
        for finding in several
        for one in finding.evidence
        for kind, threshold in (("watch", one.watch), ("alarm", one.alarm))
        if (at := one.first(threshold)) is not None
    ]
    changed = [
        Mark(run, point.column, point.step, "change", f"{number(point.before)} → {number(point.after)}")
        for run, several in points.items()
        for point in several
    ]
    return (*fired, *changed)


def add_marks(figure: go.Figure, info: CurvesInfo, marks: Sequence[Mark], columns: int) -> go.Figure:
    """Draw marks on the curves they belong to; a panel that shows no curve of the run gets none."""
    styles, named = run_styles(info.estimators), set[str]()
    for index, (quantity, curves) in enumerate(zip(info.quantities, info.curves, strict=True)):
        for curve in curves:
            for kind in (*KINDS, "change"):
                marked = [m for m in marks if (m.run, m.column, m.kind) == (curve.run, quantity.column, kind)]
                if not marked:
                    continue
                name, symbol, color = (*CHANGE, styles[curve.run].color) if kind == "change" else KINDS[kind]
                figure.add_scatter(
                    x=[m.step for m in marked], y=[_height(curve, m.step) for m in marked], mode="markers", name=name,
                    legendgroup=name, showlegend=name not in named,
                    marker={"symbol": symbol, "size": 10, "color": color, "line": {"width": 1, "color": "#FFFFFF"}},
                    text=[m.text for m in marked],
                    hovertemplate="step %{x}: <b>" + name + "</b><br>%{text}<extra></extra>", **place(index, columns),
                )  # fmt: skip
                named.add(name)
    return figure


def _height(curve: Curve, step: int) -> float:
    """The drawn line at a step, or at the recorded step after it."""
    at = min(int(np.searchsorted(curve.step, step)), len(curve.step) - 1)
    return float(curve.smooth[at])
