"""What the page of the study says: Off-policy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

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
    markdown_table,
    select,
    share,
)
from otb_analysis.study.words import span_words

from .paired import OVER, at_distances, over_none, shown, with_q
from .study import BASELINES, BUDGETS, DIVERGENCES, DRIFTS, KINDS

SHOWN = {
    "`none`": GREY, "`token`": BLUE, "`sequence`": ORANGE, "`cumulative`": GREEN, "`ppo`": PINK, "`tis`, cap 1.2": SKY,
    "`gspo` without its clip": AMBER,
}  # fmt: skip
"""Ratios that are drawn, and in which colour; the tables have all."""


def report(tables: Mapping[str, Rows]) -> Findings:
    """Say which ratio is worth what, at which distance."""
    exact, levels = tables["exact"], tables["levels"]
    pairs, sampled = over_none(tables["policies"]), compared(tables["sampled"])
    parts = ["## Enumerated policies", EXACT_NOTE.format(compared=len(pairs), **exact[0])]
    for drift in DRIFTS:
        rows = select(exact, drift=drift)
        parts.append(f"### Sampler {WORDS[drift]}: {rows[0]['policies']} policies")
        for budget in BUDGETS:
            parts += [f"Efficiency of {budget} rollouts", exact_grid(rows, f"efficiency_{budget}", ".2f")]
            parts += ["… over that of `none`", pairs_grid(select(pairs, drift=drift, budget=budget))]
        parts += ["Bias of the mean, ‖m − ∇J‖/‖∇J‖", exact_grid(rows, "bias", ".3f")]
        parts += [SHIFT, exact_grid(rows, "baseline_shift", ".3f")]
    parts += ["### Clips", TOUCHED_NOTE, touched_grid(select(exact, drift="behind"))]
    parts += ["## A trained model", SAMPLED_NOTE.format(**sampled[0])]
    for kind in distinct(levels, "kind"):
        own, rows = select(levels, kind=kind), select(sampled, kind=kind)
        parts += [f"### {KINDS[kind]}", levels_table(own)]
        for baseline in BASELINES:
            parts += [f"Efficiency, baseline `{baseline}`", sampled_grid(select(rows, baseline=baseline), "efficiency")]
            if baseline == "rloo":
                parts += ["… over that of `none`", sampled_grid(select(rows, baseline=baseline), "against_none")]
        parts += ["Projection, baseline `rloo`", sampled_grid(select(rows, baseline="rloo"), "projection")]
    picture = figure(exact, levels, sampled)
    return Findings(verdict(pairs, levels, sampled), "\n\n".join(parts), {"efficiency.svg": picture})


WORDS = {"behind": "behind along the gradient", "random": "off in a random direction"}
EXACT_NOTE = """\
Random policies with shared parameters (three tokens, at most four long, success 0 or 1), each with a sampler μ at a
chosen KL(μ‖π) of a whole completion; of {drawn} that were drawn, those that have a sampler at every distance, with an
ESS of at least 1 %. Everything is a sum over all completions; a mean over policies has a 95 % interval over them. The
baseline is the success rate J of the policy that is updated. Efficiency is the share of an update that points along ∇J:
1 without noise and bias. It charges a ratio for its variance at few rollouts and for its bias at many, so rankings
change with the budget. Efficiencies over that of `none` are ratios of means, paired by policy; “≠” marks those that
stand at a false-discovery rate of 5 % (Benjamini–Yekutieli) over all {compared} of them."""
SHIFT = "How far the baseline moves the mean, ‖E g(J) − E g(0)‖/‖∇J‖: 0 where any constant leaves it alone"
TOUCHED_NOTE = """\
Variance over that of as many fresh rollouts, and the share of tokens that a clip or mask stops or a truncation changes;
sampler behind. A mean over policies, which few of them dominate where ratios multiply."""
SAMPLED_NOTE = """\
Efficiency of an update of {prompts} prompts, projection c, and intervals over {clusters} prompts; ∇J is the
leave-one-out gradient of fresh rollouts of the *other* prompts at the same parameters. Efficiencies over that of `none`
are paired on the same rollouts, “≠” as above, over all of these. KL is in nats, the mean of ρ − 1 − log ρ; ESS is that
of the whole rollouts' ratios, as a share."""


def compared(sampled: Rows) -> Rows:
    """Return the rows of the trained model, those with the baseline `rloo` with the q-value of their difference."""
    tested = iter(with_q(select(sampled, baseline="rloo"), "against_none_p"))
    return [next(tested) if row["baseline"] == "rloo" else dict(row) | {"q": None} for row in sampled]


