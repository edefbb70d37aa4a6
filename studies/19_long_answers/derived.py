"""What the page of long answers needs beyond its tables: one record a task."""

from collections.abc import Mapping
from typing import Any

from otb_analysis.figures.styles import BLUE, GREEN, ORANGE
from otb_analysis.figures.svg import Curve, Panel, svg
from studies.lib import Rows, select
from studies.lib.formats import side_by_side

DRAWN = {
    "otb_turn": "otb", "otb_turn_loo": "otb_loo", "energy_across_loo": "across", "energy_regression": "regression",
    "none": "none",
}  # fmt: skip
"""What is drawn, and its short name below the axis."""
COLORS = {"letters": BLUE, "sums": ORANGE, "sums-gemma": GREEN}


def numbers(tables: Mapping[str, Rows]) -> dict[str, Any]:
    """Return what is known of each measured task: its rollouts, norms, noise, and estimators by name."""
    shown = list[dict[str, Any]]()
    for facts in tables["rollouts"]:
        key = {"task": facts["task"]}
        (norms,), signal = select(tables["norms"], **key), select(tables["signal"], **key)
        by = {row["estimator"]: row for row in select(tables["estimators"], **key, size=signal[-1]["size"])}
        title = facts["task"].replace("-gemma", ", Gemma")
        shown.append(dict(facts) | {"title": title, "norms": norms, "noise": signal[-1], "by": by})
    return {"shown": shown}


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Draw variance over that of `rloo`, as it is and at equal progress, of a few baselines."""
    rows = numbers(tables)["shown"]

    def curves(ratio: str) -> list[Curve]:
        return [
            side_by_side([row["by"][name] for name in DRAWN], place, ratio, row["title"], COLORS[row["task"]])
            for place, row in enumerate(rows)
        ]

    across = ", ".join(f"{k} {name}" for k, name in enumerate(DRAWN.values(), 1))
    titles = {"variance_ratio": "Variance over rloo's", "sf_ratio": "At equal progress"}
    panels = [Panel(title, "ratio", across, curves(ratio), ((1.0, "rloo"),)) for ratio, title in titles.items()]
    return {"ratios.svg": svg(panels)}
