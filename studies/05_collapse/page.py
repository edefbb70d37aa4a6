"""What the page of the study says: Collapse."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import fisher_exact

from otb_analysis.diagnostics import DETECTORS
from otb_analysis.figures.styles import GREY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import (
    Findings,
    Rows,
    column_words,
    distinct,
    interval_columns,
    markdown_table,
    select,
    share,
)
from otb_analysis.study.seeds import difference_words, paired_difference

from .study import AGAINST, ARMS

CONDITIONS = ("sampling_certificate", "ratio_tails")
"""Call old rollouts themselves, which every run has: no forecast."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say how long each arm lasts, who saw it coming, and who held the fatal gradient."""
    runs, detectors = tables["runs"], tables["detectors"]
    fatal, projection = tables.get("fatal", []), tables["projection"]
    parts = [
        "## Survival",
        HOW.format(steps=runs[0]["steps"], seeds=len(distinct(runs, "seed")), c=c_words(projection)),
    ]
    parts += [survival_table(runs), "## Detectors", LEAD, detectors_table(runs, detectors)]
    parts += ["## The fatal step", FATAL, fatal_table(fatal)] if fatal else []
    return Findings(verdict(runs, detectors), "\n\n".join(parts), {"reward.svg": figure(tables["curves"])})


HOW = """\
{seeds} seeds; the arms of a seed share start, prompts and conditions: rollouts from the policy of four batches ago, not
corrected for, and a learning rate that rises from 0 to the one shown. `scaled` is `rloo` at c times that rate, c = {c}
the projection of `otb` on rollouts of the starts: what shorter steps alone do. Collapsed means: the mean reward of 6
steps is at most half of the highest such mean so far, and so for 6 steps on end. A run that lasts counts with its
{steps} steps. Intervals are Student's over seeds, those of differences over the same seeds."""
LEAD = """\
Lead: steps from a detector's first call to the collapse, over the runs that collapsed and that it called in time; a
detector may only look back. `sampling_certificate` and `ratio_tails` call the old rollouts, which all runs have: no
forecast of when. Last column: runs that never collapsed, but that it called."""
FATAL = """\
The attributed step with the largest ‖ḡ‖ in the 12 steps up to the collapse; means over the runs that collapsed. Shares
are of Σ|share| of the step's tokens, but for noise, the part of ‖ḡ‖² that prompts do not have in common."""


def c_words(projection: Rows) -> str:
    """Return the projection of `otb` with its interval."""
    (row,) = select(projection, estimator="otb")
    return column_words(row, "projection")


def survived(runs: Rows, name: str) -> dict[int, float]:
    """Return the steps that each seed lasted, all of them where it never collapsed."""
    own = select(runs, arm=name)
    return {row["seed"]: float(row["steps"] if row["collapse"] is None else row["collapse"]) for row in own}


def longer(runs: Rows, name: str) -> Interval | None:
    """Return by how many steps an arm outlasts `rloo`, seed by seed."""
    own, base = survived(runs, name), survived(runs, AGAINST)
    return paired_difference(own, base, "steps survived beyond rloo")


def verdict(runs: Rows, detectors: Rows) -> str:
    """Return the answer in one line: runs that collapsed, steps gained over `rloo`, the earliest detector."""
    arms = distinct(runs, "arm")
    count = {name: sum(row["collapse"] is not None for row in select(runs, arm=name)) for name in arms}
    seeds = len(distinct(runs, "seed"))
    counted = ", ".join(f"`{name}` {count[name]}" for name in arms)
    gained = ", ".join(f"`{name}` {difference_words(longer(runs, name))}" for name in arms if name != AGAINST)
    said = f"Of {seeds} runs each, collapsed: {counted}; steps survived beyond `rloo`'s: {gained}"
    return f"{said}; {forecast(runs, detectors)}."


def forecast(runs: Rows, detectors: Rows) -> str:
    """Say which detector told best, by its calls, the runs that collapsed from those that lasted."""
    leads = {name: lead_of(runs, detectors, name) for name in DETECTORS if name not in CONDITIONS}
    total, lasted = (sum((row["collapse"] is None) == calm for row in runs) for calm in (False, True))
    calls = {name: called_calm(runs, detectors, name) for name in leads}
    apart = {
        name: len(lead) / max(total, 1) - calls[name] / max(lasted, 1) for name, lead in leads.items() if len(lead)
    }
    if not apart or max(apart.values()) <= 0:
        return "no detector tells those from the ones that lasted"
    best = max(apart, key=lambda name: apart[name])
    hits, false = len(leads[best]), calls[best]
    ahead = f"by a median of {np.median(leads[best]):.0f} steps"
    said = f"{hits} of {total} called beforehand, {ahead}, against {false} of {lasted}"
    found: Any = fisher_exact([[hits, total - hits], [false, lasted - false]], alternative="greater")
    if found.pvalue > 0.05:
        return f"no detector is shown to tell those from the ones that lasted (best `{best}`: {said})"
    return f"`{best}` tells those best from the ones that lasted: {said}"


