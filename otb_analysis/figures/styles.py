"""One look per estimator on all pages: colour by family, dash and marker by member.

Colours are Okabe and Ito's, which stay apart under the common colour-vision deficiencies; inside a family lightness,
dash and marker separate the members, and a leave-one-out form is the dashed twin of its self-inclusive form.
"""

import colorsys
import math
from collections.abc import Mapping
from dataclasses import dataclass

GREY = "#6F7782"
BLUE, ORANGE, GREEN, PINK, AMBER, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#C98A00", "#56B4E9"


@dataclass(frozen=True)
class Style:
    """How one estimator or run is drawn everywhere.

    Attributes:
        color: Hex colour.
        dash: Plotly dash name.
        symbol: Plotly marker name.
    """

    color: str
    dash: str = "solid"
    symbol: str = "circle"


ESTIMATOR_STYLES: dict[str, Style] = {
    "none": Style(GREY, "dot", "x"),
    "batch_mean": Style("#00436B", symbol="square"),
    "batch_mean_loo": Style("#00436B", "dash", "square-open"),
    "group_mean": Style(BLUE),
    "rloo": Style(BLUE, "dash", "circle-open"),
    "grpo": Style(SKY, symbol="square"),
    "james_stein": Style(SKY, "dash", "square-open"),
    "opo": Style("#3D5A98", symbol="diamond-tall"),
    "opo_loo": Style("#3D5A98", "dash", "diamond-tall-open"),
    "classic_optimal": Style("#4C6B1F", symbol="triangle-up"),
    "classic_optimal_loo": Style("#4C6B1F", "dash", "triangle-up-open"),
    "sequence_optimal": Style(GREEN, symbol="triangle-up"),
    "sequence_optimal_loo": Style(GREEN, "dash", "triangle-up-open"),
    "otb": Style(ORANGE, symbol="diamond"),
    "otb_loo": Style(ORANGE, "dash", "diamond-open"),
    "otb_carry": Style("#8F3B00", symbol="diamond"),
    "otb_carry_loo": Style("#8F3B00", "dash", "diamond-open"),
    "otb_turn": Style("#F0905A", symbol="diamond"),
    "otb_turn_loo": Style("#F0905A", "dash", "diamond-open"),
    "token_optimal": Style(AMBER, symbol="star"),
    "token_optimal_loo": Style(AMBER, "dash", "star-open"),
    "energy_ema": Style("#8A6A00", symbol="star"),
    "energy_ema_loo": Style("#8A6A00", "dash", "star-open"),
    "position_optimal": Style("#5E4B00", symbol="hexagon"),
    "opob": Style("#7C9440", symbol="triangle-down"),
    "value": Style(PINK, symbol="pentagon"),
    "tvm": Style("#8E4A75", symbol="pentagon"),
    "tempo": Style("#7A5CA8", symbol="hourglass"),
    "tempo_loo": Style("#7A5CA8", "dash", "hourglass-open"),
    "trloo": Style("#2C7FB8", "dash", "cross-open"),
}
FALLBACK_STYLES = (Style("#5B6770"), Style("#93764A"), Style("#5F7F6B"), Style("#86607D"))


def estimator_style(name: str) -> Style:
    """Return the colour, dash and marker of an estimator; an unknown name gets a muted style, always the same one.

    Args:
        name: Name in the estimator dictionary.
    """
    return ESTIMATOR_STYLES.get(name, FALLBACK_STYLES[sum(name.encode()) % len(FALLBACK_STYLES)])


def run_styles(estimators: Mapping[str, str]) -> dict[str, Style]:
    """Return one style per run: its training estimator's colour, lightness telling runs of one estimator apart.

    Args:
        estimators: Run name to the name of the estimator that trains it.
    """
    seen: dict[str, int] = {}
    styles = {}
    for run, estimator in estimators.items():
        base = estimator_style(estimator)
        # Dash already tells a leave-one-out form from its twin; only like runs need another shade.
        kind = base.color + base.dash
        earlier = seen.get(kind, 0)
        seen[kind] = earlier + 1
        styles[run] = Style(_shade(base.color, earlier), base.dash, base.symbol)
    return styles


def _shade(color: str, steps: int) -> str:
    """Lighten and darken in turn: 0 keeps the colour, 1 is lighter, 2 darker, 3 lighter still."""
    if steps == 0:
        return color
    hue, light, saturation = colorsys.rgb_to_hls(*(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    sign = 1 if steps % 2 else -1
    light = min(0.8, max(0.15, light + sign * 0.16 * math.ceil(steps / 2)))
    return "#" + "".join(f"{round(255 * c):02X}" for c in colorsys.hls_to_rgb(hue, light, saturation))
