"""The budget planner's picture: how efficient the same rollouts are in groups of each size."""

import pandas as pd
import plotly.graph_objects as go

from otb_analysis.diagnostics.planner import Cell, Planner
from otb_analysis.figures.gradient_table import labels, trace_style
from otb_analysis.figures.intervals import columns_of, ends_of, error_bars
from otb_analysis.figures.numbers import formatted, interval_cell
from otb_analysis.figures.theme import TEMPLATE
from otb_analysis.statistics import Interval


def by_cost(planner: Planner) -> bool:
    """Tell whether costs are drawn, since no efficiency by itself is told from noise."""
    return all(cell.efficiency is None for cell in planner.cells)


def planner_words(planner: Planner) -> str:
    """Return what the picture shows, in one line."""
    what, over = f"the same {planner.n_rollouts} rollouts", f"in groups of {planner.recorded_size}"
    costs = (
        f"What {what} would cost in groups of other sizes, beside what they cost {over}: below 1 is better. Bars hold "
        "together with 95 %. No efficiency by itself is known."
    )
    words = costs if by_cost(planner) else f"How efficient {what} would be in groups of other sizes."
    return f"{words} Star: shown to be a curve's best. Open: by formula."


def plot_planner(planner: Planner) -> go.Figure:
    """Draw efficiency against group size, one curve per estimator; open marks follow by formula, stars are best.

    Where no efficiency may be shown it draws cost against the recorded size with its interval, as far as that is told.
    """
    figure, costs = go.Figure(layout=go.Layout(template=TEMPLATE, height=360)), by_cost(planner)
    curves: dict[tuple[str, str], list[Cell]] = {}
    told = {(cell.estimator, cell.energy_source) for cell in planner.cells if not costs or cell.cost is not None}
    for cell in planner.cells:
        if (label := (cell.estimator, cell.energy_source)) in told:
            curves.setdefault(label, []).append(cell)
    names, one = labels(curves), Interval(1.0, 1.0, 1.0, 0, "over itself")
    for label, curve in curves.items():
        style, symbol = trace_style(*label), trace_style(*label).symbol.removesuffix("-open")
        bars = [one if cell.size == planner.recorded_size else cell.cost for cell in curve]
        figure.add_scatter(
            x=[cell.size for cell in curve],
            y=ends_of(bars)[0] if costs else [cell.efficiency for cell in curve],
            error_y=error_bars(*ends_of(bars), width=2, visible=costs),
            name=names[label], mode="lines+markers", showlegend=True,
            line={"color": style.color, "dash": style.dash, "width": 1.6},
            marker={
                "symbol": [("star" if cell.best else symbol) + ("" if cell.cut else "-open") for cell in curve],
                "size": [14 if cell.best else 8 for cell in curve],
            },
            hovertemplate="groups of %{x}: <b>%{y:.3g}</b><extra>" + names[label] + "</extra>",
        )  # fmt: skip
    sizes = sorted({cell.size for cell in planner.cells})
    figure.update_xaxes(title="group size N", type="log", tickvals=sizes, ticktext=[str(size) for size in sizes])
    title = f"cost, groups of {planner.recorded_size} = 1" if costs else "efficiency"
    return figure.update_yaxes(title=title, rangemode="tozero")


def planner_table(planner: Planner) -> pd.DataFrame:
    """Return one row per estimator and size: efficiency, and cost against the recorded size with its interval."""
    return pd.DataFrame(
        {
            "estimator": cell.estimator,
            "energy_source": cell.energy_source,
            "group_size": cell.size,
            "efficiency": cell.efficiency,
            "by_formula": not cell.cut,
            "shown_best": cell.best,
            **columns_of("cost", cell.cost),
        }
        for cell in planner.cells
    )


def sizes_display(planner: Planner) -> pd.DataFrame:
    """Return efficiency and cost as they are read, by estimator and size; * best of its curve, † by formula."""
    table = pd.DataFrame(
        {
            "estimator": cell.estimator + ("" if cell.energy_source == "none" else f"/{cell.energy_source}"),
            "group size": f"{cell.size}{_marks(cell)}",
            "efficiency": formatted(cell.efficiency, ".2f"),
            "cost": "1" if cell.size == planner.recorded_size else interval_cell(cell.cost, ".2f"),
        }
        for cell in planner.cells
        if cell.efficiency is not None or cell.cost is not None
    )
    return table.drop(columns="efficiency") if len(table) and by_cost(planner) else table


def _marks(cell: Cell) -> str:
    return ("*" if cell.best else "") + ("" if cell.cut else "†")


def dead_display(planner: Planner) -> pd.DataFrame:
    """Return what success rates say of groups of each size, as it is read."""
    return pd.DataFrame(
        {
            "group size": str(row.size),
            "dead": interval_cell(row.share, ".1%"),
            "informative": interval_cell(row.informative, ".1f"),
            "groups": str(row.n_groups),
        }
        for row in planner.dead
    )
