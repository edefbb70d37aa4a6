"""What the page of the study says: Many turns."""

import math
from collections.abc import Mapping

import numpy as np

from otb_analysis.figures.styles import ESTIMATOR_STYLES, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import (
    Findings,
    Rows,
    column_words,
    distinct,
    grid,
    interval_columns,
    known,
    markdown_table,
    select,
    share,
)
from otb_analysis.study.seeds import difference_words, later_success, paired_difference

from .study import STAGES, TRAINED


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say what the estimators for turns are worth on the same rollouts, and whether training shows it."""
    rollouts, rows, points = tables["rollouts"], tables["estimators"], tables["curves"]
    parts = [
        "## The rollouts",
        rollouts_table(rollouts),
        "## The same rollouts under every estimator",
        HOW.format(**rows[0]),
    ]
    for stage in distinct(rows, "stage"):
        own = select(rows, stage=stage)
        words = STAGES[stage].format(steps=rollouts[0]["steps"])
        parts.append(f"### {words[0].upper()}{words[1:]}")
        for name, title in TITLES.items():
            parts += [title, grid(own, "estimator", "size", lambda row, name=name: column_words(row, name), "N = {}")]
    parts += ["## Training", TRAINING.format(seeds=len(distinct(points, "seed"))), training_table(points)]
    return Findings(verdict(rollouts, rows, points), "\n\n".join(parts), {"efficiency.svg": figure(rows, points)})


TITLES = {
    "efficiency_ratio": "Efficiency over that of `rloo`: above 1 is better",
    "efficiency": "Efficiency",
    "variance_ratio": "Raw variance over that of `rloo`",
    "sf_ratio": "SF over that of `rloo`: below 1 is better",
    "projection": "Projection c",
}
HOW = """\
Groups of N are disjoint parts of the same pools. Efficiency is that of an update of 16 prompts, whatever N; ∇J is
`rloo`'s on the other prompts. Intervals are over {clusters} prompts. Energies are the forward-only proxy. Tool tokens
are masked: they have no score, no energy and no position."""
TRAINING = """\
{seeds} seeds; the estimators share start, prompts and held-out prompts. The mean over evaluations after the first, and
its difference from `rloo`'s of the same seed, have Student's interval over seeds."""


def verdict(rollouts: Rows, rows: Rows, points: Rows) -> str:
    """Return the answer in one line: efficiency of both estimators for turns over `rloo`, then training."""
    smallest = min(distinct(rows, "size"))
    said = []
    for stage in distinct(rows, "stage"):
        own = [
            select(rows, stage=stage, size=smallest, estimator=name)[0]
            for name in ("otb_turn", "otb_turn_loo", "trloo")
        ]
        shown = ", ".join(f"`{row['estimator']}` {column_words(row, 'efficiency_ratio')}" for row in own)
        success = np.mean([row["success"] for row in select(rollouts, stage=stage)])
        said.append(f"at {share(float(success))} success {shown}")
    gaps = [gained(points, name) for name in TRAINED if name != "rloo"]
    trained = ", ".join(
        f"`{name}` {difference_words(gap, 100, 1)}" for name, gap in zip(TRAINED[1:], gaps, strict=True)
    )
    return (
        f"Efficiency over `rloo` in groups of {smallest}: {'; '.join(said)}; "
        f"held-out success in training minus `rloo`'s, in points: {trained}."
    )


def rollouts_table(rollouts: Rows) -> str:
    """Return what the pools are, seed by seed."""
    headers = ("stage", "seed", "success", "turns", "prompts whose rollouts differ in turns", "policy tokens",
               "tool tokens", "corr(W_T, R), median over prompts")  # fmt: skip
    lines = []
    for row in rollouts:
        shares = [share(row[name]) for name in ("success", "turns_differ", "tool_share")]
        lines.append([row["stage"], str(row["seed"]), shares[0], f"{row['turns']:.2f}", shares[1],
                      f"{row['policy_tokens']:.1f}", shares[2], f"{known(row['corr_median']):.2f}"])  # fmt: skip
    return markdown_table(headers, lines)


def gained(points: Rows, name: str) -> Interval | None:
    """Return the paired difference of mean held-out success from `rloo`'s."""
    own, base = (later_success(select(points, estimator=estimator)) for estimator in (name, "rloo"))
    return paired_difference(own, base, "held-out success minus that of rloo")


def training_table(points: Rows) -> str:
    """Return success in training, its paired difference, gradient norm and clip fraction of every estimator."""
    lines = []
    for name in distinct(points, "estimator"):
        own, means = select(points, estimator=name), list(later_success(select(points, estimator=name)).values())
        found = seed_mean(means, "mean held-out success", "logit")
        ends = [float(np.mean([row["success"] for row in own if row["step"] == step])) for step in (0, own[-1]["step"])]
        norm, clipped = (float(np.mean([row[column] for row in own])) for column in ("norm", "clip_fraction"))
        gap = "" if name == "rloo" else difference_words(gained(points, name), 100, 1)
        mean = "–" if found is None else column_words(interval_columns("mean", found), "mean")
        lines.append([f"`{name}`", *(share(end) for end in ends), mean, gap, f"{norm:.1f}", share(clipped)])
    headers = ("estimator", "success before", "after", "mean", "minus `rloo`, points", "gradient norm", "steps clipped")
    return markdown_table(headers, lines)


def figure(rows: Rows, points: Rows) -> str:
    """Draw efficiency over `rloo`'s by group size for each stage, and the mean learning curves."""
    shown = ("group_mean", "trloo", "otb_turn", "otb_turn_loo", "sequence_optimal_loo")
    panels = []
    for stage in distinct(rows, "stage"):
        own = select(rows, stage=stage)
        drawn_curves = [ratio_curve(select(own, estimator=name)) for name in shown]
        if any(math.isfinite(y) for curve in drawn_curves for y in curve.y):
            panels.append(Panel(f"Rollouts: {stage}", "efficiency over rloo's", "N", drawn_curves, ((1.0, "rloo"),)))
    panels.append(
        Panel("Training", "held-out success", "step", [learning_curve(points, n) for n in TRAINED], percent=True)
    )
    return svg(panels)


def ratio_curve(rows: Rows) -> Curve:
    """Return one estimator's efficiency over `rloo`'s with its band."""
    name = rows[0]["estimator"]
    style = ESTIMATOR_STYLES[name]
    y, low, high = ([known(row[f"efficiency_ratio{end}"]) for row in rows] for end in ("", "_low", "_high"))
    return Curve([row["size"] for row in rows], y, name, low, high, _color(name), dashed=style.dash != "solid")


def learning_curve(points: Rows, name: str) -> Curve:
    """Return one estimator's mean learning curve over seeds."""
    own, style = select(points, estimator=name), ESTIMATOR_STYLES[name]
    steps = sorted(distinct(own, "step"))
    means = [float(np.mean([row["success"] for row in select(own, step=step)])) for step in steps]
    return Curve(steps, means, name, color=_color(name), dashed=style.dash != "solid")


def _color(name: str) -> str:
    """An estimator's usual colour, but `trloo` beside its relative `rloo` has one of its own."""
    return SKY if name == "trloo" else ESTIMATOR_STYLES[name].color
