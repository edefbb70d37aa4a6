"""One look per estimator on all pages: colour by family, dash and marker by member.

Colours are Okabe and Ito's, which stay apart under the common colour-vision deficiencies; inside a family lightness,
dash and marker separate the members, and a leave-one-out form is the dashed twin of its self-inclusive form. Where
runs are compared, a run has a colour of its own and the dash of its estimator.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GREY = "#6F7782"
INK, PAPER, GRID = "#1B2229", "#FFFFFF", "#E3E6EA"
"""Text, ground and lines of a picture on paper."""
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
RUN_COLORS = (BLUE, ORANGE, GREEN, PINK, AMBER, "#7A5CA8", SKY, GREY)
"""One per run, in the order in which runs are chosen."""

FURTHER_DASHES = ("dashdot", "longdash", "longdashdot")
"""Dashes of further runs of a colour; solid, dash and dot tell estimators apart."""

RUN_SYMBOLS = ("circle", "square", "diamond", "triangle-up")

FALLBACK_STYLES = (Style("#5B6770"), Style("#93764A"), Style("#5F7F6B"), Style("#86607D"))


def estimator_style(name: str) -> Style:
    """Return the colour, dash and marker of an estimator; other names get a muted style, always the same one."""
    if name in ESTIMATOR_STYLES:
        return ESTIMATOR_STYLES[name]
    if (twin := name.removesuffix("_loo")) != name:
        return estimator_style(twin).left_out
    return FALLBACK_STYLES[sum(name.encode()) % len(FALLBACK_STYLES)]


def run_styles(estimators: Mapping[str, str]) -> dict[str, Style]:
    """Return one style per run: a colour of its own, and the dash of its estimator.

    From the ninth run on colours come back, with another dash and marker.
    """
    styles = {}
    for turn, (run, estimator) in enumerate(estimators.items()):
        own, again = estimator_style(estimator) if estimator else Style(GREY), turn // len(RUN_COLORS)
        dash = own.dash if not again else FURTHER_DASHES[(again - 1) % len(FURTHER_DASHES)]
        styles[run] = Style(RUN_COLORS[turn % len(RUN_COLORS)], dash, RUN_SYMBOLS[again % len(RUN_SYMBOLS)])
    return styles
