"""One look per estimator on all pages: colour by family, dash and marker by member.

Colours are Okabe and Ito's, which stay apart under the common colour-vision deficiencies; inside a family lightness,
dash and marker separate the members, and a leave-one-out form is the dashed twin of its self-inclusive form. Further
runs of one estimator have its hue and marker, with a lightness and a dash of their own.
"""

import colorsys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import root_scalar

GREY = "#6F7782"
BLUE, ORANGE, GREEN, PINK, AMBER, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#C98A00", "#56B4E9"


@dataclass(frozen=True)
class Style:
    """How one estimator or run is drawn everywhere."""

    color: str
    dash: str = "solid"
    symbol: str = "circle"

    @property
    def left_out(self) -> "Style":
        """The look of the leave-one-out form."""
        return Style(self.color, "dash", f"{self.symbol}-open")


ESTIMATOR_STYLES: dict[str, Style] = {
    "none": Style(GREY, "dot", "x"),
    "batch_mean": Style("#00436B", symbol="square"),
    "group_mean": Style(BLUE),
    "rloo": Style(BLUE, "dash", "circle-open"),
    "grpo": Style(SKY, symbol="square"),
    "james_stein": Style(SKY, "dash", "square-open"),
    "energy_across_loo": Style("#00615A", "dash", "bowtie-open"),
    "energy_regression": Style("#00615A", symbol="bowtie"),
    "blend_otb_regression": Style("#A34E00", symbol="bowtie"),
    "opo": Style("#3D5A98", symbol="diamond-tall"),
    "classic_optimal": Style("#4C6B1F", symbol="triangle-up"),
    "sequence_optimal": Style(GREEN, symbol="triangle-up"),
    "otb": Style(ORANGE, symbol="diamond"),
    "otb_carry": Style("#8F3B00", symbol="diamond"),
    "otb_turn": Style("#F0905A", symbol="diamond"),
    "token_optimal": Style(AMBER, symbol="star"),
    "energy_ema": Style("#8A6A00", symbol="star"),
    "position_optimal": Style("#5E4B00", symbol="hexagon"),
    "opob": Style("#7C9440", symbol="triangle-down"),
    "value": Style(PINK, symbol="pentagon"),
    "tvm": Style("#8E4A75", symbol="pentagon"),
    "tempo": Style("#7A5CA8", symbol="hourglass"),
    "trloo": Style("#2C7FB8", "dash", "cross-open"),
}
WITH_TWIN = "batch_mean opo classic_optimal sequence_optimal otb otb_carry otb_turn token_optimal energy_ema tempo"
ESTIMATOR_STYLES |= {f"{name}_loo": ESTIMATOR_STYLES[name].left_out for name in WITH_TWIN.split()}
FURTHER_DASHES = ("dot", "dashdot", "longdashdot", "longdash")
"""Dashes that further runs choose from; solid and dash tell an estimator from its leave-one-out form."""

SHADES = (0.11, 0.21, 0.4)
"""Luminances that further runs choose from: each has a contrast above 2 with a white and with a dark page."""

FALLBACK_STYLES = (Style("#5B6770"), Style("#93764A"), Style("#5F7F6B"), Style("#86607D"))


def estimator_style(name: str) -> Style:
    """Return the colour, dash and marker of an estimator; other names get a muted style, always the same one."""
    if name in ESTIMATOR_STYLES:
        return ESTIMATOR_STYLES[name]
    if (twin := name.removesuffix("_loo")) != name:
        return estimator_style(twin).left_out
    return FALLBACK_STYLES[sum(name.encode()) % len(FALLBACK_STYLES)]


def run_styles(estimators: Mapping[str, str]) -> dict[str, Style]:
    """Return one style per run: its training estimator's, with another lightness and dash from the second run on.

    Hue and marker stay the estimator's. Further runs of one colour have six looks before one returns.
    """
    seen: set[Style] = set()
    further: dict[str, int] = {}
    styles = {}
    for run, estimator in estimators.items():
        base = estimator_style(estimator)
        # Counted by colour: further runs of a leave-one-out form differ from those of its twin, too.
        turn = further.setdefault(base.color, 0)
        styles[run] = _further(base, turn) if base in seen else base
        further[base.color] += base in seen
        seen.add(base)
    return styles


def _further(base: Style, turn: int) -> Style:
    """Return the look of a further run: two lightnesses and three dashes in turn make six looks."""
    hue, light, saturation = colorsys.rgb_to_hls(*(int(base.color[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    luminance = _luminance(hue, light, saturation)
    shades = sorted(SHADES, key=lambda shade: -abs(np.cbrt(shade) - np.cbrt(luminance)))[
        :2
    ]  # L* goes with the cube root
    wanted = shades[turn % 2]
    lightness = root_scalar(lambda x: _luminance(hue, x, saturation) - wanted, bracket=(0.0, 1.0), xtol=1e-4).root
    color = "#" + "".join(f"{round(255 * part):02X}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))
    dashes = [dash for dash in FURTHER_DASHES if dash != base.dash]
    return Style(color, dashes[turn % 3], base.symbol)


def _luminance(hue: float, light: float, saturation: float) -> float:
    """Return the luminance of a colour of sRGB: 0.2126 R + 0.7152 G + 0.0722 B in linear light."""
    parts = np.array(colorsys.hls_to_rgb(hue, light, saturation))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
