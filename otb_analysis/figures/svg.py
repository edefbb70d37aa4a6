"""Curves with intervals as SVG text: for pages that are files, made without a browser, the same to the byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from otb_analysis.figures.styles import BLUE, GREY

WIDTH, HEIGHT = 380, 250
"""Pixels of one panel, its titles and axes included."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 46, 40
"""Pixels from the panel's edges to its axes."""
LEGEND = 26
"""Pixels of one row of the legend."""
GLYPH = 0.6
"""Width of a letter over its size, on the safe side: there is no browser to measure text."""
INK, PAPER, GRID = "#1B2229", "#FFFFFF", "#E3E6EA"
STYLE = "font-family='system-ui, sans-serif' font-size='12'"


@dataclass(frozen=True)
class Curve:
    """One line; with `low` and `high` a band around it, or bars where it is drawn as points."""

    x: Sequence[float]
    y: Sequence[float]
    name: str = ""  # In the legend; curves of one name share an entry, those without a name have none
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    color: str = BLUE
    width: float = 2.0  # Of the line in pixels; 0 draws points with bars instead
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    note: str
    x_label: str
    curves: Sequence[Curve]
    rules: Sequence[tuple[float, str]] = ()  # (height, words) of horizontal dashed lines
    y_range: tuple[float, float] | None = None
    percent: bool = False  # Whether heights are shares, written in percent


@dataclass(frozen=True)
class _Axis:
    """A linear map from [low, high] to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round numbers in the range: 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * k for k in (1, 2, 5, 10) if power * k >= rough * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def svg(panels: Sequence[Panel], columns: int = 2) -> str:
    """Return a picture of panels, row by row, with one legend below them."""
    columns = min(columns, len(panels))
    width, height = columns * WIDTH, math.ceil(len(panels) / columns) * HEIGHT
    named = {curve.name: curve for panel in panels for curve in panel.curves if curve.name}
    legend, rows = _legend(list(named.values()), width, height)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height + rows * LEGEND}' width='{width}' "
        f"height='{height + rows * LEGEND}' {STYLE} fill='{INK}'>",
        f"<rect width='100%' height='100%' fill='{PAPER}'/>",
    ]
    for i, panel in enumerate(panels):
        x, y = i % columns * WIDTH, i // columns * HEIGHT
        parts += [f"<g transform='translate({x},{y})'>", *_panel(panel), "</g>"]
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    horizontal, vertical = _axes(panel)
    parts = [
        _text(LEFT, 18, panel.title, f"font-weight='600' font-size='{_fitting(panel.title, 13)}'"),
        _text(LEFT, 34, panel.note, f"fill='{GREY}' font-size='{_fitting(panel.note, 11)}'"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, panel.x_label, "text-anchor='middle'"),
    ]
    for tick in vertical.ticks():
        parts.append(_line(LEFT, vertical(tick), WIDTH - RIGHT, vertical(tick), GRID))
        label = f"{100 * tick:.4g} %" if panel.percent else f"{tick:.4g}"
        parts.append(_text(LEFT - 6, vertical(tick) + 4, label, "text-anchor='end'"))
    for tick in horizontal.ticks():
        parts.append(_line(horizontal(tick), HEIGHT - BOTTOM, horizontal(tick), HEIGHT - BOTTOM + 4, GREY))
        parts.append(_text(horizontal(tick), HEIGHT - BOTTOM + 17, f"{tick:.4g}", "text-anchor='middle'"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, GREY))
    for level, _ in panel.rules:
        parts.append(_line(LEFT, vertical(level), WIDTH - RIGHT, vertical(level), GREY, "stroke-dasharray='5 4'"))
    curves = [part for curve in panel.curves for part in _curve(curve, horizontal, vertical)]
    around = f"text-anchor='end' fill='{GREY}' font-size='11' paint-order='stroke' stroke='{PAPER}' stroke-width='3'"
    return parts + curves + [_text(WIDTH - RIGHT, vertical(y) - 4, words, around) for y, words in panel.rules if words]


def _axes(panel: Panel) -> tuple[_Axis, _Axis]:
    x = [value for curve in panel.curves for value in curve.x]
    y = [v for c in panel.curves for values in (c.y, c.low or (), c.high or ()) for v in values if math.isfinite(v)]
    low, high = panel.y_range or _widened(min(y), max(y), 0.05)
    return (_Axis(*_widened(min(x), max(x), 0.0), LEFT, WIDTH - RIGHT), _Axis(low, high, HEIGHT - BOTTOM, TOP))


def _widened(low: float, high: float, share: float) -> tuple[float, float]:
    margin = (high - low) * share if high > low else max(abs(high), 1.0) / 2
    return low - margin, high + margin


def _curve(curve: Curve, horizontal: _Axis, vertical: _Axis) -> list[str]:
    points = [(horizontal(x), vertical(y)) for x, y in zip(curve.x, curve.y, strict=True)]
    ends = [] if curve.low is None or curve.high is None else list(zip(curve.x, curve.low, curve.high, strict=True))
    ends = [(horizontal(x), vertical(a), vertical(b)) for x, a, b in ends if math.isfinite(a) and math.isfinite(b)]
    if not curve.width:
        bars = [_line(x, a, x, b, curve.color, "stroke-width='1.5'") for x, a, b in ends]
        return [*bars, *(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{curve.color}'/>" for x, y in points)]
    around = [(x, a) for x, a, _ in ends] + [(x, b) for x, _, b in reversed(ends)]
    band = [f"<polygon points='{_path(around)}' fill='{curve.color}' fill-opacity='0.16'/>"] if around else []
    dash = " stroke-dasharray='6 4'" if curve.dashed else ""
    look = f"fill='none' stroke='{curve.color}' stroke-width='{curve.width:g}'{dash}"
    return [*band, f"<polyline points='{_path(points)}' {look}/>"]


def _fitting(words: str, size: float) -> str:
    """Return the font size at which words fit above the axes, no more than this one."""
    return f"{min(size, (WIDTH - LEFT - 4) / (GLYPH * max(1, len(words)))):.3g}"


def _legend(curves: Sequence[Curve], width: float, top: float) -> tuple[list[str], int]:
    """Return the entries, as many in a row as there is room for, and the number of rows."""
    parts, x, row = [], float(LEFT), 0
    for curve in curves:
        wide = 28 + 12 * GLYPH * len(curve.name)
        if x > LEFT and x + wide > width:
            x, row = float(LEFT), row + 1
        y = top + (row + 0.5) * LEGEND
        dash = "stroke-dasharray='6 4'" if curve.dashed else ""
        parts.append(_line(x, y, x + 22, y, curve.color, f"stroke-width='{curve.width or 4:g}' {dash}".rstrip()))
        parts.append(_text(x + 28, y + 4, curve.name))
        x += wide + 22
    return parts, row + 1


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(x1: float, y1: float, x2: float, y2: float, color: str, look: str = "") -> str:
    return f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{color}' {look}".rstrip() + "/>"


def _text(x: float, y: float, words: str, look: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {look}".rstrip() + f">{escape(words)}</text>"
