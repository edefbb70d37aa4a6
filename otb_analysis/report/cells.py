"""Values as a report writes them: cells, shares in per cent, curves for pages that run no script."""

import pandas as pd

from otb_analysis.figures import number
from otb_analysis.figures.curves import CurvesInfo
from otb_analysis.figures.styles import run_styles
from otb_analysis.figures.svg import Curve, Panel


def percent(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of holders with its shares in per cent."""
    shares = [name for name in ("share", "signal", "noise") if name in rows]
    return rows.assign(**{name: [f"{value:.2%}" for value in rows[name]] for name in shares})


def curve_panels(info: CurvesInfo) -> tuple[Panel, ...]:
    """Return small multiples in a form that needs no browser to draw; panels without a curve are left out."""
    styles = run_styles(info.estimators)
    return tuple(
        Panel(
            quantity.title,
            quantity.line,
            "step",
            [
                Curve(
                    [float(x) for x in one.step], [float(y) for y in one.smooth], one.run,
                    color=styles[one.run].color, dashed=styles[one.run].dash != "solid",
                )
                for one in curves
            ],
            y_range=(0.0, 1.0) if quantity.share else None,
        )
        for quantity, curves in zip(info.quantities, info.curves, strict=True)
        if curves
    )  # fmt: skip


def cell(value: object) -> str:
    """Return a table's cell as text: numbers with three digits, a dash where nothing is known."""
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and value != value):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value)
    item = getattr(value, "item", None)
    return cell(item()) if callable(item) else str(value)
