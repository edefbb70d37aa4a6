"""What the page of Proxy fidelity needs beyond its tables: rows pooled over temperatures, and its figure."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from otb_analysis.config import SampleConfig
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, ORANGE
from otb_analysis.figures.svg import Panel, svg
from studies.lib import Rows, distinct, select
from studies.lib.formats import above, below, hidden, interval_curves

from .study import MARGIN, SOURCES, UPDATES

STAGE_WORDS = {"init": "random init", "warm": "supervised start", "rl": "during RL"}
COLORS: dict[str, str] = dict(zip(SOURCES, (ORANGE, AMBER, GREEN, BLUE), strict=True))


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return the efficiency rows that the page shows, and which of them tell a source from exact norms."""
    pooled = [row for row in _pooled(tables["efficiency"]) if row["to_rloo"] is not None]
    otb, apart = select(pooled, update=UPDATES[1], estimator="otb"), _pooled(tables.get("disagreement", ()))
    tested = [row for row in otb if row["to_exact_low"] is not None]
    exact = select(otb, source="exact")
    exact = [r for r in exact if r["to_rloo_low"] and not hidden(r["to_rloo_low"], r["to_rloo_high"])]
    excluded = sorted(1 - row["to_exact_low"] for row in select(tested, source="proxy"))
    middle = float(np.median(excluded)) if excluded else None
    of_otb, of_loo = (select(apart, estimator=name, source="proxy") for name in ("otb", "otb_loo"))
    proxy = [row for row in of_otb if row["disagreement_high"] is not None]
    raw, loo = ([row for row in rows if row["variance_low"] is not None] for rows in (of_otb, of_loo))
    return {
        "LIMIT": SampleConfig().max_new_tokens, "gpt2": select(tested, source="proxy", model="gpt2-m"),
        "half": sum(share <= (middle or 0) for share in excluded), "raw_tested": raw,
        "raw_above": [row for row in raw if above(row, 1, "variance")], "apart": apart, "proxy_apart": proxy,
        "moved": [row for row in proxy if not hidden(row["disagreement_low"], row["disagreement_high"])],
        "proxy_within": [row for row in proxy if below(row, MARGIN, "disagreement")],
        "loo_apart": loo, "pooled": pooled, "tested": tested,
        "shown": [row for row in tested if not hidden(row["to_exact_low"], row["to_exact_high"])],
        "told_apart": [row for row in tested if above(row, 1, "to_exact") or below(row, 1, "to_exact")],
        "exact_over_rloo": exact,
        "exact_told": [row for row in exact if above(row, 1, "to_rloo") or below(row, 1, "to_rloo")],
        "excluded": excluded, "middle_excluded": middle,
    }  # fmt: skip


def _pooled(efficiency: Rows) -> Rows:
    """The rows pooled over temperatures, or at the only one there is."""
    whole = {(row["model"], row["stage"]) for row in efficiency if row["temperature"] is None}
    return [r for r in efficiency if r["temperature"] is None or (r["model"], r["stage"]) not in whole]


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw the correlation of log W_t within (prompt, t) at temperature 1 against Qwen3-type sizes, by stage."""
    size = {row["model"]: row["parameters"] / 1000 for row in tables["policies"]}
    panels, note = [], "correlation of log W_t with the exact one within (prompt, t)"
    for stage in distinct(tables["agreement"], "stage"):
        rows = select(tables["agreement"], of="W", stage=stage, temperature=1.0)
        qwen = sorted((r for r in rows if r["model"].startswith("qwen3")), key=lambda row: size[row["model"]])
        curves = interval_curves(qwen, "source", lambda row: size[row["model"]], "log_within", COLORS)
        panels.append(Panel(STAGE_WORDS[stage], note, "thousand parameters, Qwen3 type", curves))
    return {"within.svg": svg(panels, columns=3)}
