"""How far an alarm can be trusted: each detector's false alarms, and what it said of runs that collapsed.

False alarms are from docs/results/alarms.md, collapses from the table of detectors in studies/05_collapse/README.md; a
test compares the numbers with both.
"""

from dataclasses import dataclass

COLLAPSED = 79
"""Runs of study 05 that collapsed."""


@dataclass(frozen=True)
class Rates:
    """One detector; None where study 05 did not measure it."""

    false_alarms: float  # Largest share of simulated calm series of 50, 100, 200 or 500 steps in which it ever fires
    in_time: int | None = None  # Runs of study 05 that it called before they collapsed, of `COLLAPSED`
    at_all: int | None = None  # Those it called at any step
    stale: bool = False  # It calls old rollouts, in runs that had not collapsed too: no forecast


RATES = {
    "reward_fall": Rates(0.0, 15, 67),
    "vanished_gradient": Rates(0.0, 0, 33),
    "not_finite": Rates(0.0),
    "gradient_surge": Rates(0.014, 4, 5),
    "entropy_collapse": Rates(0.0, 0, 2),
    "entropy_rise": Rates(0.0, 24, 71),
    "length_drift": Rates(0.0, 0, 23),
    "zero_variance_groups": Rates(0.007, 0, 54),
    "ratio_tails": Rates(0.0, 79, 79, stale=True),
    "tail_index": Rates(0.001),
    "clip_fraction": Rates(0.003, 0, 0),
    "sampling_certificate": Rates(0.005, 79, 79, stale=True),
}


def false_alarms(detector: str) -> str:
    """Return the share of calm series in which a detector fires: ``1.4 %``."""
    return f"{RATES[detector].false_alarms:.1%}".replace("%", " %")


def foresight(detector: str) -> str:
    """Return in how many runs of study 05 a detector fired before the collapse, and at all."""
    rates = RATES[detector]
    if rates.in_time is None:
        return "not measured"
    both = f"{rates.in_time} of {COLLAPSED} before, {rates.at_all} at all"
    return f"{both}; calls old rollouts, not the collapse" if rates.stale else both
