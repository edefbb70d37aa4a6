"""Proxy against exact energies: where they agree, and whether they agree where the baseline looks."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.curves import Quantity, curves_info, plot_learning
from otb_analysis.figures.styles import BLUE, GREEN, ORANGE, RAMP, TEMPLATE, TOP, Style, log_axis, number
from otb_analysis.statistics import Fidelity, fidelity_by_part
from otb_analysis.types import Float, Float32, Int

BINS, FAR = 60, 200
KINDS = {"token": "token energy w_t", "realized": "realized energy W_t"}
SOURCES = {"proxy": "energy_proxy", "calibrated": "energy_calibrated"}
"""What is compared with exact energies, and its column."""


def fidelity_columns(source: str = "proxy") -> list[str]:
    """Return the columns of the tokens table that a comparison with exact norms reads."""
    return ["step", "group", "rollout", "t", "mask", SOURCES[source], "grad_norm_sq", "measured_by", "inclusion_prob"]


COEFFICIENTS = (("pearson", "Pearson"), ("log_pearson", "log-Pearson"), ("spearman", "Spearman"))
_CHEAP = {"proxy": "proxy {}_t in logit space (norm²)", "calibrated": "calibrated proxy {}_t (norm²)"}
_COLORS = {"pearson": BLUE, "log_pearson": ORANGE, "spearman": GREEN}


@dataclass(frozen=True)
class FidelityInfo:
    """The numbers behind the fidelity page."""

    kind: str
    source: str
    count: Float32  # Tokens per cell of the density [B, B] float32, rows are exact, NaN where there are none
    proxy_edges: Float  # log₁₀ of the bin edges along the proxy [B + 1]
    exact_edges: Float
    compared: tuple[Float, Float, Int, Int]  # Proxy, exact energy, cell and step of each token with both
    n_tokens: int  # Tokens with both energies
    n_zero: int  # Of these, tokens where one of them is 0 and the logarithmic axes cannot show them
    # True when they were drawn with unequal probabilities, so that large energies are over-represented.
    drawn: bool = False
    # Least squares of log₁₀ exact on log₁₀ cheap energy: level and slope; None with fewer than two different values
    line: tuple[float, float] | None = None
    # Tokens furthest from the line [≤ FAR]: step, group, rollout, t, cheap and exact energy
    far: pd.DataFrame = field(default_factory=pd.DataFrame)

    @cached_property
    def agreement(self) -> tuple[Fidelity, dict[int, Fidelity]]:
        """Agreement over all tokens and at each measured step, made when it is first asked: the density needs none."""
        return fidelity_by_part(*self.compared)

    @property
    def overall(self) -> Fidelity:
        """Agreement over all tokens."""
        return self.agreement[0]

    @property
    def steps(self) -> dict[int, Fidelity]:
        """Agreement at each measured step."""
        return self.agreement[1]


def fidelity_info(tokens: pd.DataFrame, kind: str = "token", source: str = "proxy") -> FidelityInfo:
    """Compare the proxy with exact energies on every token that has both.

    Realized energies are running sums over policy tokens; a rollout counts up to its first token without an exact norm.
    Groups whose tokens were drawn with unequal probabilities are left out unless there are no others.

    `tokens` needs the columns of `fidelity_columns`; measured_by and inclusion_prob may be missing.

    Raises:
        InputError: The kind or the source is unknown, or no token has both energies.
    """
    for name, value, choices in (("kind", kind, KINDS), ("source", source, SOURCES)):
        if value not in choices:
            raise InputError(f"{name} is {value!r}; {nearest(value, choices)}")
    rows, drawn = comparable(tokens)
    table: Any = energies(rows, kind, source)
    if table.empty:
        raise InputError(
            f"No token has both {SOURCES[source]} and grad_norm_sq; schedule exact measurements, as in "
            "[measure] exact = {every = 10, prompts = 4}, or run `otb audit` on recorded rollouts."
        )
    proxy, exact = table["proxy"].to_numpy(np.float64), table["exact"].to_numpy(np.float64)
    positive = (proxy > 0) & (exact > 0)
    x, y = np.log10(proxy[positive]), np.log10(exact[positive])
    count, proxy_edges, exact_edges = np.histogram2d(x, y, bins=BINS)
    density = np.where(count > 0, count, np.nan).T.astype(np.float32)
    line, far = None, pd.DataFrame()
    if len(np.unique(x)) > 1:
        slope, level = np.polyfit(x, y, 1).tolist()
        furthest = np.argsort(-np.abs(y - level - slope * x), kind="stable")[:FAR]
        columns = ["step", "group", "rollout", "t", "proxy", "exact"]
        line, far = (level, slope), table.loc[positive, columns].iloc[furthest].reset_index(drop=True)
    compared = proxy, exact, table["cell"].to_numpy(), table["step"].to_numpy()
    return FidelityInfo(
        kind, source, density, proxy_edges, exact_edges, compared, len(table),
        int(np.count_nonzero(~positive)), drawn, line, far,
    )  # fmt: skip


def exact_norms(tokens: pd.DataFrame) -> pd.Series:
    """Return grad_norm_sq where it was measured exactly, null elsewhere: no proxy is compared with an estimate.

    Without a column measured_by, or where it is null, norms count as exact.
    """
    norm_sq: Any = tokens["grad_norm_sq"]
    if "measured_by" not in tokens:
        return norm_sq
    by: Any = tokens["measured_by"]
    return norm_sq.where((by.fillna("exact") == "exact").astype(bool))


def comparable(tokens: pd.DataFrame, fewest: int = 1) -> tuple[pd.DataFrame, bool]:
    """Return the rows to compare, and whether their tokens were drawn with unequal probabilities.

    Groups drawn with unequal probabilities are left out where at least `fewest` were measured whole.
    """
    if "inclusion_prob" not in tokens or tokens["inclusion_prob"].dropna().empty:
        return tokens, False
    groups = tokens.groupby(["step", "group"])["inclusion_prob"]
    high, low = (groups.transform(end).to_numpy(np.float64, na_value=np.nan) for end in ("max", "min"))
    unequal = high > low  # NaN, where nothing was measured, is not
    whole = tokens.loc[~unequal]
    enough = exact_norms(whole).notna().groupby([whole["step"], whole["group"]]).any().sum() >= fewest
    return (whole, False) if enough or not unequal.any() else (tokens, True)


def energies(tokens: pd.DataFrame, kind: str, source: str = "proxy") -> pd.DataFrame:
    """Return step, group, rollout, t, cell, proxy and exact of every policy token that has both energies, and finite.

    `cell` numbers (step, prompt, position), position counting policy tokens.
    """
    chosen: Any = tokens[tokens["mask"].fillna(False).astype(bool)]
    policy = chosen.sort_values(["step", "rollout", "t"])
    table = pd.DataFrame({"step": policy["step"], "proxy": policy[SOURCES[source]], "exact": exact_norms(policy)})
    if kind == "realized":
        keys = [policy["step"], policy["rollout"]]
        for name in ("proxy", "exact"):
            unknown = table[name].isna().groupby(keys).cumsum() > 0
            table[name] = table[name].astype(float).fillna(0).groupby(keys).cumsum().mask(unknown)
    table = table.assign(**{name: policy[name] for name in ("group", "rollout", "t")})
    position = policy.groupby(["step", "rollout"], sort=False).cumcount()
    table["cell"] = table.groupby(["step", "group", position], sort=False).ngroup()
    known: Any = table.dropna(subset=["proxy", "exact"])
    return known[np.isfinite(known[["proxy", "exact"]].astype(float)).all(axis=1)]


def fidelity_table(info: FidelityInfo) -> pd.DataFrame:
    """Return the correlations as a table: one row per step and one for all, pooled and within (prompt, t)."""
    records = []
    for name, agreed in {"all": info.overall, **info.steps}.items():
        records.append({"step": str(name), "tokens": agreed.pooled.n, "cells": agreed.n_cells})
        for key, title in COEFFICIENTS:
            records[-1][f"{title}, pooled"] = getattr(agreed.pooled, key)
            records[-1][f"{title}, within"] = getattr(agreed.within, key, None)
    table = pd.DataFrame(records)
    return table.astype({c: float for c in table if c not in ("step", "tokens", "cells")})


def plot_fidelity(info: FidelityInfo) -> go.Figure:
    """Draw the density of tokens over proxy and exact energy, their line, and the tokens furthest from it.

    Both axes and the colour are logarithmic. A point's customdata are step, group, rollout and t.
    """
    figure = go.Figure(layout={"template": TEMPLATE})
    middle = [(edges[1:] + edges[:-1]) / 2 for edges in (info.proxy_edges, info.exact_edges)]
    top = int(np.log10(max(2.0, float(np.nanmax(info.count, initial=1))))) + 1
    figure.add_heatmap(
        x=(10 ** middle[0]).astype(np.float32), y=(10 ** middle[1]).astype(np.float32), z=np.log10(info.count),
        customdata=info.count, colorscale=["#D9E8F1", "#8FC1DA", "#3F93BF", "#0B6596", "#06395A"], zmin=0,
        meta=RAMP,
        colorbar={
            "title": {"text": "tokens", "side": "top", "font": {"size": 12}},
            "thickness": 10, "tickvals": list(range(top)),
            "ticktext": [f"{10**k:,}" for k in range(top)],
        },
        hovertemplate=info.source + " %{x:.3g}<br>exact %{y:.3g}<br><b>%{customdata:.0f}</b> tokens<extra></extra>",
    )  # fmt: skip
    if info.line is not None:
        level, slope = info.line
        ends = info.proxy_edges[[0, -1]]
        figure.add_scatter(
            x=10**ends, y=10 ** (level + slope * ends), mode="lines", hoverinfo="skip", showlegend=False,
            line={"color": ORANGE, "width": 1.6, "dash": "dash"},
        )  # fmt: skip
        figure.add_scatter(
            x=info.far["proxy"], y=info.far["exact"], mode="markers", showlegend=False,
            marker={"symbol": "circle-open", "size": 6, "color": ORANGE, "opacity": 0.8},
            customdata=info.far[["step", "group", "rollout", "t"]].to_numpy().tolist(),  # as lists a click returns them
            hovertemplate="step %{customdata[0]}, prompt %{customdata[1]}, rollout %{customdata[2]}, t "
            "%{customdata[3]}<br>" + info.source + " %{x:.3g}, exact %{y:.3g}<extra></extra>",
        )  # fmt: skip
    letter = "w" if info.kind == "token" else "W"
    figure.update_xaxes(**log_axis(10**info.proxy_edges, most=5), title_text=_CHEAP[info.source].format(letter))
    figure.update_yaxes(**log_axis(10**info.exact_edges), title_text=f"exact {letter}_t over the parameters (norm²)")
    return figure.update_layout(height=470, margin={"l": 76, "t": 30})


OVER_STEPS = (
    Quantity("Within (prompt, t)", "correlation; what the baseline sees", "within", rare=True),
    Quantity("Pooled", "correlation over all tokens", "pooled", rare=True),
)


def plot_fidelity_steps(info: FidelityInfo) -> go.Figure:
    """Draw the three correlations over steps, within (prompt, t) and pooled."""
    table: Any = fidelity_table(info).iloc[1:].astype({"step": np.int64})  # without the row of all steps
    tables = {
        title: table[["step"]].assign(**{name: table[f"{title}, {name}"] for name in ("within", "pooled")})
        for _, title in COEFFICIENTS
    }
    styles = {title: Style(_COLORS[key]) for key, title in COEFFICIENTS}
    return plot_learning(curves_info(tables, OVER_STEPS, styles), columns=1, height=(470 - TOP) // 2)


def agreement_display(measured: Iterable[tuple[str, str, Fidelity]]) -> pd.DataFrame:
    """Return correlations as they are read, pooled and within (prompt, t): one row per run and kind of energy."""
    return pd.DataFrame(
        {
            "run": run,
            "of": name,
            "tokens": f"{fidelity.pooled.n:,}",
            **{title: number(getattr(fidelity.pooled, key), ".2f") for key, title in COEFFICIENTS},
            "Pearson within": number(getattr(fidelity.within, "pearson", None), ".2f"),
            "Spearman within": number(getattr(fidelity.within, "spearman", None), ".2f"),
        }
        for run, name, fidelity in measured
    )
