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

from .study import CONFIG, STAGES, TRAINED


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
    parts += ["## What it cannot say", limits(points)]
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
LIMITS = """\
- Training has one learning rate, {rate:g}, for all estimators: one that wants another is not given it. It has {seeds}
  seeds, and Student's intervals over them trust that differences are normal.
- No arm takes steps of the same projection on ∇J as another. A baseline that includes its own rollout shortens the
  gradient: the norm of `otb_turn`'s is {norm} of `rloo`'s. Clipping and AdamW take much of that away again; how much of
  a difference in training is direction and how much is length was not measured.
- Every ratio is to `rloo`; no other two estimators are compared in pairs.
- Not measured: estimators that need exact norms of the rollouts' scores (`classic_optimal`, `classic_optimal_loo`,
  `opob`), for a pool's are proxies; those that couple the prompts of a batch (`batch_mean`, `batch_mean_loo`,
  `james_stein`), for pools are cut into several groups of one prompt, which they would take for other prompts; those
  that need a critic or a baseline fitted on other rollouts (`value`, `tvm`, `position_optimal`), for none was; `otb`
  and `otb_loo`, which take no tool tokens between a rollout's own and have `otb_turn` and `otb_turn_loo` in their
  place. Nothing forbids `tempo`, `energy_ema` and `energy_ema_loo`; they were left out all the same."""
TURNS = ("otb_turn", "otb_turn_loo", "trloo")
"""The estimators for turns that the question asks about."""


def limits(points: Rows) -> str:
    """Return what this study cannot say."""
    norm = {name: float(np.mean([row["norm"] for row in select(points, estimator=name)])) for name in TRAINED}
    return LIMITS.format(
        rate=CONFIG.optimize.learning_rate,
        seeds=len(distinct(points, "seed")),
        norm=share(norm["otb_turn"] / norm["rloo"]),
    )


def verdict(rollouts: Rows, rows: Rows, points: Rows) -> str:
    """Return the answer first, then efficiency over `rloo` of the estimators for turns, and their training."""
    smallest = min(distinct(rows, "size"))
    said = []
    for stage in distinct(rows, "stage"):
        own = [select(rows, stage=stage, size=smallest, estimator=name)[0] for name in TURNS]
        shown = ", ".join(f"`{row['estimator']}` {column_words(row, 'efficiency_ratio')}" for row in own)
        success = np.mean([row["success"] for row in select(rollouts, stage=stage)])
        said.append(f"at {share(float(success))} success {shown}")
    trained = ", ".join(f"`{name}` {difference_words(gained(points, name), 100, 1)}" for name in TURNS)
    return (
        f"{answer(rows, points)}. Efficiency over `rloo` in groups of {smallest}: {'; '.join(said)}; "
        f"held-out success in training minus `rloo`'s, in points: {trained}."
    )


def answer(rows: Rows, points: Rows) -> str:
    """Return whether any interval tells an estimator for turns from `rloo`, on the same rollouts or in training."""
    pooled = [
        f"`{row['estimator']}` (N = {row['size']}, {row['stage']}) {'more' if row['efficiency_ratio'] > 1 else 'less'}"
        for row in rows
        if row["estimator"] in TURNS
        and (known(row["efficiency_ratio_low"]) > 1 or known(row["efficiency_ratio_high"]) < 1)
    ]
    gaps = {name: gained(points, name) for name in TURNS}
    trained = [
        f"`{name}` {'more' if gap.estimate > 0 else 'less'}"
        for name, gap in gaps.items()
        if gap is not None and gap.low is not None and gap.high is not None and not gap.low <= 0 <= gap.high
    ]
    if not pooled and not trained:
        names = ", ".join(f"`{name}`" for name in TURNS[:-1])
        return f"Not shown: no interval tells {names} or `{TURNS[-1]}` from `rloo`, on the same rollouts or in training"
    alone = "by intervals each taken alone"
    return (
        f"Told from `rloo` {alone}: on the same rollouts {', '.join(pooled) or 'none'} efficient; "
        f"in training {', '.join(trained) or 'none'} successful"
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
