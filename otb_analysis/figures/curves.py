"""Training curves: any per-step quantities of runs as small multiples; what learning and a collapse are seen by."""

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import scipy

from otb_analysis.figures.styles import (
    RULE,
    Style,
    interval_cell,
    linear_range,
    log_axis,
    note_in_panel,
    panels,
    run_styles,
)
from otb_analysis.statistics import Interval
from otb_analysis.types import Bool, Float32

LINE, TITLES = 15, 72
"""Pixels from one name at the end of a line to the next; of a panel that are not its axes, but titles."""
LABELLED = 6
"""Most lines of a panel that have their names at their ends."""
LOOKS = {"solid": "━", "dash": "╍"}
"""How a line looks beside its name."""


@dataclass(frozen=True)
class Quantity:
    """One panel of training curves."""

    title: str
    line: str  # Unit and reading, below the title
    column: str
    from_zero: bool = False  # A linear axis starts at 0, so that heights compare as ratios
    share: bool = False  # A share: as `from_zero`
    rare: bool = False  # Measured rarely: points are drawn, and nothing is smoothed
    smoothed: bool = True  # Takes part in the running mean; False for what is a running mean already
    ratio: bool = False  # On a logarithmic axis with a rule at 1
    # The columns `<column>_low` and `<column>_high` are the ends of its interval, drawn as a band.
    interval: bool = False


@dataclass(frozen=True)
class Curve:
    """One run in one panel: `step` [S], the recorded `value` [S] and its running mean `smooth` [S], all float32.

    `low` and `high` [S] are the ends of the value's interval, NaN where none was given.
    """

    run: str
    step: Float32
    value: Float32
    smooth: Float32
    low: Float32
    high: Float32


@dataclass(frozen=True)
class CurvesInfo:
    """The numbers behind small multiples of training curves."""

    quantities: tuple[Quantity, ...]
    curves: tuple[tuple[Curve, ...], ...]
    styles: Mapping[str, Style]
    window: int


def curves_info(
    steps: Mapping[str, pd.DataFrame], quantities: Sequence[Quantity], styles: Mapping[str, Style], window: int = 1
) -> CurvesInfo:
    """Collect what each run recorded of each quantity; steps without a finite value are left out, never drawn as 0.

    `smooth` is the trailing mean of the last `window` values, of those there are at the start. Runs without a style
    get one by their order.
    """
    curves: list[list[Curve]] = []
    for quantity in quantities:
        curves.append([])
        columns = [quantity.column, f"{quantity.column}_low", f"{quantity.column}_high"]
        over = window if quantity.smoothed and not quantity.rare else 1
        for run, table in steps.items():
            if (known := finite(table, quantity.column)).any():
                recorded: Any = table.loc[known].sort_values("step").reindex(columns=["step", *columns])
                smooth = recorded[quantity.column].astype(np.float32).rolling(over, min_periods=1).mean()
                step, value, *ends = recorded.to_numpy(np.float32, na_value=np.nan).T
                low, high = ends if quantity.interval else (np.full_like(value, np.nan),) * 2
                curves[-1].append(Curve(run, step, value, smooth.to_numpy(np.float32), low, high))
    return CurvesInfo(tuple(quantities), tuple(map(tuple, curves)), {**run_styles(steps), **styles}, window)


def finite(table: pd.DataFrame, column: str) -> Bool:
    """Tell at which steps a number was recorded that can be drawn and averaged; False everywhere without the column."""
    if column not in table:
        return np.zeros(len(table), dtype=bool)
    return np.isfinite(table[column].to_numpy(np.float64, na_value=np.nan))


