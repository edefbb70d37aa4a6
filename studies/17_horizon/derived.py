"""What the page of The horizon needs beyond its tables: one row a policy, growth with length, and its figure."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.statistics import Interval
from studies.lib import Row, Rows, distinct, select
from studies.lib.formats import Measured, below, ends, interval_curve
from studies.lib.long_answers import COMPARED as COMPARED
from studies.lib.long_answers import TOLERANCE as TOLERANCE
from studies.lib.seeds import later_success, paired_difference, steps_survived

from .study import LINES, TRAINED_LENGTH

COLORS = {
    "qwen3": BLUE, "gpt2": ORANGE, "branching": GREEN, "turns1": GREY, "turns3": AMBER, "turns10": PINK,
}  # fmt: skip


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return a row for each measured policy with what the page shows of it, and how variance grows, by policy."""
    rows = [shown(tables, one) for one in tables["rollouts"]]
    names = distinct(rows, "policy")
    growths = {name: growth(select(rows, policy=name)) for name in names}
    kinds = [select(rows, policy=name) for name in names if len(select(rows, policy=name)) > 1]
    # Each policy that has more than one length: its row of the shortest answers, and of those that were trained on
    trend = [(own[0], one) for own in kinds for one in select(own, length=TRAINED_LENGTH)]
    minutes = [
        sum(row["processor_minutes"] for row in tables["cost"] if part in f"{row['cell']}-")
        for part in ("learn-", "last-", f"-qwen3-{max(LINES)}-")
    ]
    # The policies in whose longer answers `otb` is shown to leave less at equal progress
    less = [b["policy"] for a, b in trend if below(b["otb"], a["otb"]["sf_ratio_low"] or 0.0, "sf_ratio")]
    out = {"shown": rows, "growth": growths, "gains": gains(tables), "minutes": minutes}
    return out | {"trend": trend, "fallen": less}


def gains(tables: Mapping[str, Rows]) -> dict[str, dict[str, Interval | None]]:
    """Return each arm's paired difference from `rloo` over the seeds that both have: of success, of steps survived."""
    learned, lasted = tables.get("learning", []), tables.get("lasting", [])
    success = {arm: later_success(select(learned, arm=arm)) for arm in distinct(learned, "arm")}
    steps = {arm: steps_survived(select(lasted, arm=arm)) for arm in distinct(lasted, "arm")}
    out = dict[str, dict[str, Interval | None]]()
    for kind, by_arm, words in (("learning", success, "held-out success"), ("lasting", steps, "steps survived")):
        base = by_arm.pop("rloo", {})
        out[kind] = {arm: paired_difference(seeds, base, words) for arm, seeds in by_arm.items()}
    return out


def shown(tables: Mapping[str, Rows], facts: Row) -> dict[str, Any]:
    """Return what is known of one policy: its rollouts, norms, and estimators by name and group size."""
    key = {"policy": facts["policy"], "length": facts["length"]}
    rows = {(row["estimator"], row["size"]): row for row in select(tables["estimators"], **key)}
    norms = select(tables["norms"], **key)
    sizes = distinct(select(tables["estimators"], **key), "size")
    (signal,) = select(tables["signal"], **key, size=sizes[-1])
    known = {"noise": signal, "by": rows, "sizes": sizes, "norms": norms[0] if norms else None}
    return {**facts, **known, "otb": rows["otb_turn", sizes[-1]], "most": rows["rloo", sizes[-1]]}


def growth(rows: Rows) -> Interval | None:
    """Return a in V ∝ Tᵃ from the shortest to the longest answers of a policy, V the variance of `rloo`.

    The two policies are independent, so the squares of the standard errors of log V add up.
    """
    if len(rows) < 2:
        return None
    first, last = min(rows, key=lambda row: row["tokens"]), max(rows, key=lambda row: row["tokens"])
    across = math.log(last["tokens"] / first["tokens"])
    (v0, low0, high0), (v1, low1, high1) = (ends(row["most"], "variance") for row in (first, last))
    if v0 is None or v1 is None:
        return None
    a, words = math.log(v1 / v0) / across, "exponent of the growth of the variance"
    if None in (low0, high0, low1, high1):
        return Interval(a, None, None, 2, words)
    half = math.hypot(*(np.log(np.array([high0, high1]) / np.array([low0, low1])) / 2)) / across
    return Interval(a, a - half, a + half, 2, words)


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw by length the variance of `rloo`, what `otb` and `energy_regression` leave of it, and the proxy's ranks."""
    rows = numbers(tables)["shown"]

    def curves(value: Callable[[Row], Measured], name: str) -> list[Curve]:
        """One curve for each policy over the lengths, points where there is one length."""
        by_length, out = sorted(rows, key=lambda row: row["tokens"]), list[Curve]()
        for policy in distinct(rows, "policy"):
            points = {math.log2(row["tokens"]): value(row) for row in select(by_length, policy=policy)}
            out.append(interval_curve(points, name, policy, COLORS[policy], width=2.0 if len(points) > 1 else 0.0))
        return out

    def logarithms(row: Row) -> dict[str, float | None]:
        names = ("variance", "variance_low", "variance_high")
        return {name: row["most"][name] and math.log10(row["most"][name]) for name in names}

    regressed = curves(lambda row: row["by"]["energy_regression", row["sizes"][-1]], "variance_ratio")
    ranks = curves(lambda row: row["norms"], "spearman_within")
    across, ratio, one = "log₂ of tokens", "variance over rloo's", ((1.0, "rloo"),)
    panels = [
        Panel("Variance of rloo", "log₁₀, of an update", across, curves(logarithms, "variance")),
        Panel("otb at equal progress", ratio, across, curves(lambda row: row["otb"], "sf_ratio"), one),
        Panel("energy_regression", ratio, across, regressed, one),
        Panel("Proxy against exact norms", "rank correlation within (prompt, position)", across, ranks),
    ]
    return {"horizon.svg": svg(panels)}