def verdict(pairs: Rows, levels: Rows, sampled: Rows) -> str:
    """Return the answer first, then its numbers: which ratios are shown to differ from none, and where none can be."""
    behind = select(pairs, drift="behind")
    said = [answer(behind), far_words(behind), trained(levels, sampled)]
    return " ".join(f"{sentence}." for sentence in said)


def answer(pairs: Rows) -> str:
    """Return in updates of which size which ratios are shown more efficient than none, short enough for a list."""
    few, many = BUDGETS
    more = {budget: at_distances(select(pairs, budget=budget), "more") for budget in BUDGETS}
    always = {
        budget: [name for name, where in names.items() if len(where) == len(DIVERGENCES)]
        for budget, names in more.items()
    }
    if always[many] and not any(more[few].values()):
        return (
            f"For a sampler behind, ratios pay in large updates only: with {many} rollouts {listed(always[many])} "
            f"beat `none` at every distance, with {few} none is shown to at any (enumerated)"
        )
    said = [f"with {budget} rollouts {listed(names) or 'no ratio'}" for budget, names in always.items()]
    return f"Shown to beat `none` at every distance of a sampler behind: {', '.join(said)} (enumerated)"


def far_words(pairs: Rows) -> str:
    """Return by how much ratios are shown to gain, at the largest distance and at the least, and which never do."""
    near, far = DIVERGENCES[0], DIVERGENCES[-1]
    more = [row for row in pairs if shown(row, OVER) == "more"]
    said = [
        f"with {budget} rollouts: " + ", ".join(f"{row['ratio']} {column_words(row, OVER)}" for row in rows)
        for budget in BUDGETS
        if (rows := select(more, budget=budget, divergence=far))
    ]
    least = [row[OVER] for row in select(more, divergence=near)]
    gains = f"Efficiency over that of `none` at {far} nats a completion {'; '.join(said) or 'is shown above 1 nowhere'}"
    gains += f" (at {near} nats at most {max(least):.3f})" if least else ""
    less = at_distances(pairs, "less")
    never = [name for name, where in less.items() if len(where) == len(DIVERGENCES) * len(BUDGETS)]
    return f"{gains}; less efficient at every distance and size: {listed(never)}" if never else gains


def trained(levels: Rows, sampled: Rows) -> str:
    """Return which ratios are shown to differ from none on the trained model, or that it cannot tell."""
    own = [row for row in sampled if row["against_none"] is not None]
    named = {word: [r for r in own if shown(r, "against_none") == word] for word in ("more", "less")}
    said = [
        listed([f"{r['ratio']} ({r['lag']} updates, {r['kind']})" for r in rows]) + f" {word}"
        for word, rows in named.items()
        if rows
    ]
    if said:
        return f"A trained model shows {' and '.join(said)} efficient than `none`"
    spans = [span_at_last(kind, levels, own) for kind in distinct(levels, "kind")]
    return f"A trained model cannot tell: intervals of efficiency over `none` span {' and '.join(spans)}"


def span_at_last(kind: str, levels: Rows, sampled: Rows) -> str:
    """Return what the intervals span at a kind's largest lag, and how far policy and sampler are apart there."""
    level = select(levels, kind=kind)[-1]
    rows = select(sampled, kind=kind, lag=level["lag"], baseline="rloo")
    ends = [end for row in rows for end in (row["against_none_low"], row["against_none_high"]) if end is not None]
    where = "on the same rollouts" if kind == "reused" else "later"
    apart = f"{level['kl_token']:.3f} nats a token, ESS {share(level['ess'])}"
    return f"{span_words(ends)} {level['lag']} updates {where} ({apart})"


def listed(names: Sequence[str]) -> str:
    """Return names with an *and* before the last."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def exact_grid(rows: Rows, name: str, form: str) -> str:
    """Return a quantity of every ratio at every divergence, with its interval."""
    return grid(rows, "ratio", "divergence", lambda row: column_words(row, name, form), "{} nats")


def pairs_grid(rows: Rows) -> str:
    """Return every ratio's efficiency over that of none at every divergence, marked where it is shown to differ."""
    return grid(rows, "ratio", "divergence", lambda row: marked(row, OVER, ".3f"), "{} nats")


def marked(row: Mapping[str, Any], name: str, form: str = ".2f") -> str:
    """Return a ratio with its interval, marked where it is shown to differ from 1."""
    return column_words(row, name, form) + " ≠" * bool(shown(row, name))


def touched_grid(rows: Rows) -> str:
    """Return variance and share of touched tokens of every ratio at every divergence."""
    return grid(rows, "ratio", "divergence", lambda row: f"{row['variance']:.2f}, {share(row['touched'])}", "{} nats")


def sampled_grid(rows: Rows, name: str) -> str:
    """Return a quantity of every ratio at every lag, with its interval over prompts."""
    return grid(rows, "ratio", "lag", lambda row: marked(row, name), "{} updates")


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
