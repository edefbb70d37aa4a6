"""Records of a comparison with one estimator: a verdict on each other one, and the conclusion from all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from otb_analysis.statistics.comparisons.alike import Alike
from otb_analysis.statistics.inference.intervals import Interval
from otb_analysis.types import Label

MARGIN = 0.15
"""Where the interval of a ratio lies within 1 ± this, the two hardly differ."""

Cause = Literal["", "no reference", "alone", "few prompts", "equal rewards", "noise"]
"""Why nothing could be tested; empty where something could."""


@dataclass(frozen=True)
class Verdict:
    """One estimator against the reference."""

    label: Label
    sf: Interval | None  # Ratio of variances at equal progress, 95 %; below 1 is better
    efficiency: Interval | None  # Ratio of efficiencies, 95 %; above 1 is better
    c_known: bool
    # Which of `sf` and `efficiency` differ from the reference, false discoveries controlled.
    differs_in: tuple[str, ...] = ()

    @property
    def tested(self) -> bool:
        """True where one of the two ratios has an interval."""
        return any(ratio is not None and ratio.p_value is not None for ratio in (self.sf, self.efficiency))

    @property
    def within(self) -> bool:
        """True where every interval there is lies within 1 ± 15 %."""
        ends = [(r.low, r.high) for r in (self.sf, self.efficiency) if r is not None]
        return self.tested and all(
            low is not None and high is not None and low >= 1 - MARGIN and high <= 1 + MARGIN for low, high in ends
        )

    @property
    def better(self) -> bool:
        """True where it differs from the reference, and is ahead in every measure in which it does."""
        return bool(self.differs_in) and all(self._ahead(name) for name in self.differs_in)

    @property
    def worse(self) -> bool:
        """True where it differs from the reference, and is behind in every measure in which it does."""
        return bool(self.differs_in) and not any(self._ahead(name) for name in self.differs_in)

    def _ahead(self, name: str) -> bool:
        ratio = self.sf if name == "sf" else self.efficiency
        return ratio is not None and (ratio.estimate < 1 if name == "sf" else ratio.estimate > 1)


@dataclass(frozen=True)
class Signal:
    """How well ‖∇J‖² is known, which estimators without a proved projection are judged by."""

    positive: bool  # True where its estimate is positive, and stays so without any one prompt
    # About how many prompts would make it three standard errors long; None where its interval holds nothing positive. A
    # lower bound where the estimate itself is not positive.
    n_needed: int | None


@dataclass(frozen=True)
class Conclusion:
    """What is known of every estimator measured beside a reference; read by `figures.conclusion`, which says it."""

    against: Label
    n_prompts: int  # Independent prompts behind the intervals
    verdicts: tuple[Verdict, ...]  # One per estimator that is not a multiple of the reference, identical ones once
    alike: dict[Label, Alike]
    signal: Signal
    cause: Cause
    best: Verdict | None  # The best of those that are better, with intervals that hold after the selection
    worst: Verdict | None  # The farthest behind of those that are worse, likewise
    n_needed: int | None  # About how many prompts would decide on the undecided one with the lowest SF

    @property
    def tested(self) -> tuple[Verdict, ...]:
        """Those with an interval."""
        return tuple(v for v in self.verdicts if v.tested)

    @property
    def different(self) -> tuple[Verdict, ...]:
        """Those that differ from the reference at a false-discovery rate of 5 %."""
        return tuple(v for v in self.verdicts if v.differs_in)

    @property
    def within(self) -> tuple[Verdict, ...]:
        """Those that do not differ and whose intervals lie within ±15 % of 1."""
        return tuple(v for v in self.verdicts if v.within and not v.differs_in)

    @property
    def undecided(self) -> tuple[Verdict, ...]:
        """Those tested that neither differ nor lie within ±15 %."""
        return tuple(v for v in self.tested if not v.differs_in and not v.within)


def names(verdicts: Sequence[Verdict]) -> int:
    """Count estimators: one with proxy and with exact energies counts once."""
    return len({verdict.label[0] for verdict in verdicts})
