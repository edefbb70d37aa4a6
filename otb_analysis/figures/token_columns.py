"""What tokens can be coloured by: stored columns and differences, and which value gets which colour."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from plotly.colors import sample_colorscale

from otb_analysis.energies import calibrate
from otb_analysis.errors import InputError, nearest
from otb_analysis.figures.fidelity import exact_norms
from otb_analysis.schema import TOKENS
from otb_analysis.types import Float, Int

NUMERIC = tuple(c.name for c in TOKENS if c.dtype in ("FLOAT", "DOUBLE"))
"""Stored columns with a measure of each token."""

SAMPLER, ADVANTAGES, RATIO = "policy_minus_sampler", "advantage_difference", "exact_over_proxy"
COLOURS = (*NUMERIC, SAMPLER, ADVANTAGES, RATIO)
"""All that tokens can be coloured by."""
SIGNED = ("attribution", "signal", "noise", "advantage", SAMPLER, ADVANTAGES)
"""Columns in which a token can push for or against; 0 always has the middle colour."""
LOW = ("contrast",)
"""Columns in which the low values stand out."""
RATIOS = (RATIO,)
"""Columns in which 1 has the middle colour."""


DIFFERENCES = {
    SAMPLER: ("policy − sampler (log π)", "nats"),
    ADVANTAGES: ("advantage − another's", ""),
    RATIO: ("exact ÷ calibrated proxy", ""),
}
"""What is no stored column: title and unit."""
TITLES = {
    "logprob": "log-probability", "behavior_logprob": "sampler's log-probability", "sum_pi_sq": "Σπ²",
    "energy_proxy": "proxy energy", "energy_calibrated": "calibrated proxy energy",
    "hidden_norm_sq": "‖hidden state‖²", "grad_norm_sq": "Exact ‖∇log π‖²",
    "grad_norm_sq_stderr": "standard error of ‖∇log π‖²", "path_norm_sq": "‖Σ ∇log π‖² up to here",
    "inclusion_prob": "probability of being measured", **{name: words[0] for name, words in DIFFERENCES.items()},
}  # fmt: skip
"""What columns are called in hovers, legends and boxes, where their names are no words."""


def with_differences(tokens: pd.DataFrame, other: pd.Series | None = None) -> pd.DataFrame:
    """Add the differences whose parts were measured, empty columns for the others.

    log π − log μ; the advantage minus `other`, another estimator's advantage of the same tokens; and the exact squared
    norm over the calibrated proxy. A run without a calibrated proxy gets one fitted to these tokens: c·proxy^b, as
    `energies.calibrate` does.
    """
    names = ["logprob", "behavior_logprob", "advantage", "energy_calibrated", "energy_proxy", "grad_norm_sq"]
    known = tokens.reindex(columns=names)
    if "grad_norm_sq" in tokens:
        known["grad_norm_sq"] = exact_norms(tokens)
    logprob, behavior, advantage, calibrated, proxy, exact = known.to_numpy(np.float64, na_value=np.nan).T
    if np.isnan(calibrated).all():
        try:
            fit = calibrate(exact[np.isfinite(proxy)], proxy[np.isfinite(proxy)])
            calibrated = np.where(np.isfinite(proxy), fit.predict(np.nan_to_num(proxy)), np.nan)
        except InputError:  # too few tokens have both
            pass
    ratio = np.divide(exact, calibrated, out=np.full(len(tokens), np.nan), where=calibrated > 0)
    difference = np.nan if other is None else advantage - other.to_numpy(np.float64)
    return tokens.assign(**{SAMPLER: logprob - behavior, ADVANTAGES: difference, RATIO: ratio})


def measured(tokens: pd.DataFrame) -> list[str]:
    """Return the columns that colour some token: stored ones, differences, and what somebody else recorded."""
    schema = {c.name for c in TOKENS}
    further = [str(c) for c in tokens if c not in (*schema, *COLOURS) and pd.api.types.is_float_dtype(tokens[c])]
    return [name for name in (*COLOURS, *further) if name in tokens and bool(tokens[name].notna().any())]


SEQUENTIAL = ("#EAF1F6", "#CFE3EE", "#8FC1DA", "#3F93BF", "#0B6596", "#06395A")
DIVERGING = ("#A63C00", "#E07B39", "#F6C9A8", "#F4F6F8", "#A9CFE5", "#3F8FC0", "#0B5483")
SEQUENTIAL_DARK = ("#1D2C38", "#173F58", "#0B6596", "#3F93BF", "#8FC1DA", "#EAF1F6")
DIVERGING_DARK = ("#FFC08A", "#D9722F", "#7A3D1C", "#252C33", "#1B4A66", "#3F8FC0", "#B4DCF2")
"""On a dark page the least and the middle are dark, and what stands out is light."""

KINDS = ("auto", "linear", "log")
ROBUST = 0.98
"""Share of the values that a linear scale spans; beyond it colours saturate, and the legend says so."""

HEAVY = 5.0
"""`auto` is logarithmic where the largest value exceeds the 98 % quantile this many times: clipping would hide it."""

DECADES = 4
"""A logarithmic scale ends this many powers of ten below the largest value."""

LEVELS = 64
"""More colours than the eye tells apart."""


@dataclass(frozen=True)
class ColorScale:
    """Which value gets which colour."""

    low: float
    high: float
    diverging: bool = False
    log: bool = False
    dark: bool = False  # For a dark page
    backward: bool = False  # The low values stand out

    @property
    def colors(self) -> tuple[str, ...]:
        """The colours, from low to high."""
        light, dark = (DIVERGING, DIVERGING_DARK) if self.diverging else (SEQUENTIAL, SEQUENTIAL_DARK)
        colors = dark if self.dark else light
        return colors[::-1] if self.backward else colors

    @property
    def stops(self) -> list[list[Any]]:
        """The colours as Plotly wants them."""
        return [[i / (len(self.colors) - 1), color] for i, color in enumerate(self.colors)]

    def position(self, value: NDArray[Any]) -> Float:
        """Return where each value lies between the two ends, in [0, 1]; NaN where there is no value."""
        clipped = np.clip(np.asarray(value, dtype=float), self.low, self.high)
        if self.log:
            return np.log(clipped / self.low) / np.log(self.high / self.low)
        return (clipped - self.low) / (self.high - self.low)

    def values(self, position: Float) -> list[float]:
        """Return the values at some positions, the inverse of `position`."""
        if self.log:
            return [float(self.low * (self.high / self.low) ** p) for p in position]
        return [float(self.low + (self.high - self.low) * p) for p in position]


def color_scale(value: Float, kind: str = "auto", signed: bool = False, ratio: bool = False) -> ColorScale:
    """Choose a scale for a column.

    Signed values: ±the 98 % quantile of |v|; ratios: the same of their logarithms, with 1 in the middle. Others
    linearly: the central 98 %, from 0 where they come near it. Others logarithmically: from the largest value down, at
    most four powers of ten. A constant column gets a scale of width 1.

    `kind` is `linear`, `log` (linear where values are signed or all 0) or `auto`, which is `log` where clipping would
    hide much. With `signed`, 0 has the middle colour also where all values have one sign.

    Raises:
        InputError: The kind is unknown.
    """
    if kind not in KINDS:
        raise InputError(f"kind of scale is {kind!r}; {nearest(kind, KINDS)}")
    seen = value[np.isfinite(value)]
    if seen.size == 0:
        return ColorScale(0.0, 1.0)
    if ratio:
        apart = np.abs(np.log(seen[seen > 0]))
        reach = float(np.exp(np.quantile(apart, ROBUST))) if apart.size else 1.0
        reach = reach if reach > 1 else 2.0
        return ColorScale(1 / reach, reach, diverging=True, log=True)
    if signed or seen.min() < 0 < seen.max():
        reach = float(np.quantile(np.abs(seen), ROBUST)) or float(np.abs(seen).max()) or 1.0
        return ColorScale(-reach, reach, diverging=True)
    low, high = (float(q) for q in np.quantile(seen, [(1 - ROBUST) / 2, (1 + ROBUST) / 2]))
    top = float(seen.max())
    if seen.min() >= 0 and top > 0 and (kind == "log" or (kind == "auto" and top > HEAVY * np.quantile(seen, ROBUST))):
        floor = max(float(seen[seen > 0].min()), top * 10.0**-DECADES)
        return ColorScale(floor, top, log=True) if floor < top else ColorScale(0.0, top)
    if 0 <= low < high / 4:
        low = 0.0
    return ColorScale(low, high) if high > low else ColorScale(low - 0.5, high + 0.5)


def color_levels(value: Float, scale: ColorScale) -> Int:
    """Return which colour of `palette` each value has; −1 where there is no value."""
    position = scale.position(value)
    seen = np.isfinite(position)
    return np.where(seen, np.round(np.where(seen, position, 0) * (LEVELS - 1)), -1).astype(np.int64)


def palette(scale: ColorScale) -> list[tuple[str, str]]:
    """Return background and text colour of every level: black or white, whichever has the higher contrast."""
    colors = np.array(sample_colorscale(scale.stops, list(np.linspace(0, 1, LEVELS)), colortype="tuple"))
    backgrounds = ["#" + "".join(f"{round(255 * part):02X}" for part in color) for color in colors]
    luminance = ((colors + 0.055) / 1.055) ** 2.4 @ (0.2126, 0.7152, 0.0722)
    return list(zip(backgrounds, np.where(luminance > 0.179, "#000000", "#FFFFFF").tolist(), strict=True))
