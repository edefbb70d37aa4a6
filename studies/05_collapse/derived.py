"""What the page of Collapse needs beyond its tables: lifetimes, fatal steps, what detectors foretold, the figure."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.diagnostics import DETECTORS
from otb_analysis.figures.svg import Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from studies.lib import Row, Rows, column, distinct, mean, select
from studies.lib.formats import above, below, mean_curve, seed_curves
from studies.lib.seeds import paired_difference, steps_survived

from .study import ARMS, LEVEL, SHAPE, STALENESSES

RIVALS = tuple((one, base) for one in ("regression", "across") for base in ("rloo", "none"))
PAIRS = (("otb", "rloo"), *LEVEL, *SHAPE, ("none", "rloo"), *RIVALS)
"""Baselines whose lifetimes are compared seed by seed, at each staleness, with and without ratios."""
SUFFIXES = {"": "none", "-ratio": "token ratio"}
"""End of an arm's name → its correction, in words."""
SHARES = {
    "top_tokens": "top 1 % of tokens", "top_prompt": "largest prompt", "failed": "failed rollouts' share",
    "failed_tokens": "failed rollouts' tokens", "noise": "noise",
}  # fmt: skip
"""Columns that are shown in percent."""


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return lifetimes and their differences, what detectors told, and what was special about the fatal steps."""
    runs, attribution = tables["runs"], tables.get("attribution", [])
    staged = [row for row in runs if not ARMS[row["arm"]].calm]
    arms = distinct(staged, "arm")
    lifetimes = {name: steps_survived(select(staged, arm=name)) for name in arms}
    pairs = window_pairs(attribution)
    effects = {suffix: effects_of(staged, suffix) for suffix in SUFFIXES}
    # By how many steps the level helps `rloo`, without ratios and where they take its force away
    plain, corrected = (effect_by_seed(staged, LEVEL[:1], suffix) for suffix in SUFFIXES)
    taken = paired_difference(plain, corrected, "effect of the level less with ratios")
    contrasts = dict[tuple[str, str, int, str], dict[str, Any]]()
    for suffix, staleness, (one, base) in product(SUFFIXES, STALENESSES, PAIRS):
        names = (f"{one}-{staleness}{suffix}", f"{base}-{staleness}{suffix}")
        if set(names) <= set(arms):
            cut = {"bound": censored_words(staged, *names), "steps": contrast(staged, *names)}
            contrasts[one, base, staleness, suffix] = cut
    return forecast_numbers(runs, tables["detectors"], tables["signals"]) | {
        "staged": staged, "contrasts": contrasts, "effects": effects, "cause": cause_of_lasting(effects[""]),
        "lifetime": {name: seed_mean(list(of.values()), "steps survived") for name, of in lifetimes.items()},
        "lasted": {name: never_collapsed(staged, name) for name in arms}, "ratio_takes": taken,
        "columns": [f"{words}, {k} batches old" for words in SUFFIXES.values() for k in STALENESSES],
        "fatal": {name: fatal_shares(attribution, name) for name in ARMS if name in distinct(attribution, "arm")},
        "pairs": pairs, "changes": [against_control(pairs, name) for name in ("grad_norm", *SHARES)],
    }  # fmt: skip


def effects_of(runs: Rows, suffix: str) -> dict[str, Interval | None]:
    """Return the effects of level and shape on steps survived, and by how much the level's exceeds the shape's.

    The mean of the differences of two pairs, at the stalenesses that have them, seed by seed. With ratios `raised` was
    not trained, so that each effect is one difference.
    """
    level, shape = (effect_by_seed(runs, pairs, suffix) for pairs in (LEVEL, SHAPE))
    alone = {"level": level, "shape": shape}
    return {
        name: seed_mean(list(of.values()), f"effect of the {name} on steps survived") for name, of in alone.items()
    } | {"level − shape": paired_difference(level, shape, "effect of the level minus the shape's")}


def effect_by_seed(runs: Rows, pairs: Sequence[tuple[str, str]], suffix: str) -> dict[int, float]:
    """Return each seed's mean difference of steps survived, over pairs of baselines and stalenesses."""
    arms = set(distinct(runs, "arm"))
    every = [tuple(f"{one}-{k}{suffix}" for one in pair) for k in STALENESSES for pair in pairs]
    there = [names for names in every if set(names) <= arms]
    lived = {name: steps_survived(select(runs, arm=name)) for names in there for name in names}
    seeds = distinct(runs, "seed") if there else []
    return {seed: float(np.mean([lived[one][seed] - lived[base][seed] for one, base in there])) for seed in seeds}


