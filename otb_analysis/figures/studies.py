"""A study's result tables and figures as a page shows them: an interval in one column, a picture on either ground."""

import colorsys
import re
from typing import Any

import pandas as pd

from otb_analysis.figures.numbers import span
from otb_analysis.figures.styles import GREY, GRID, INK, PAPER

DARK = {INK: "#E6EAEE", PAPER: "#12171C", GRID: "#2A323A", GREY: "#9AA4AF"}
"""Ink and paper of `figures.svg` on a dark ground."""
LIGHTNESS = 0.52
"""Least lightness of any other colour there."""


def results_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return a result table with the two ends of every interval as one column of text behind its estimate.

    Columns `x`, `x_low`, `x_high` become `x` and `x, interval`; bare `low`, `high` belong to the column before them.
    Numbers stay numbers, so that a column sorts by its estimate; backticks around names are left out.
    """
    columns: dict[str, Any] = {}
    names = [str(name) for name in table.columns]
    for place, name in enumerate(names):
        if name.endswith("low") and (high := name[: -len("low")] + "high") in names:
            of = name.removesuffix("_low") if name != "low" else names[max(place - 1, 0)]
            columns[f"{of}, interval"] = _spans(table[name], table[high])
        elif not (name.endswith("high") and name[: -len("high")] + "low" in names):
            columns[name] = table[name]
    shown = pd.DataFrame(columns).rename(columns=_plain)
    text = shown.select_dtypes(["object", "str"]).columns
    return shown.assign(**{name: shown[name].map(_plain) for name in text})


def for_dark(svg: str) -> str:
    """Return a picture of `figures.svg` for a dark page: paper and ink change places, lines get lighter."""
    return re.sub(r"#[0-9A-Fa-f]{6}\b", lambda match: DARK.get(match[0].upper()) or _lighter(match[0]), svg)


def _plain(value: Any) -> Any:
    """Return text without the marks of Markdown's code, which a table would show."""
    return value.replace("`", "") if isinstance(value, str) else value


def _lighter(color: str) -> str:
    hue, light, saturation = colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    lifted = colorsys.hls_to_rgb(hue, max(light, LIGHTNESS), saturation)
    return "#" + "".join(f"{round(255 * c):02X}" for c in lifted)


def _spans(low: Any, high: Any) -> pd.Series:
    return pd.Series([_span(a, b) for a, b in zip(low, high, strict=True)], index=low.index, dtype="string")


def _span(low: object, high: object) -> str | None:
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low != low or high != high:
        return None
    return span(float(low), float(high))
