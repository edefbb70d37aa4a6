"""Axes with ticks as people read them: powers of ten, round numbers, steps that were measured."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otb_analysis.figures.numbers import number, superscript


def log_axis(values: ArrayLike, ends: ArrayLike = (), most: int = 8) -> dict[str, Any]:
    """Return a logarithmic axis with readable ticks: decades, or 1–2–5 where the values span less than two.

    It spans all values and, up to a factor of five beyond them, the ends of their intervals: one very wide
    interval must not flatten all the others.
    """
    drawn, reaching = (np.asarray(x, dtype=float) for x in (values, ends))
    drawn, reaching = (x[np.isfinite(x) & (x > 0)] for x in (drawn, reaching))
    if drawn.size == 0:
        return {"type": "log"}
    reaching = np.clip(np.append(reaching, drawn), drawn.min() / 5, drawn.max() * 5)
    low, high = np.log10(reaching.min()), np.log10(reaching.max())
    reach = max(0.06 * (high - low), 0.04)
    low, high = low - reach, high + reach
    decades = range(math.floor(low), math.ceil(high) + 1)
    leads = (1, 1.5, 2, 3, 4, 5, 6, 8) if high - low < 0.7 else (1, 2, 5) if high - low < 2.2 else (1,)
    ticks = [lead * 10.0**k for k in decades for lead in leads if low <= k + math.log10(lead) <= high]
    if len(ticks) < 2:
        ticks = [float(f"{10**at:.2g}") for at in np.linspace(low + reach, high - reach, 3)]
    every = math.ceil(len(ticks) / most)
    # Where 1 is among the ticks it stays: ratios are read against it.
    ticks = ticks[ticks.index(1.0) % every if 1.0 in ticks else 0 :: every]
    text = [number(tick) if 1e-3 <= tick < 1e5 else f"10{superscript(round(math.log10(tick)))}" for tick in ticks]
    return {"type": "log", "range": [low, high], "tickvals": ticks, "ticktext": [_short(t) for t in text]}


def linear_range(values: ArrayLike, ends: ArrayLike, around: float) -> list[float]:
    """Return the range of a linear axis: all values, one mark, and intervals up to as far again."""
    drawn, reaching = (np.asarray(x, dtype=float) for x in (values, ends))
    drawn = np.append(drawn[np.isfinite(drawn)], around)
    low, high = drawn.min(), drawn.max()
    reach = max(high - low, abs(around), 1e-12)
    reaching = np.clip(np.append(reaching[np.isfinite(reaching)], drawn), low - reach, high + reach)
    margin = 0.06 * (reaching.max() - reaching.min())
    return [float(reaching.min() - margin), float(reaching.max() + margin)]


def _short(text: str) -> str:
    """Drop the zeros that a tick does not need: 0.100 → 0.1, 2.00 → 2."""
    return text.rstrip("0").rstrip(".") if "." in text else text


def step_axis(steps: ArrayLike) -> dict[str, Any]:
    """Return an axis of measured steps: ticks at steps that were measured, room on both sides."""
    measured = np.unique(np.asarray(steps, dtype=float))
    if measured.size == 0:
        return {}
    gap = float(np.diff(measured).min()) if measured.size > 1 else 1.0
    every = math.ceil(measured.size / 9)
    reach = [float(measured[0] - 0.7 * gap), float(measured[-1] + 0.7 * gap)]
    return {"tickvals": measured[::every].astype(np.float32), "range": reach, "title": {"text": "step", "standoff": 6}}
