"""What the pools say: every entry's variance and efficiency, at every group size and size of the update."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otb_analysis.study import Cell, Tables
from otb_analysis.training.runtime.progress import Bar

ALONE = (
    *("none", "group_mean", "grpo", "rloo", "opo", "opo_loo", "classic_optimal", "classic_optimal_loo"),
    *("sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "otb_carry", "otb_carry_loo", "token_optimal"),
    *("token_optimal_loo", "energy_ema", "energy_ema_loo", "tempo", "tempo_loo", "value"),
)
"""Entries that look at one prompt at a time. `trloo`, `otb_turn` and `tvm` are `rloo`, `otb` and `value` here."""
HALF = "0.5*otb+0.5*energy_regression"
ACROSS = ("batch_mean", "batch_mean_loo", "james_stein", "energy_across_loo", "energy_regression", HALF)
"""Entries that look at the other prompts: in batches of as many prompts as the update that is quoted."""
EXACT = ("sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "token_optimal", "token_optimal_loo")
"""Entries measured with exact norms, too; all others that take energies have the proxy, as published."""
OFFSET = ("none", "otb", "otb_loo", "token_optimal", "token_optimal_loo", "energy_ema", "energy_ema_loo", HALF)
"""Entries that rewards of ±1 change, which are rewards of 0 and 1 less ½, doubled: those whose baseline can be 0."""
UPDATES = (8, 32, 128, 1024)
"""Prompts of the update that efficiency is stated for; the second heads the page."""
BEST = "energy_regression"
AGAINST = ("otb", "rloo", "sequence_optimal", "none", "value")
"""The question of the study: is `BEST` ahead of each of these, with the proxy and rewards of 0 and 1?"""
ASKED_SIZES = (4, 8)
MARGIN = 0.05
"""A ratio of efficiencies whose 95 % interval lies within 1 ± this is called equal; one that leaves out 1, different."""
FEWEST = 1 / 3
"""An absolute efficiency is shown where measured prompts are at least this share of the noise scale."""


@dataclass(frozen=True)
class Size:
    """How much is compared."""

    wide: tuple[int, ...] = (2, 4, 8, 16)  # Rollouts of a group
    deep: tuple[int, ...] = (4, 32)
    shuffles: int = 2  # Cuts into groups


FULL = Size()
SMALL = Size((2, 4), (4,), shuffles=1)
CONSTANTS: dict[str, Any] = {
    "alone": list(ALONE), "across": list(ACROSS), "exact": list(EXACT), "offset": list(OFFSET), "updates": list(UPDATES),
}  # fmt: skip


def comparison(cell: Cell, size: Size, work: Path, bar: Bar) -> Tables:
    """Compare every entry on the pools of a policy."""
    raise NotImplementedError
