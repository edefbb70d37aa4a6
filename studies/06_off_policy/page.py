"""What the page of the study says: Off-policy."""

import math
from collections.abc import Mapping

from otb_analysis.enumeration.off_policy import CASES
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK, SKY
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.study import (
    Findings,
    Rows,
    column_words,
    distinct,
    grid,
    interval_curve,
    known,
    markdown_table,
    select,
    share,
)

from .study import BASELINES, BUDGETS, DIVERGENCES, DRIFTS, KINDS

SHOWN = {
    "`none`": GREY, "`token`": BLUE, "`sequence`": ORANGE, "`cumulative`": GREEN, "`ppo`": PINK, "`tis`, cap 1.2": SKY,
    "`gspo` without its clip": AMBER,
}  # fmt: skip
"""Ratios that are drawn, and in which colour; the tables have all."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say which ratio is worth what, at which distance."""
    exact, levels, sampled = tables["exact"], tables["levels"], tables["sampled"]
    parts = ["## Enumerated policies", EXACT_NOTE.format(**exact[0])]
    for drift in DRIFTS:
        rows = select(exact, drift=drift)
        parts.append(f"### Sampler {WORDS[drift]}: {rows[0]['policies']} policies")
        for budget in BUDGETS:
            parts += [f"Efficiency of {budget} rollouts", exact_grid(rows, f"efficiency_{budget}", ".2f")]
        parts += ["Bias of the mean, ‖m − ∇J‖/‖∇J‖", exact_grid(rows, "bias", ".3f")]
    parts += ["### Clips", TOUCHED_NOTE, touched_grid(select(exact, drift="behind"))]
    parts += ["## A trained model", SAMPLED_NOTE.format(**sampled[0])]
    for kind in distinct(levels, "kind"):
        own, rows = select(levels, kind=kind), select(sampled, kind=kind)
        parts += [f"### {KINDS[kind]}", levels_table(own)]
        for baseline in BASELINES:
            parts += [f"Efficiency, baseline `{baseline}`", sampled_grid(select(rows, baseline=baseline), "efficiency")]
        parts += ["Projection, baseline `rloo`", sampled_grid(select(rows, baseline="rloo"), "projection")]
    picture = figure(exact, levels, sampled)
    return Findings(verdict(exact, levels, sampled), "\n\n".join(parts), {"efficiency.svg": picture})


WORDS = {"behind": "behind along the gradient", "random": "off in a random direction"}
EXACT_NOTE = """\
Random policies with shared parameters (three tokens, at most four long, success 0 or 1), each with a sampler μ at a
chosen KL(μ‖π) of a whole completion; of {drawn} that were drawn, those that have a sampler at every distance, with an
ESS of at least 1 %. Everything is a sum over all completions; a mean over policies has a 95 % interval over them. The
baseline is the success rate J of the policy that is updated. Efficiency is the share of an update that points along ∇J:
1 without noise and bias. It charges a ratio for its variance at few rollouts and for its bias at many, so rankings
change with the budget."""
TOUCHED_NOTE = """\
Variance over that of as many fresh rollouts, and the share of tokens that a clip or mask stops or a truncation changes;
sampler behind. A mean over policies, which few of them dominate where ratios multiply."""
SAMPLED_NOTE = """\
Efficiency of an update of {prompts} prompts, projection c, and intervals over {clusters} prompts; ∇J is the
leave-one-out gradient of fresh rollouts of the *other* prompts at the same parameters. KL is in nats, the mean of
ρ − 1 − log ρ; ESS is that of the whole rollouts' ratios, as a share."""


def verdict(exact: Rows, levels: Rows, sampled: Rows) -> str:
    """Return the answer in one line: the best ratio near and far, and which differ from none on a trained model."""
    few, many = BUDGETS
    said = [
        f"at {distance} nats a completion the most efficient ratio is {best(exact, distance, few)} with "
        f"{few} rollouts and {best(exact, distance, many)} with {many}"
        for distance in (DIVERGENCES[0], DIVERGENCES[-1])
    ]
    return (
        "Enumerated, "
        + "; ".join([*said, *(trained(kind, levels, sampled) for kind in distinct(levels, "kind"))])
        + "."
    )


