"""The budget planner's picture: how efficient the same rollouts are in groups of each size."""

import pandas as pd
import plotly.graph_objects as go

from otb_analysis.diagnostics.planner import Cell, Planner
from otb_analysis.figures.gradient_table import labels, trace_style
from otb_analysis.figures.theme import TEMPLATE


def planner_words(planner: Planner) -> str:
    """Return what the picture shows, in one line."""
    return (
        f"Efficiency of {planner.n_rollouts} rollouts in groups of N. Star: shown to be a curve's best. "
        "Open: by formula."
    )


def plot_planner(planner: Planner) -> go.Figure:
    """Draw efficiency against group size, one curve per estimator; open marks follow by formula, stars are best."""
    figure = go.Figure(layout=go.Layout(template=TEMPLATE, height=360))
    curves: dict[tuple[str, str], list[Cell]] = {}
    for cell in planner.cells:
        curves.setdefault((cell.estimator, cell.energy_source), []).append(cell)
    names = labels(curves)
    for label, curve in curves.items():
        style = trace_style(*label)
        symbol = style.symbol.removesuffix("-open")
        figure.add_scatter(
            x=[cell.size for cell in curve],
            y=[cell.efficiency for cell in curve],
            name=names[label],
            mode="lines+markers",
            line={"color": style.color, "dash": style.dash, "width": 1.6},
            marker={
                "symbol": [("star" if cell.best else symbol) + ("" if cell.cut else "-open") for cell in curve],
                "size": [14 if cell.best else 8 for cell in curve],
            },
            hovertemplate="groups of %{x}: <b>%{y:.3g}</b><extra>" + names[label] + "</extra>",
        )
    sizes = sorted({cell.size for cell in planner.cells})
    figure.update_xaxes(title="group size N", type="log", tickvals=sizes, ticktext=[str(size) for size in sizes])
    figure.update_yaxes(title="efficiency", rangemode="tozero")
    return figure


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
            "cost": None if cell.cost is None else cell.cost.estimate,
            "cost_low": None if cell.cost is None else cell.cost.low,
            "cost_high": None if cell.cost is None else cell.cost.high,
        }
        for cell in planner.cells
    )
