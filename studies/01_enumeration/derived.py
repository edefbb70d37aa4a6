"""What the page of the enumerated facts needs beyond its tables: each claim checked case by case, and its figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from otb_analysis.figures.styles import GREY, estimator_style
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval, seed_mean
from otb_analysis.types import Float
from studies.lib import Rows, column, distinct, select
from studies.lib.enumeration.catalogue import spread
from studies.lib.enumeration.facts import COMPARED, GROUPS, LARGE, SETTINGS, SMALL
from studies.lib.enumeration.off_policy import CASES
from studies.lib.formats import above, below

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

IDENTITIES = (
    *("overlap", "regret_error", "split_error", "between_rloo_error", "token_optimal", "first_token_error"),
    *("self_inclusion_error", "mean_length_error", "mean_sideways", "loo_bias", "prefix_best"),
    *(*KNOWN_RATIOS, "regret_error_off_policy"),
)
"""Claims that are proved; the others are tendencies."""

Columns = Mapping[str, pd.DataFrame]
"""Rows of the tables, and of parts of them."""
Cases = Any
"""True or false for every case, a sequence or a column."""
Derailed = Callable[..., Any]
"""(group size, estimator, measure) → that measure on each chunk of sampled groups, at each rate of mistakes."""


@dataclass(frozen=True)
class Claim:
    """One checkable sentence: the fact that it is part of, on which cases it holds, and whether it is an identity.

    An identity is proved, so a case where it fails is an error of ours. A tendency holds as often as it does.
    """

    fact: int
    cases: Cases
    identity: bool = False

    @property
    def holds(self) -> int:
        """On how many cases it does."""
        return int(np.sum(self.cases))

    @property
    def everywhere(self) -> bool:
        """True where it holds on every case."""
        return self.holds == len(self.cases)

    @property
    def often(self) -> str:
        """`all 60`, `none of 60`, or the share of cases with its exact (Clopper–Pearson) 95 % interval."""
        count = len(self.cases)
        some = f"{self.holds if count < FEW else self.share} of {count}"
        return {0: f"none of {count}", count: f"all {count}"}.get(self.holds, some)

    @property
    def share(self) -> str:
        """The share of cases on which it holds, with its interval."""
        ends = stats.binomtest(self.holds, len(self.cases)).proportion_ci(method="exact")
        return f"{100 * self.holds / len(self.cases):.0f} % ({100 * ends.low:.0f}–{100 * ends.high:.0f})"


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return every claim, the columns that it was checked on, and groups on the derailment process."""
    of = {name: pd.DataFrame(rows) for name, rows in tables.items() if name not in ("cost", "derailment")}
    population = tables["population"]
    for kind in ("tabular", "shared", *SETTINGS):
        of[kind] = pd.DataFrame([row for row in population if row["setting"].startswith(kind)])
    for name in GROUPS:
        of[name] = pd.DataFrame(select(tables["groups"], setting=name))
        of[f"{name}, corr"] = of[name].dropna(subset=["corr"])
    rates = distinct(tables["derailment"], "mistakes")

    def chunks(n: int, estimator: str, measure: str) -> list[Float]:
        rows = select(tables["derailment_groups"], n=n, estimator=estimator)
        return [np.array(column(select(rows, mistakes=rate), measure)) for rate in rates]

    derailed = derailment(tables["derailment"], rates, chunks)
    # The median of the gap closed of each estimator and setting, and whether it is in the range first found
    quoted = [
        (name, setting, middle := float(np.median(of[setting][name])), low - 0.005 <= middle <= high + 0.005)
        for name, (only, low, high) in QUOTED_GAPS.items() for setting in SETTINGS if only in setting
    ]  # fmt: skip
    claims = all_claims(of, derailed, [inside for *_, inside in quoted])
    identities, tendencies = ([c for c in claims.values() if c.identity == which] for which in (True, False))
    known = {name: of[f"{name}, corr"] for name in GROUPS}
    return {
        "claims": claims, "identities": identities,
        "tendencies": tendencies, "always": [claim for claim in tendencies if claim.everywhere],
        "never": [claim for claim in tendencies if not claim.holds], "of": of, "derailed": derailed,
        "outside": [case for case in quoted if not case[-1]], "spread": spread, "estimators": COMPARED,
        "rank": {name: stats.spearmanr(own["corr"], own["v otb_loo"])[0] for name, own in known.items()},
        "sampled_mean": lambda at, n, name, measure: seed_mean(chunks(n, name, measure)[at], measure),
        "largest": lambda values: abs(values).max(),
        "other_ratios": [name for name in CASES if name not in KNOWN_RATIOS],
    }  # fmt: skip