def cause_of_lasting(effects: Mapping[str, Interval | None]) -> str:
    """Say what makes `otb` last, by the rule that `study.py` fixed: level, shape, both or open."""
    (level, shape), more = (above(effects[name], 0) for name in ("level", "shape")), effects["level − shape"]
    if (level and above(more, 0)) or (shape and below(more, 0)):
        return "level" if above(more, 0) else "shape"
    return "both" if level and shape else "open"


def never_collapsed(runs: Rows, name: str) -> int:
    """Return how many runs of an arm never collapsed, so that their lifetime is not known."""
    return sum(row["collapse"] is None for row in select(runs, arm=name))


def contrast(runs: Rows, arm: str, base: str) -> Interval | None:
    """Return by how many steps one arm outlasts another, seed by seed, both cut at the last step."""
    one, other = (steps_survived(select(runs, arm=name)) for name in (arm, base))
    return paired_difference(one, other, f"steps survived beyond {base}")


def censored_words(runs: Rows, arm: str, base: str) -> str:
    """Say which side the last step cuts a difference of lifetimes on: none, the first, the second or both."""
    cut = never_collapsed(runs, arm) > 0, never_collapsed(runs, base) > 0
    return {(True, True): "both cut: ", (True, False): "at least ", (False, True): "at most "}.get(cut, "")


def window_pairs(attribution: Rows) -> list[tuple[Row, Row]]:
    """Return the fatal and the control step of every run that has both."""
    control = {(row["arm"], row["seed"]): row for row in select(attribution, window="control")}
    fatal = select(attribution, window="fatal")
    return [(row, control[key]) for row in fatal if (key := (row["arm"], row["seed"])) in control]


