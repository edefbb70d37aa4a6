"""The arms of the study: ways of spending rollouts, and which of them are compared on the same pools."""

from dataclasses import dataclass

from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, SKY
from otb_analysis.types import Label


@dataclass(frozen=True)
class Arm:
    """One way of spending rollouts.

    Attributes:
        words: What it is, for tables and legends.
        estimator: Name in ESTIMATORS.
        prompts: Groups per update.
        group: Rollouts per group.
        color: Hex colour.
        follows: Takes c times the learning rate of this arm instead of one of its own, c the projection of `otb`.
    """

    words: str
    estimator: str
    prompts: int
    group: int
    color: str
    follows: str = ""

    @property
    def rollouts(self) -> int:
        """Rollouts per update."""
        return self.prompts * self.group


ARMS = {
    "otb4": Arm("otb, 16 × 4", "otb", 16, 4, ORANGE),
    "rloo4": Arm("rloo, 16 × 4", "rloo", 16, 4, SKY),
    "scaled4": Arm("c·rloo, 16 × 4", "rloo", 16, 4, GREY, follows="otb4"),
    "mean32": Arm("group mean, 16 × 32", "group_mean", 16, 32, BLUE),
    "rloo4-wide": Arm("rloo, 128 × 4", "rloo", 128, 4, GREEN),
    "otb4-wide": Arm("otb, 128 × 4", "otb", 128, 4, AMBER),
}
"""Prompts × rollouts of an update. The last three spend 512 rollouts on an update, the first three 64."""
LABELS: tuple[Label, ...] = (("otb", "proxy"), ("group_mean", "none"), ("rloo", "none"))
REFERENCE: Label = ("rloo", "none")
PAIRS = (
    ("otb4", "mean32"),
    ("rloo4", "mean32"),
    ("otb4", "rloo4"),
    ("otb4-wide", "mean32"),
    ("rloo4-wide", "mean32"),
    ("otb4-wide", "rloo4-wide"),
)
"""Updates that are compared on the same pools."""
SMALL_GROUP, LARGE_GROUP = 4, 32