def all_claims(of: Columns, derailed: Mapping[str, Any], quoted: Sequence[bool]) -> dict[str, Claim]:
    """Return the claims by their names in the template; on the derailment process each rate of mistakes is a case."""
    tabular, shared, groups, sizes = of["tabular"], of["shared"], of["groups"], of["sizes"]
    value, prefix = of["population"]["value"], of["population"]["prefix"]
    least, most = WITHIN
    corr = {name: of[f"{name}, corr"] for name in GROUPS}
    cases: dict[int, dict[str, Cases]] = {
        1: {**_zero(of["population"], "overlap", "regret_error"), **_zero(of["prompts"], "split_error",
            "between_rloo_error"), "between_any": abs(of["prompts"]["between_otb"] - 1) < ROUNDING},
        2: {**_zero(tabular, "first_token_error"),
            "token_optimal": abs(tabular["token_optimal exact"] - 1) < ROUNDING,
            "otb_is_not": tabular["otb exact"] < 1 - ROUNDING,
            "token_optimal_ahead": shared["token_optimal exact"] >= shared["otb exact"], "quoted": quoted,
            **{f"no_worse {setting}": of[setting]["otb exact"] >= 0 for setting in SETTINGS}},
        3: {**_zero(groups, "self_inclusion_error", "mean_length_error", "mean_sideways"),
            "otb_sideways": groups["otb_sideways"] > ROUNDING,
            "reversed": (groups["v otb"] < 1) & (groups["sf otb"] > 1),
            "fooled": (groups["v otb"] < 1) & (groups["e1000 otb"] < 1),
            "beats_optimum": groups["nsf sequence_optimal"] < 1,
            "beats_optimum derailment": [below(x, 1) for x in derailed["beats_optimum"]]},
        4: {**_zero(groups, "loo_bias"), "zero_tail": of["ragged"]["zero_tail_bias"] > ROUNDING,
            "otb_loo derailment": [below(x, 1) for x in derailed["otb_loo"]],
            "sequence_optimal_loo derailment": [below(x, 1) for x in derailed["sequence_optimal_loo"]],
            "mean_worse": [x > 1 for x in derailed["mean_worse"]],
            **{f"rloo_ahead {name}": of[name]["v otb_loo"] > 1 for name in GROUPS},
            **{f"corr_decides {k}": (rows["corr"] < 0) == (rows["v otb_loo"] < 1) for k, rows in corr.items()}},
        5: {"value_above": value > prefix * (1 + ROUNDING), "value_constant": value > 1,
            "prefix_best": prefix <= np.minimum(1, value) * (1 + ROUNDING),
            "value derailment": [x > 1 for x in derailed["value"]]},
        6: {**_zero(of["population"], "regret_error_off_policy"), **_zero(of["ratios"], *KNOWN_RATIOS),
            **{name: of["ratios"][name] > ROUNDING for name in CASES if name not in KNOWN_RATIOS}},
        7: {"sizes_raw": (least < sizes["variance"]) & (sizes["variance"] < most), "sizes_sf": sizes["sf"] > 1,
            "sizes_efficiency": sizes["efficiency"] < 1,
            "sizes_raw derailment": [least < x.estimate < most for x in derailed["sizes_raw"]],
            "sizes_sf derailment": [above(x, 1) for x in derailed["sizes_sf"]]},
    }  # fmt: skip
    return {
        name: Claim(fact, held, name in IDENTITIES) for fact, claims in cases.items() for name, held in claims.items()
    }


def _zero(rows: pd.DataFrame, *names: str) -> dict[str, Cases]:
    """Where columns are 0 to rounding: identities."""
    return {name: abs(rows[name]) < ROUNDING for name in names}


def derailment(exact: Rows, rates: Sequence[float], chunks: Derailed) -> dict[str, Any]:
    """Return ratios on the derailment process at each rate of mistakes, and its facts there."""
    at = [{row["baseline"]: row["variance"] for row in select(exact, mistakes=rate)} for rate in rates]
    rloo = chunks(SMALL, "rloo", "nv")
    over_rloo = {
        name: [seed_mean(x / y, "variance over rloo") for x, y in zip(chunks(SMALL, name, "nv"), rloo, strict=True)]
        for name in ("otb_loo", "sequence_optimal_loo")
    }
    return over_rloo | {
        "facts": [select(exact, mistakes=rate)[0] for rate in rates], "value": [one["value"] for one in at],
        "beats_optimum": [seed_mean(x, "N·SF") for x in chunks(SMALL, "sequence_optimal", "nsf")],
        "mean_worse": [one["group_mean"] / one["none"] for one in at],
        "sizes_raw": size_ratios(chunks, "nv"), "sizes_sf": size_ratios(chunks, "nsf"),
    }  # fmt: skip


def size_ratios(chunks: Derailed, measure: str) -> list[Interval]:
    """Return V or SF of one group of `otb`, N = 4, over one of the mean, N = 32, intervals from both sets of chunks."""
    ratios = []
    for few, many in zip(chunks(SMALL, "otb", measure), chunks(LARGE, "group_mean", measure), strict=True):
        ratio, count = (few.mean() / SMALL) / (many.mean() / LARGE), min(len(few), len(many))
        errors = [x.std(ddof=1) / len(x) ** 0.5 / x.mean() for x in (few, many)]
        half = stats.t.ppf(0.975, count - 1) * np.hypot(*errors)
        middle, low, high = (float(ratio * np.exp(x)) for x in (0.0, -half, half))
        ratios.append(Interval(middle, low, high, count, "ratio of groups"))
    return ratios


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the variance of `otb_loo` over `rloo`, and the two ratios of fact 7, against corr(W_T, R)."""
    ragged, equal = (select(tables["groups"], setting=name) for name in ("ragged", "equal"))
    loo, rloo, sizes = estimator_style("otb_loo").color, estimator_style("rloo").color, tables["sizes"]

    def points(rows: Rows, name: str, words: str, color: str) -> Curve:
        known = [row for row in rows if row["corr"] is not None]
        return Curve(column(known, "corr"), column(known, name), words, width=0, color=color)

    ratios = [points(ragged, "v otb_loo", "otb_loo, ragged", loo), points(equal, "v otb_loo", "otb_loo, equal", GREY)]
    few_many = [points(sizes, "variance", "raw variance", GREY), points(sizes, "sf", "SF", rloo)]
    across, one = "corr(W_T, R)", ((1.0, "equal"),)
    panels = [
        Panel("otb_loo over rloo, N = 4", "variance, one point a policy", across, ratios, one),
        Panel("otb at N = 4 over the mean at N = 32", "one point a policy", across, few_many, one),
    ]
    return {"corr.svg": svg(panels)}
