"""What the page of Collapse needs beyond its tables: lifetimes and their differences, fatal steps, the figure."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Row, Rows, column, distinct, select
from studies.lib.formats import above, below, mean_curve, seed_curves
from studies.lib.seeds import paired_difference

from . import forecast
from .study import ARMS, LEVEL, SHAPE, STALENESSES

PAIRS = (("otb", "rloo"), *LEVEL, *SHAPE, ("none", "rloo"))
"""Baselines whose lifetimes are compared seed by seed, at each staleness, with and without ratios."""
SUFFIXES = {"": "none", "-ratio": "token ratio"}
"""End of an arm's name → its correction, in words."""
SHARES = {
    "top_tokens": "top 1 % of tokens",
    "top_prompt": "largest prompt",
    "failed": "failed rollouts' share",
    "failed_tokens": "failed rollouts' tokens",
    "noise": "noise",
}
"""Columns that are shown in percent."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return lifetimes and their differences, what detectors told, and what was special about the fatal steps."""
    runs, attribution = tables["runs"], tables.get("attribution", [])
    staged = [row for row in runs if not ARMS[row["arm"]].calm]
    arms = distinct(staged, "arm")
    lifetimes = {name: steps_survived(staged, name) for name in arms}
    pairs = window_pairs(attribution)
    effects = {suffix: effects_of(staged, suffix) for suffix in SUFFIXES}
    return forecast.numbers(runs, tables["detectors"], tables["signals"]) | {
        "staged": staged,
        "lifetime": {name: seed_mean(list(of.values()), "steps survived") for name, of in lifetimes.items()},
        "lasted": {name: never_collapsed(staged, name) for name in arms},
        "contrasts": {
            (one, base, staleness, suffix): {"bound": censored_words(staged, *names), "steps": contrast(staged, *names)}
            for suffix in SUFFIXES
            for staleness in STALENESSES
            for one, base in PAIRS
            if set(names := (f"{one}-{staleness}{suffix}", f"{base}-{staleness}{suffix}")) <= set(arms)
        },
        "effects": effects,
        "cause": cause_of_lasting(effects[""]),
        "ratio_takes": taken_by_ratios(staged),
        "columns": [f"{words}, {k} batches old" for words in SUFFIXES.values() for k in STALENESSES],
        "fatal": {name: fatal_shares(attribution, name) for name in ARMS if name in distinct(attribution, "arm")},
        "pairs": pairs,
        "changes": [against_control(pairs, name) for name in ("grad_norm", *SHARES)],
    }


def effects_of(runs: Rows, suffix: str) -> dict[str, Interval | None]:
    """Return the effects of level and shape on steps survived, and by how much the level's exceeds the shape's.

    The mean of the differences of two pairs, at the stalenesses that have them, seed by seed. With ratios `raised` was
    not trained, so that each effect is one difference.
    """
    level, shape = (effect_by_seed(runs, pairs, suffix) for pairs in (LEVEL, SHAPE))
    return {
        "level": seed_mean(list(level.values()), "effect of the level on steps survived"),
        "shape": seed_mean(list(shape.values()), "effect of the shape on steps survived"),
        "level − shape": paired_difference(level, shape, "effect of the level minus the shape's") if shape else None,
    }


def effect_by_seed(runs: Rows, pairs: Sequence[tuple[str, str]], suffix: str) -> dict[int, float]:
    """Return each seed's mean difference of steps survived, over pairs of baselines and stalenesses."""
    arms = distinct(runs, "arm")
    there = [
        names
        for staleness in STALENESSES
        for pair in pairs
        if set(names := tuple(f"{one}-{staleness}{suffix}" for one in pair)) <= set(arms)
    ]
    lived = {name: steps_survived(runs, name) for names in there for name in names}
    seeds = distinct(runs, "seed") if there else []
    return {seed: float(np.mean([lived[one][seed] - lived[base][seed] for one, base in there])) for seed in seeds}


def taken_by_ratios(runs: Rows) -> Interval | None:
    """Return by how many steps the level helps `rloo` less where ratios take its force away."""
    without, with_ratios = (effect_by_seed(runs, LEVEL[:1], suffix) for suffix in SUFFIXES)
    return paired_difference(without, with_ratios, "effect of the level less with ratios") if with_ratios else None