def called_calm(runs: Rows, detectors: Rows, name: str) -> int:
    """Return how many runs that never collapsed a detector called."""
    calm = {(row["arm"], row["seed"]) for row in runs if row["collapse"] is None}
    own = [row for row in select(detectors, detector=name) if (row["arm"], row["seed"]) in calm]
    return sum(row["watch"] is not None for row in own)


def survival_table(runs: Rows) -> str:
    """Return how often and when each arm collapsed, and how its steps were clipped until then."""
    lines = []
    for name in distinct(runs, "arm"):
        own = select(runs, arm=name)
        lasted = seed_mean(list(survived(runs, name).values()), "steps survived")
        gap = "" if name == AGAINST else difference_words(longer(runs, name))
        mean = {
            key: float(np.mean([row[key] for row in own])) for key in ("clip_fraction", "grad_norm", "best", "last")
        }
        lines.append([
            f"`{name}`", f"{sum(row['collapse'] is not None for row in own)} of {len(own)}",
            column_words(interval_columns("x", lasted), "x", ".0f"), gap, share(mean["best"]), share(mean["last"]),
            f"{own[0]['rate']:.2g}", share(mean["clip_fraction"]), f"{mean['grad_norm']:.1f}",
        ])  # fmt: skip
    headers = ["arm", "collapsed", "steps survived", "beyond `rloo`", "best reward", "at the end", "learning rate",
               "clipped until then", "first gradient norms"]  # fmt: skip
    return markdown_table(headers, lines)


def lead_of(runs: Rows, detectors: Rows, name: str) -> list[int]:
    """Return a detector's lead in every run that collapsed and that it called at or before the collapse."""
    ends = {(row["arm"], row["seed"]): row["collapse"] for row in runs}
    found = []
    for row in select(detectors, detector=name):
        end = ends[row["arm"], row["seed"]]
        if end is not None and row["watch"] is not None and row["watch"] <= end:
            found.append(end - row["watch"])
    return found


def detectors_table(runs: Rows, detectors: Rows) -> str:
    """Return how often each detector called a collapse in time, how early, and how often it called without one."""
    ends = {(row["arm"], row["seed"]): row["collapse"] for row in runs}
    total = sum(end is not None for end in ends.values())
    lines = []
    for name in DETECTORS:
        leads = lead_of(runs, detectors, name)
        words = f"{np.median(leads):.0f} ({min(leads)}–{max(leads)})" if leads else "–"
        lines.append(
            [
                f"`{name}`",
                f"{len(leads)} of {total}",
                words,
                f"{called_calm(runs, detectors, name)} of {len(ends) - total}",
            ]
        )
    return markdown_table(
        ["detector", "called in time", "median lead (range), steps", "called without collapse"], lines
    )


def fatal_table(fatal: Rows) -> str:
    """Return who held the fatal gradient, arm by arm."""
    columns = {"failed": "failed rollouts", "top_tokens": "top 1 % of tokens", "top_prompt": "largest prompt",
               "noise": "noise"}  # fmt: skip
    lines = []
    for name in distinct(fatal, "arm"):
        own = select(fatal, arm=name)
        shares = [share(float(np.mean([row[key] for row in own]))) for key in columns]
        surge = float(np.mean([row["grad_norm"] / row["typical_norm"] for row in own]))
        before = float(np.mean([row["collapse"] - row["step"] for row in own]))
        lines.append([f"`{name}`", f"{before:.1f}", f"{surge:.1f}", *shares])
    headers = ["arm", "steps before", "‖ḡ‖ over the median", *columns.values()]
    return markdown_table(headers, lines)


def figure(curves: Rows) -> str:
    """Draw the trailing reward of every arm: the seeds thin, their mean."""
    return svg([_panel(name, select(curves, arm=name)) for name in distinct(curves, "arm")])


def _panel(name: str, curves: Rows) -> Panel:
    steps = sorted(distinct(curves, "step"))
    mean = [float(np.mean([row["reward"] for row in select(curves, step=step)])) for step in steps]
    seeds = [
        Curve([row["step"] for row in own], [row["reward"] for row in own], "one seed", color=GREY, width=1.0)
        for own in (select(curves, seed=seed) for seed in distinct(curves, "seed"))
    ]
    drawn_mean = Curve(steps, mean, name, color=ARMS[name], width=3.0)
    return Panel(
        name, "mean reward of the last 6 steps", "step", [*seeds, drawn_mean], y_range=(0.0, 1.0), percent=True
    )
