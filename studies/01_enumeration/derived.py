"""What the page of the enumerated facts needs beyond its tables: each claim checked case by case, and its figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from otb_analysis.enumeration.catalogue import spread
from otb_analysis.enumeration.facts import COMPARED, LARGE, SETTINGS, SMALL
from otb_analysis.enumeration.off_policy import CASES
from otb_analysis.figures.styles import GREY, estimator_style
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.study import Rows, distinct, select
from otb_analysis.study.formats import above, below
from otb_analysis.types import Float

ROUNDING = 1e-9
"""Identities hold to rounding: below this."""
FEW = 10
"""Below this many cases a share is written as a count, without an interval."""
QUOTED_GAPS = {
    "classic_optimal exact": ("terminal", 0.24, 0.54),
    "otb exact": ("", 0.52, 0.92),
    "otb proxy": ("", 0.28, 0.92),
    "token_optimal exact": ("", 0.85, 1.0),
    "token_optimal proxy": ("", 0.68, 1.0),
}
"""Share of the gap closed, ranges of medians as first found on other draws: settings, lowest, highest."""
WITHIN = (3 / 4, 4 / 3)
"""A ratio is within a third where neither is more than 4/3 of the other."""
KNOWN_RATIOS = ("`token`", "`sequence`", "`cumulative`", "`minpro`")

Columns = Mapping[str, Float]
Derailed = Callable[..., Any]
"""(group size, estimator, measure) → that measure on each chunk of sampled groups, at each rate of mistakes."""


@dataclass(frozen=True)
class Claim:
    """One checkable sentence: the fact that it is part of, and on which cases it holds."""

    fact: int
    cases: Sequence[bool] | np.ndarray

    @property
    def holds(self) -> int:
        """On how many cases it does."""
        return int(np.sum(self.cases))

    @property
    def everywhere(self) -> bool:
        """True where it holds on every case."""
        return self.holds == len(self.cases)

    @property
    def verdict(self) -> str:
        """`holds`, `does not`, or the share of cases with its exact (Clopper–Pearson) 95 % interval."""
        count = len(self.cases)
        if self.holds in (0, count):
            return "holds" if self.holds else "does not"
        return f"on {self.holds} of {count}" if count < FEW else f"on {self.share} of {count}"

    @property
    def share(self) -> str:
        """The share of cases on which it holds, with its interval."""
        ends = stats.binomtest(self.holds, len(self.cases)).proportion_ci(method="exact")
        return f"{100 * self.holds / len(self.cases):.0f} % ({100 * ends.low:.0f}–{100 * ends.high:.0f})"


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return every claim, the columns that it was checked on, and groups on the derailment process."""
    population, groups = tables["population"], tables["groups"]
    of = {name: columns(rows) for name, rows in tables.items() if name not in ("cost", "derailment")}
    for kind in ("tabular", "shared"):
        of[kind] = columns([row for row in population if row["setting"].startswith(kind)])
    of |= {setting: columns(select(population, setting=setting)) for setting in SETTINGS}
    of |= {name: columns(select(groups, setting=name)) for name in ("ragged", "equal")}
    of |= {f"{name}, corr": with_corr(of[name]) for name in ("ragged", "equal")}
    rates = distinct(tables["derailment"], "mistakes")

    def chunks(n: int, estimator: str, measure: str) -> list[Float]:
        rows = select(tables["derailment_groups"], n=n, estimator=estimator)
        return [columns(select(rows, mistakes=rate))[measure] for rate in rates]

    derailed = derailment(tables["derailment"], rates, chunks)
    quoted = quoted_gaps(of)
    claims = identities(of) | about_groups(of) | about_values(of) | about_derailment(derailed)
    claims["quoted"] = Claim(2, [inside for _, _, _, inside in quoted])
    held = {fact: [c.everywhere for c in claims.values() if c.fact == fact] for fact in range(1, 8)}
    return {
        "claims": claims,
        "held": held,
        "whole_facts": [fact for fact, every in held.items() if all(every)],
        "partly": {fact: any(c.holds for c in claims.values() if c.fact == fact) for fact in range(1, 8)},
        "of": of,
        "outside": [case for case in quoted if not case[-1]],
        "rank": {name: stats.spearmanr(of[f"{name}, corr"]["corr"], of[f"{name}, corr"]["v otb_loo"])[0]
                 for name in ("ragged", "equal")},
        "derailed": derailed,
        "sampled_mean": lambda at, n, name, measure: seed_mean(chunks(n, name, measure)[at], measure),
        "spread": spread,
        "largest": lambda values: abs(values).max(),
        "other_ratios": [name for name in CASES if name not in KNOWN_RATIOS],
        "estimators": COMPARED,
    }  # fmt: skip


