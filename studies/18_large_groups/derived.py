"""What the page of Large groups shows: noise by the size of the group, at hard and at easy prompts."""

from collections.abc import Mapping
from itertools import product

import numpy as np

from otb_analysis.figures.svg import Curve, Panel, svg
from studies.lib import Rows, distinct, select
from studies.lib.formats import interval_curve, looks_of

ASKED = {"fall": "N · tr Cov over that of N = 4", "sf_over": "tr Cov/‖E ĝ‖² over that of rloo"}


def figures(tables: Mapping[str, Rows]) -> dict[str, str]:
    """Return one figure: how variance falls beside 1/N, and variance at equal progress beside that of `rloo`."""
    rows, panels = tables["many_groups"], list[Panel]()
    for (name, note), kind in product(ASKED.items(), distinct(rows, "kind")):
        curves = list[Curve]()
        for estimator in distinct(rows, "estimator"):
            points = {float(np.log2(row["size"])): row for row in select(rows, kind=kind, estimator=estimator)}
            curves.append(interval_curve(points, name, estimator, **looks_of(estimator)))
        panels.append(Panel(f"{kind} prompts", note, "log₂ of the group size N", curves, [(1.0, "")]))
    return {"noise.svg": svg(panels, columns=2)}
