"""Signs of collapse: what moves before, while and after a run falls apart."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.curves import CurvesInfo, Quantity, curves_info, plot_curves
from otb_analysis.figures.theme import RULE, place

QUANTITIES = (
    Quantity("Reward", "mean of the step", "reward_mean"),
    Quantity("Gradient norm", "‖ḡ‖ before clipping", "grad_norm", from_zero=True),
    Quantity("Clipped steps", "share of the last 20", "clipped_share", from_zero=True, smoothed=False),
    Quantity("Entropy", "nats, mean over tokens", "entropy_mean", from_zero=True),
    Quantity("Length", "tokens, mean", "length_mean", from_zero=True),
    Quantity("Equal-reward groups", "share of groups", "zero_variance_share", from_zero=True),
    Quantity("Energy tail", "Pareto-k", "energy_tail_k"),
    Quantity("Top 1 % of tokens", "share of all energy", "energy_max_share", from_zero=True),
    Quantity("Sampler mismatch", "nats, largest", "mismatch_max", from_zero=True),
)
CLIP_WINDOW = 20
HEAVY_TAIL = 0.5


def derived(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps table with the two shares that the panels need.

    zero_variance_share = n_zero_variance_groups / n_prompts; clipped_share = mean of `clipped` over the last 20 steps,
    from the fifth on.

    Args:
        steps: Steps table of one run.
    """
    table = steps.sort_values("step")
    shares = {}
    if {"n_zero_variance_groups", "n_prompts"} <= set(table):
        shares["zero_variance_share"] = table["n_zero_variance_groups"].astype(float) / table["n_prompts"].astype(float)
    if "clipped" in table:
        clipped = table["clipped"].astype("Float64").astype(float)
        shares["clipped_share"] = clipped.rolling(CLIP_WINDOW, min_periods=5).mean()
    return table.assign(**shares)


def collapse_info(steps: Mapping[str, pd.DataFrame], estimators: Mapping[str, str], window: int = 1) -> CurvesInfo:
    """Collect the signs of collapse of some runs.

    Args:
        steps: Steps table of each run.
        estimators: Training estimator of each run.
        window: Length of the running mean in recorded steps.
    """
    return curves_info({run: derived(table) for run, table in steps.items()}, QUANTITIES, estimators, window)


def plot_collapse(info: CurvesInfo, *, log_y: bool = False) -> go.Figure:
    """Draw nine small multiples; the Pareto-k panel marks .5, above which a variance's standard error means little.

    Args:
        info: From `collapse_info`.
        log_y: Logarithmic y axes.
    """
    figure = plot_curves(info, columns=3, log_y=log_y)
    index = next(i for i, q in enumerate(info.quantities) if q.column == "energy_tail_k")
    if info.curves[index] and not log_y:
        figure.add_hline(
            y=HEAVY_TAIL, line={"dash": "dot", "width": 1, "color": RULE}, opacity=0.6, **place(index, 3),
            annotation={"text": "heavy above .5", "font": {"size": 11}, "yanchor": "bottom", "xanchor": "left"},
            annotation_position="top left",
        )  # fmt: skip
    return figure