def curves_table(info: CurvesInfo) -> pd.DataFrame:
    """Return the curves of small multiples as one long table: value, running mean and ends of its interval by step."""
    columns = ["run", "quantity", "step", "value", "smooth", "low", "high"]
    parts = [
        pd.DataFrame(vars(curve) | {"quantity": quantity.column, "step": curve.step.astype(int)}, columns=columns)
        for quantity, curves in zip(info.quantities, info.curves, strict=True)
        for curve in curves
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def plot_learning(info: CurvesInfo, columns: int | None = None, height: int = 290) -> go.Figure:
    """Draw the curves; the running mean is the line, recorded values stand faintly behind it.

    Up to `LABELLED` lines have their names at their ends; more have a legend below. Three panels stand in one row, else
    two; each is `height` pixels high with its titles.
    """
    columns = columns or (3 if len(info.quantities) == 3 else 2)
    figure, places = panels([(q.title, q.line) for q in info.quantities], columns, height=height)
    names = list(dict.fromkeys(curve.run for curves in info.curves for curve in curves))
    shared = len(re.sub(r"\w*$", "", commonprefix(names))) * (len(names) > 1)  # noqa: RUF071 - names, no paths
    named = set(names) if len(names) <= LABELLED else set[str]()
    for where, quantity, curves in zip(places, info.quantities, info.curves, strict=True):
        for curve in curves:
            for trace in traces_of(curve, quantity, info.styles[curve.run]):
                figure.add_trace(trace.update(showlegend=bool(trace.name) and curve.run not in named), **where)
            named.add(curve.run)
        if not curves:
            note_in_panel(figure, "no finite number was recorded", where)
            continue
        value, *ends = (np.concatenate([getattr(curve, part) for curve in curves]) for part in ("value", "low", "high"))
        if len(names) <= LABELLED:
            # The nearest heights to the last points of which each is that much above the one below.
            scale, ordered = (
                np.log10 if quantity.ratio else np.asarray,
                sorted(curves, key=lambda c: float(c.smooth[-1])),
            )
            low, high = linear_range(scale(value), scale(np.concatenate(ends)), around=float(scale(value[0])))
            apart = LINE / (height - TITLES) * (high - low) * np.arange(len(curves))
            last = scale([curve.smooth[-1] for curve in ordered])
            heights = scipy.optimize.isotonic_regression(last - apart).x + apart
            for curve, y in zip(ordered, heights.tolist(), strict=True):
                style, name = info.styles[curve.run], curve.run[shared:]
                look = f"<span style='color:{style.color}'>{LOOKS.get(style.dash, '┅')}</span>"
                text = f"{look} {plain_name(name if len(name) < 20 else f'{name[:18]}…')}"
                end = float(curve.step[-1])
                figure.add_annotation(text=text, x=end, y=y, xanchor="left", showarrow=False, **where)
        if quantity.ratio:
            figure.update_yaxes(**log_axis(np.append(value, 1), np.concatenate(ends), most=5), **where)
            figure.add_hline(y=1, line={"width": 1, "dash": "dot", "color": RULE}, **where)
    for where in places[-columns:]:  # the lowest of their columns
        figure.update_xaxes(title_text="step", title_standoff=6, **where)
    return figure.update_layout(legend={"y": -60 / (height * places[-1]["row"]), "yanchor": "top"})


def traces_of(curve: Curve, quantity: Quantity, style: Style) -> list[go.Scatter]:
    """Return the intervals as a band, the recorded values faintly where they differ from the line, then the line."""
    thin = {"color": style.color, "width": 1}
    behind = []
    if (known := np.isfinite(curve.low + curve.high)).any():
        step, low, high = curve.step[known], curve.low[known], curve.high[known]
        outline = {"x": np.concatenate([step, step[::-1]]), "y": np.concatenate([high, low[::-1]])}
        behind.append(go.Scatter(outline, fill="toself", fillcolor=style.color, opacity=0.2))
    if not np.array_equal(curve.value, curve.smooth):
        behind.append(go.Scatter(x=curve.step, y=curve.value, opacity=0.25))
    for trace in behind:
        trace.update(mode="lines", line=thin, hoverinfo="skip", legendgroup=curve.run)
    rows = zip(curve.value, curve.low, curve.high, strict=True)
    line = go.Scatter(
        x=curve.step, y=curve.smooth, name=curve.run, legendgroup=curve.run,
        mode="lines+markers" if quantity.rare else "lines",
        line={"color": style.color, "width": 2, "dash": style.dash}, marker={"symbol": style.symbol, "size": 7},
        text=[interval_cell(Interval(float(value), float(low), float(high), 0, "")) for value, low, high in rows],
        hovertemplate="step %{x}: <b>%{text}</b><extra>" + plain_name(curve.run) + "</extra>",
    )  # fmt: skip
    return [*behind, line]


def plain_name(text: str) -> str:
    """Keep Plotly from reading markup or a template in a run's name."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")


TRAINING = Quantity("Training reward", "mean of the step's rollouts", "reward_mean")
HELD_OUT = Quantity(
    "Held-out reward", "prompts never trained on, 95 % interval", "heldout_reward", rare=True, interval=True
)
SUCCESS = Quantity(
    "Held-out success", "share of right answers, 95 % interval", "heldout_success", rare=True, interval=True
)


OVER_RUNS = "mean of a group's runs, band: lowest to highest"


def learning_info(steps: Mapping[str, pd.DataFrame], styles: Mapping[str, Style], window: int = 1) -> CurvesInfo:
    """Collect the reward curves of some runs; with several answers per held-out prompt also success and pass@k.

    Held-out prompts have panels where a run recorded them; pass@k is named after the one k that the runs have, if any.
    """
    heldout = [HELD_OUT]
    ks = {int(k) for t in steps.values() if "heldout_pass_k" in t for k in t["heldout_pass_k"].dropna()}
    if max(ks, default=1) > 1:
        k = str(*ks) if len(ks) == 1 else "k"
        note = f"one of {k} answers is right, 95 % interval"
        heldout += [SUCCESS, Quantity(f"Held-out pass@{k}", note, "heldout_pass_at_k", rare=True, interval=True)]
    recorded = [q for q in heldout if any(q.column in t and t[q.column].notna().any() for t in steps.values())]
    return curves_info(steps, (TRAINING, *recorded), styles, window)


def grouped_info(
    steps: Mapping[str, pd.DataFrame],
    groups: Mapping[str, Sequence[str]],
    window: int = 1,
    styles: Mapping[str, Style] | None = None,
) -> CurvesInfo:
    """Collect the mean over the runs of each group, of each run's running mean, at the steps that all of them have.

    The ends are the lowest and the highest run; a group of one run has none.
    """
    own, tables = learning_info(steps, {}, window), {}
    for name, runs in groups.items():
        columns = []
        for quantity, curves in zip(own.quantities, own.curves, strict=True):
            lines = [pd.Series(curve.smooth, curve.step) for curve in curves if curve.run in runs]
            together = pd.concat(lines, axis=1, join="inner") if lines else pd.DataFrame()
            ends = {"": together.mean(axis=1)}
            if len(lines) > 1:
                ends |= {"_low": together.min(axis=1), "_high": together.max(axis=1)}
            columns += [values.rename(f"{quantity.column}{end}") for end, values in ends.items()]
        tables[name] = pd.concat(columns, axis=1).rename_axis("step").reset_index()
    over_runs = [replace(one, line=OVER_RUNS, interval=True, smoothed=False) for one in own.quantities]
    return curves_info(tables, over_runs, styles or {})


QUANTITIES = (
    Quantity("Reward", "mean of the step", "reward_mean"),
    Quantity("Gradient norm", "‖ḡ‖ before clipping", "grad_norm", from_zero=True),
    Quantity("Clipped steps", "share of the last 20", "clipped_share", share=True, smoothed=False),
    Quantity("Entropy", "nats, mean over tokens", "entropy_mean", from_zero=True),
    Quantity("Length", "tokens, mean", "length_mean", from_zero=True),
    Quantity("Equal-reward groups", "share of groups", "zero_variance_share", share=True),
    Quantity("Tail of token gradients", "Pareto-k of the proxy", "energy_tail_k"),
    Quantity("Tail of exact norms", "Pareto-k; from 1 on variance is infinite", "exact_tail_k", rare=True),
    Quantity("Top 1 % of tokens", "their share of all proxy energy", "energy_max_share", share=True),
    Quantity("Sampler mismatch", "nats, largest", "mismatch_max", from_zero=True),
    Quantity("Sampler against trainer", "nats, root mean square", "mismatch_rms", from_zero=True),
    Quantity("KL(sampler ‖ trainer)", "nats, k3 estimate", "mismatch_k3", from_zero=True),
    Quantity("Ratios beyond 2", "share of tokens, before truncation", "mismatch_ratio_share", share=True),
    Quantity("Largest advantage", "|A| of a token", "advantage_max", from_zero=True),
    Quantity("Longest completion", "tokens", "length_max", from_zero=True),
    Quantity("Clipped tokens", "share, by the ratio", "ratio_clip_share", share=True),
    Quantity("Is the sampler the policy?", "z, near 0 if so", "certificate_prob_z"),
    Quantity("Cut completions", "share of rollouts", "truncated_share", share=True),
    Quantity("Empty completions", "share of rollouts", "empty_share", share=True),
    Quantity("Baseline fallback", "share of tokens", "fallback_share", share=True),
)
NAMES = {quantity.column: quantity.title.lower() for quantity in QUANTITIES}
"""What columns of steps are called in hovers and sentences."""
SHARES = {
    "zero_variance_share": ("n_zero_variance_groups", "n_prompts"),
    "truncated_share": ("n_truncated", "n_rollouts"),
    "empty_share": ("n_empty_completions", "n_rollouts"),
}
DEGENERATE = {
    "n_zero_variance_groups": "groups of equal reward",
    "n_singleton_groups": "groups of one",
    "n_empty_completions": "empty completions",
    "n_truncated": "cut completions",
    "measurement_gaps": "measurement gaps",
}
"""Legal input from which nothing can be learned or measured; counted, never an error."""
CLIP_WINDOW = 20


def derived(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the steps table with the shares that the panels need.

    zero_variance_share = n_zero_variance_groups / n_prompts, the others of `SHARES` alike; clipped_share = mean of
    `clipped` over the last 20 steps, from the fifth on.
    """
    table = steps.sort_values("step")
    known = {name: pair for name, pair in SHARES.items() if set(pair) <= set(table)}
    shares = {name: table[part].astype(float) / table[of].astype(float) for name, (part, of) in known.items()}
    if "clipped" in table:
        clipped = table["clipped"].astype("Float64").astype(float)
        shares["clipped_share"] = clipped.rolling(CLIP_WINDOW, min_periods=5).mean()
    return table.assign(**shares)


def sparkline(values: np.ndarray, color: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Return values [n] as the HTML of a small curve, as wide as its place; one that is not finite is a gap.

    Each of `marks` is a rule in its colour at a share of the width. It is a picture, since a library of charts takes a
    browser half a second to load.
    """
    y = np.asarray(values, float)
    known = np.isfinite(y)
    low, high = (y[known].min(), y[known].max()) if known.any() else (0.0, 0.0)
    x, y = np.linspace(0, 100, len(y))[known], 28 - 26 * (y[known] - low) / (high - low or 1.0)
    begins = ~np.concatenate([[False], known])[:-1][known]
    path = "".join(
        f"{'M' if new else 'L'}{a:.1f} {b:.1f}{'h0' * bool(new)}" for a, b, new in zip(x, y, begins, strict=True)
    )
    line = 'fill="none" stroke-width="1.5" stroke-linecap="round" vector-effect="non-scaling-stroke"'
    drawn = [(path, color), *((f"M{100 * share:.1f} 0V30", of) for share, of in marks)]
    paths = "".join(f'<path d="{path}" stroke="{of}" {line}/>' for path, of in drawn)
    box = 'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 30" preserveAspectRatio="none"'
    coded = b64encode(f"<svg {box}>{paths}</svg>".encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{coded}" alt="" style="width: 100%; height: 36px">'


def degenerate_table(steps: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return how often each run met degenerate input, summed over its steps; a count never recorded is missing."""
    rows = [table.reindex(columns=list(DEGENERATE)).sum(min_count=1) for table in steps.values()]
    counts = pd.DataFrame(rows, columns=list(DEGENERATE)).astype("Float64").astype("Int64").rename(columns=DEGENERATE)
    norms = [table.reindex(columns=["grad_norm"]).dropna().to_numpy(float) for table in steps.values()]
    counts["steps with gradient 0"] = pd.array([(norm == 0).sum() if norm.size else None for norm in norms], "Int64")
    counts.insert(0, "run", list(steps))
    return counts.reset_index(drop=True)