def best(exact: Rows, distance: float, budget: int) -> str:
    """Return the most efficient ratio for a sampler behind, beside the plain gradient's efficiency."""
    rows, name = select(exact, drift="behind", divergence=distance), f"efficiency_{budget}"
    top = max(rows, key=lambda row: row[name])
    (plain,) = select(rows, ratio="`none`")
    beside = "" if top is plain else f" against {plain[name]:.2f} of `none`"
    return f"{top['ratio']} ({top[name]:.2f}{beside})"


def trained(kind: str, levels: Rows, sampled: Rows) -> str:
    """Return which ratios differ from none at the largest lag of the trained model."""
    level = select(levels, kind=kind)[-1]
    rows = select(sampled, kind=kind, lag=level["lag"], baseline="rloo")
    better = [row["ratio"] for row in rows if known(row["against_none_low"]) > 1]
    worse = [row["ratio"] for row in rows if known(row["against_none_high"]) < 1]
    said = [f"{', '.join(names)} {word}" for names, word in ((better, "more"), (worse, "less")) if names]
    shown = f"{' and '.join(said)} efficient than no ratio" if said else "no ratio differs from none with certainty"
    what = "on the same rollouts" if kind == "reused" else "later"
    apart = f"{level['kl_token']:.3f} nats a token, ESS {share(level['ess'])}"
    return f"on a trained model {level['lag']} updates {what} ({apart}): {shown}"


def exact_grid(rows: Rows, name: str, form: str) -> str:
    """Return a quantity of every ratio at every divergence, with its interval."""
    return grid(rows, "ratio", "divergence", lambda row: column_words(row, name, form), "{} nats")


def touched_grid(rows: Rows) -> str:
    """Return variance and share of touched tokens of every ratio at every divergence."""
    return grid(rows, "ratio", "divergence", lambda row: f"{row['variance']:.2f}, {share(row['touched'])}", "{} nats")


def sampled_grid(rows: Rows, name: str) -> str:
    """Return a quantity of every ratio at every lag, with its interval over prompts."""
    return grid(rows, "ratio", "lag", lambda row: column_words(row, name), "{} updates")


def levels_table(levels: Rows) -> str:
    """Return how far policy and sampler are apart, and what every clip, mask or truncation touches there."""
    facts = {
        "KL a token": lambda row: f"{row['kl_token']:.4f}",
        "KL a rollout": lambda row: f"{row['kl_rollout']:.3f}",
        "ESS": lambda row: share(row["ess"]),
        "success of the rollouts": lambda row: share(row["success"]),
    } | {
        f"touched by {name}": lambda row, name=name: share(row[f"touched {name}"])
        for name in CASES
        if any(row[f"touched {name}"] for row in levels)
    }
    lines = [[name, *(words(row) for row in levels)] for name, words in facts.items()]
    return markdown_table(["", *(f"{row['lag']} updates" for row in levels)], lines)


def figure(exact: Rows, levels: Rows, sampled: Rows) -> str:
    """Draw efficiency over divergence: exact at both budgets, and of the trained model."""
    panels = [
        Panel(
            f"Enumerated, {budget} rollouts",
            "efficiency, sampler behind along ∇J",
            "log₁₀ KL of a completion, nats",
            [exact_curve(select(exact, drift="behind", ratio=name), budget) for name in SHOWN],
            y_range=(0.0, 1.0),
        )
        for budget in BUDGETS
    ]
    for kind in distinct(levels, "kind"):
        own = {row["lag"]: row["kl_rollout"] for row in select(levels, kind=kind)}
        rows = select(sampled, kind=kind, baseline="rloo")
        curves = [model_curve(select(rows, ratio=name), own) for name in SHOWN]
        panels.append(Panel(KINDS[kind], "efficiency, trained model", "log₁₀ KL of a rollout, nats", curves))
    return svg(panels)


def exact_curve(rows: Rows, budget: int) -> Curve:
    """Return one ratio's curve over divergences with its band."""
    name = rows[0]["ratio"]
    return interval_curve(
        rows, lambda row: math.log10(row["divergence"]), f"efficiency_{budget}", name.replace("`", ""), SHOWN[name]
    )


def model_curve(rows: Rows, divergence: Mapping[int, float]) -> Curve:
    """Return one ratio's curve over the measured divergences of each lag."""
    name = rows[0]["ratio"]
    return interval_curve(
        rows, lambda row: math.log10(divergence[row["lag"]]), "efficiency", name.replace("`", ""), SHOWN[name]
    )