def cause_of_lasting(effects: Mapping[str, Interval | None]) -> str:
    """Say what makes `otb` last, by the rule that `study.py` fixed: level, shape, both or open."""
    level, shape, more = (effects[name] for name in ("level", "shape", "level − shape"))
    if above(level, 0) and above(more, 0):
        return "level"
    if above(shape, 0) and below(more, 0):
        return "shape"
    return "both" if above(level, 0) and above(shape, 0) else "open"


def steps_survived(runs: Rows, name: str) -> dict[int, float]:
    """Return the steps that each seed lasted, all of them where it never collapsed."""
    arm = select(runs, arm=name)
    return {row["seed"]: float(row["steps"] if row["collapse"] is None else row["collapse"]) for row in arm}


def never_collapsed(runs: Rows, name: str) -> int:
    """Return how many runs of an arm never collapsed, so that their lifetime is not known."""
    return sum(row["collapse"] is None for row in select(runs, arm=name))


def contrast(runs: Rows, arm: str, base: str) -> Interval | None:
    """Return by how many steps one arm outlasts another, seed by seed, both cut at the last step."""
    return paired_difference(steps_survived(runs, arm), steps_survived(runs, base), f"steps survived beyond {base}")


def censored_words(runs: Rows, arm: str, base: str) -> str:
    """Say which side the last step cuts a difference of lifetimes on: none, the first, the second or both."""
    if never_collapsed(runs, arm):
        return "both cut: " if never_collapsed(runs, base) else "at least "
    return "at most " if never_collapsed(runs, base) else ""


def window_pairs(attribution: Rows) -> list[tuple[Row, Row]]:
    """Return the fatal and the control step of every run that has both."""
    control = {(row["arm"], row["seed"]): row for row in select(attribution, window="control")}
    fatal = select(attribution, window="fatal")
    return [(row, control[key]) for row in fatal if (key := (row["arm"], row["seed"])) in control]


def paired_change(pairs: list[tuple[Row, Row]], name: str) -> Interval | None:
    """Return by how much fatal steps exceed control steps: the median over a seed's runs, then Student's over seeds."""
    seeds = dict.fromkeys(fatal["seed"] for fatal, _ in pairs)
    changes = [
        float(np.median([fatal[name] - control[name] for fatal, control in pairs if fatal["seed"] == seed]))
        for seed in seeds
    ]
    return seed_mean(changes, f"fatal minus control {name}")


def against_control(pairs: list[tuple[Row, Row]], name: str) -> dict[str, Any]:
    """Return a quantity at fatal and at control steps, and how it is shown: shares in percent, ‖ḡ‖ as it is."""
    fatal, control = ([pair[side][name] for pair in pairs] for side in (0, 1))
    return {
        "name": name, "fatal": fatal, "control": control, "change": paired_change(pairs, name),
        "higher": sum(a > b for a, b in zip(fatal, control, strict=True)),
        "form": ".0f" if name in SHARES else ".1f", "scale": 100 if name in SHARES else 1,
    }  # fmt: skip


def fatal_shares(attribution: Rows, name: str) -> dict[str, list[float]]:
    """Return what an arm's fatal steps were like, run by run."""
    rows = select(attribution, arm=name, window="fatal")
    before = [row["collapse"] - row["step"] for row in rows]
    surge = [row["grad_norm"] / row["usual_norm"] for row in rows if row["usual_norm"]]
    return {"before": before, "surge": surge} | {share: column(rows, share) for share in SHARES}


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the trailing reward of every arm: the seeds thin, their mean."""
    curves = tables["curves"]
    panels = [_panel(arm, select(curves, arm=arm)) for arm in ARMS if select(curves, arm=arm)]
    return {"reward.svg": svg(panels, columns=4)}


def _panel(name: str, curves: Rows) -> Panel:
    middle = mean_curve(curves, "step", "reward", name, ARMS[name].color, width=3.0)
    note = "mean reward of the last 6 steps"
    return Panel(name, note, "step", [*seed_curves(curves, "reward"), middle], y_range=(0.0, 1.0), percent=True)