def against_control(pairs: list[tuple[Row, Row]], name: str) -> dict[str, Any]:
    """Return a quantity at fatal and at control steps, and how it is shown: shares in percent, ‖ḡ‖ as it is.

    `change` is by how much fatal steps exceed control steps: the median over a seed's runs, then Student's over seeds.
    """
    fatal, control = ([pair[side][name] for pair in pairs] for side in (0, 1))
    more = [{"seed": one["seed"], "more": one[name] - other[name]} for one, other in pairs]
    changes = [float(np.median(column(select(more, seed=seed), "more"))) for seed in distinct(more, "seed")]
    return {
        "name": name, "fatal": fatal, "control": control, "change": seed_mean(changes, f"fatal minus control {name}"),
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
    """Draw the trailing reward of every arm without ratios: the seeds thin, their mean."""
    panels = []
    for name in distinct(tables["curves"], "arm"):
        if ARMS[name].ratio == "none":
            arm = select(tables["curves"], arm=name)
            drawn = [*seed_curves(arm, "reward"), mean_curve(arm, "step", "reward", name, ARMS[name].color, width=3.0)]
            note = "mean reward of the last 6 steps"
            panels.append(Panel(name, note, "step", drawn, y_range=(0.0, 1.0), percent=True))
    return {"reward.svg": svg(panels, columns=4)}


CONDITIONS = ("sampling_certificate", "ratio_tails")
"""Call old rollouts themselves, which every staged run has and no calm one: no forecast."""
MISSING = "not measured"
"""Level of a detector whose quantity the run did not record: neither blind nor tested."""
SHOWN_BELOW = 0.05
ALL_SIGNS = 100_000
"""More than the 2^16 of sixteen seeds, so that every combination is tried."""
SIGNALS = ("entropy", "grad_norm", "length")
WHEN = ("first", "before", "last")


def forecast_numbers(runs: Rows, detectors: Rows, signals: Rows) -> dict[str, Any]:
    """Return what each detector called, which forecast is shown, and how the signals went."""
    pending = [row for row in runs if not ARMS[row["arm"]].calm and row["collapse"] is None]
    kinds = {"broken": collapsed(runs), "pending": pending, "quiet": still_calm(runs)}
    measured = [row["detector"] for row in detectors if row["level"] != MISSING]
    watched = [name for name in DETECTORS if name in measured]  # those that had what they read in some run
    # no test of the detectors that call the staged conditions themselves
    names = [name for name in watched if name not in CONDITIONS]
    p_values = dict(zip(names, holm([p_value(seed_differences(runs, detectors, n)) for n in names]), strict=True))
    told = dict[str, dict[str, Any]]()
    for name in watched:
        called = {kind: number_called(some, detectors, name) for kind, some in kinds.items()}
        told[name] = {"leads": sorted(leads_of(runs, detectors, name)), **called, "p": p_values.get(name)}
    ends = [row for row in signals if select(kinds["broken"], arm=row["arm"], seed=row["seed"])]
    changes = dict[str, dict[str, Any]]()
    # Medians at the start, before the collapse and at the end, and in how many runs it rose
    for name in SIGNALS if ends else ():
        first, *later = ([row[f"{name}_{when}"] for row in ends] for when in WHEN)
        rose = [sum(a > b for a, b in zip(values, first, strict=True)) for values in later]
        changes[name] = {"medians": [float(np.median(values)) for values in (first, *later)], "rose": rose}
    of_arm = {arm: select(signals, arm=arm) for arm in distinct(signals, "arm")}
    path = {
        name: {arm: [mean(column(rows, f"{name}_{when}")) for when in WHEN] for arm, rows in of_arm.items()}
        for name in SIGNALS
    }
    return kinds | {
        "told": told, "all_detectors": list(DETECTORS), "p_values": p_values,
        "forecast_shown": [name for name, p in p_values.items() if p <= SHOWN_BELOW],
        "blind": [name for name in p_values if not told[name]["broken"]], "signal_path": path, "signal_change": changes,
        "calm_runs": [row for row in runs if ARMS[row["arm"]].calm],
    }  # fmt: skip


def collapsed(runs: Rows) -> Rows:
    """Return the staged runs that collapsed."""
    return [row for row in runs if not ARMS[row["arm"]].calm and row["collapse"] is not None]


def still_calm(runs: Rows) -> Rows:
    """Return the calm arm's runs that did not collapse by the same rule."""
    return [row for row in runs if ARMS[row["arm"]].calm and row["collapse"] is None]


def leads_of(runs: Rows, detectors: Rows, name: str) -> list[int]:
    """Return a detector's lead in every run that collapsed and that it called at or before the collapse."""
    ends = {(row["arm"], row["seed"]): row["collapse"] for row in collapsed(runs)}
    calls = {(row["arm"], row["seed"]): row["watch"] for row in select(detectors, detector=name)}
    return [end - calls[run] for run, end in ends.items() if calls[run] is not None and calls[run] <= end]


def number_called(runs: Rows, detectors: Rows, name: str) -> int:
    """Return how many of some runs a detector called at any time."""
    called = [(row["arm"], row["seed"]) for row in select(detectors, detector=name) if row["watch"] is not None]
    return sum((row["arm"], row["seed"]) in called for row in runs)


def seed_differences(runs: Rows, detectors: Rows, name: str) -> list[float]:
    """Return, seed by seed, the share of its collapsed runs called in time minus the share of its calm runs called."""
    each = [select(runs, seed=seed) for seed in distinct(runs, "seed")]
    return [
        len(leads_of(same, detectors, name)) / len(broken) - number_called(quiet, detectors, name) / len(quiet)
        for same in each if (broken := collapsed(same)) and (quiet := still_calm(same))
    ]  # fmt: skip


def p_value(differences: list[float]) -> float:
    """Return the one-sided p-value of a mean above 0: every sign of every seed's difference is equally likely."""
    if len(differences) < 2 or not np.any(differences):
        return 1.0
    test: Any = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", alternative="greater", n_resamples=ALL_SIGNS
    )
    return float(test.pvalue)


def holm(p_values: list[float]) -> list[float]:
    """Return p-values adjusted by Holm: the k-th smallest of m times m − k + 1, and none below a smaller one's."""
    order = np.argsort(p_values, kind="stable")
    raised = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1))
    return np.minimum(raised, 1.0)[np.argsort(order)].tolist()