def columns(rows: Rows) -> dict[str, Any]:
    """Return the columns of rows as arrays; missing numbers are NaN."""
    return {
        name: np.array([row[name] for row in rows], dtype=None if isinstance(rows[0][name], str) else float)
        for name in rows[0]
    }


def with_corr(of: Columns) -> dict[str, Float]:
    """Return the policies whose energies and rewards both vary."""
    known = np.isfinite(of["corr"])
    return {name: values[known] for name, values in of.items()}


def identities(of: Mapping[str, Columns]) -> dict[str, Claim]:
    """Return the claims that a number is 0 to rounding, by the column that holds it."""
    where = {
        "population": {"overlap": 1, "regret_error": 1, "regret_error_off_policy": 6},
        "prompts": {"split_error": 1, "between_rloo_error": 1},
        "tabular": {"first_token_error": 2},
        "groups": {"self_inclusion_error": 3, "mean_length_error": 3, "mean_sideways": 3, "loo_bias": 4},
        "ratios": dict.fromkeys(KNOWN_RATIOS, 6),
    }
    return {
        name: Claim(fact, abs(of[table][name]) < ROUNDING) for table, own in where.items() for name, fact in own.items()
    }


def about_groups(of: Mapping[str, Columns]) -> dict[str, Claim]:
    """Return the claims about baselines from groups, of random policies."""
    tabular, shared, groups, sizes = of["tabular"], of["shared"], of["groups"], of["sizes"]
    least, most = WITHIN
    claims = {
        "between_any": Claim(1, abs(of["prompts"]["between_otb"] - 1) < ROUNDING),
        "token_optimal": Claim(2, abs(tabular["token_optimal exact"] - 1) < ROUNDING),
        "otb_is_not": Claim(2, tabular["otb exact"] < 1 - ROUNDING),
        "token_optimal_ahead": Claim(2, shared["token_optimal exact"] >= shared["otb exact"]),
        "otb_sideways": Claim(3, groups["otb_sideways"] > ROUNDING),
        "reversed": Claim(3, (groups["v otb"] < 1) & (groups["sf otb"] > 1)),
        "fooled": Claim(3, (groups["v otb"] < 1) & (groups["e1000 otb"] < 1)),
        "beats_optimum": Claim(3, groups["nsf sequence_optimal"] < 1),
        "zero_tail": Claim(4, of["ragged"]["zero_tail_bias"] > ROUNDING),
        "sizes_raw": Claim(7, (least < sizes["variance"]) & (sizes["variance"] < most)),
        "sizes_sf": Claim(7, sizes["sf"] > 1),
        "sizes_efficiency": Claim(7, sizes["efficiency"] < 1),
    }
    for name in ("ragged", "equal"):
        known = of[f"{name}, corr"]
        claims[f"rloo_ahead {name}"] = Claim(4, of[name]["v otb_loo"] > 1)
        claims[f"corr_decides {name}"] = Claim(4, (known["corr"] < 0) == (known["v otb_loo"] < 1))
    claims |= {f"no_worse {setting}": Claim(2, of[setting]["otb exact"] >= 0) for setting in SETTINGS}
    moved = {name: of["ratios"][name] > ROUNDING for name in CASES if name not in KNOWN_RATIOS}
    return claims | {name: Claim(6, cases) for name, cases in moved.items()}


def about_values(of: Mapping[str, Columns]) -> dict[str, Claim]:
    """Return the claims about values as baselines, of random policies."""
    value, prefix = of["population"]["value"], of["population"]["prefix"]
    return {
        "value_above": Claim(5, value > prefix * (1 + ROUNDING)),
        "prefix_best": Claim(5, prefix <= np.minimum(1, value) * (1 + ROUNDING)),
        "value_constant": Claim(5, value > 1),
    }


def quoted_gaps(of: Mapping[str, Columns]) -> list[tuple[str, str, float, bool]]:
    """Return the median of the gap closed of each estimator and setting, and whether it is in the range first found."""
    return [
        (name, setting, middle, low - 0.005 <= middle <= high + 0.005)
        for name, (only, low, high) in QUOTED_GAPS.items()
        for setting in SETTINGS
        if only in setting
        for middle in [float(np.median(of[setting][name]))]
    ]


def derailment(exact: Rows, rates: Sequence[float], chunks: Derailed) -> dict[str, Any]:
    """Return ratios on the derailment process at each rate of mistakes, and its facts there."""
    at = [{row["baseline"]: row["variance"] for row in select(exact, mistakes=rate)} for rate in rates]
    rloo = chunks(SMALL, "rloo", "nv")
    return {
        "facts": [select(exact, mistakes=rate)[0] for rate in rates],
        "beats_optimum": [seed_mean(x, "N·SF") for x in chunks(SMALL, "sequence_optimal", "nsf")],
        "mean_worse": [one["group_mean"] / one["none"] for one in at],
        "value": [one["value"] for one in at],
        "sizes_raw": size_ratios(chunks, "nv"),
        "sizes_sf": size_ratios(chunks, "nsf"),
    } | {
        name: [seed_mean(x / y, "variance over rloo") for x, y in zip(chunks(SMALL, name, "nv"), rloo, strict=True)]
        for name in ("otb_loo", "sequence_optimal_loo")
    }


def size_ratios(chunks: Derailed, measure: str) -> list[Interval]:
    """Return V or SF of one group of `otb`, N = 4, over one of the mean, N = 32, intervals from both sets of chunks."""
    ratios = []
    for few, many in zip(chunks(SMALL, "otb", measure), chunks(LARGE, "group_mean", measure), strict=True):
        small, large = few / SMALL, many / LARGE
        ratio, count = small.mean() / large.mean(), min(len(small), len(large))
        errors = [x.std(ddof=1) / len(x) ** 0.5 / x.mean() for x in (small, large)]
        half = stats.t.ppf(0.975, count - 1) * np.hypot(*errors)
        ends = ratio * np.exp(-half), ratio * np.exp(half)
        ratios.append(Interval(float(ratio), float(ends[0]), float(ends[1]), count, "ratio of groups", "Student"))
    return ratios


def about_derailment(derailed: Mapping[str, Any]) -> dict[str, Claim]:
    """Return the claims about the derailment process; each rate of mistakes is a case."""
    least, most = WITHIN
    return {
        "beats_optimum derailment": Claim(3, [below(x, 1) for x in derailed["beats_optimum"]]),
        "otb_loo derailment": Claim(4, [below(x, 1) for x in derailed["otb_loo"]]),
        "sequence_optimal_loo derailment": Claim(4, [below(x, 1) for x in derailed["sequence_optimal_loo"]]),
        "mean_worse": Claim(4, [x > 1 for x in derailed["mean_worse"]]),
        "value derailment": Claim(5, [x > 1 for x in derailed["value"]]),
        "sizes_raw derailment": Claim(7, [least < x.estimate < most for x in derailed["sizes_raw"]]),
        "sizes_sf derailment": Claim(7, [above(x, 1) for x in derailed["sizes_sf"]]),
    }


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the variance of `otb_loo` over `rloo`, and the two ratios of fact 7, against corr(W_T, R)."""
    groups = {name: columns(select(tables["groups"], setting=name)) for name in ("ragged", "equal")}
    colors = {"ragged": estimator_style("otb_loo").color, "equal": GREY}
    left = [_points(of, "v otb_loo", f"otb_loo, {name}", colors[name]) for name, of in groups.items()]
    sizes = columns(tables["sizes"])
    right = [
        _points(sizes, "variance", "raw variance", GREY),
        _points(sizes, "sf", "SF", estimator_style("rloo").color),
    ]
    panels = [
        Panel("otb_loo over rloo, N = 4", "variance, one point a policy", "corr(W_T, R)", left, ((1.0, "equal"),)),
        Panel("otb at N = 4 over the mean at N = 32", "one point a policy", "corr(W_T, R)", right, ((1.0, "equal"),)),
    ]
    return {"corr.svg": svg(panels)}


def _points(of: Columns, name: str, words: str, color: str) -> Curve:
    known = with_corr(of)
    return Curve(known["corr"].tolist(), known[name].tolist(), words, width=0, color=color)
