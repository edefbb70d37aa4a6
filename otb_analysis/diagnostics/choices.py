"""Records of `advice`: what a run can train with, how it compares with the present choice, and what is advised."""

from dataclasses import dataclass

from otb_analysis.statistics import Interval

SIZES_UNKNOWN = (
    "Group sizes were not compared: the run has no gradients of smaller groups, which the level exact measures where "
    "groups of at least 4 can be halved (--measure.exact.every 10 --measure.subgroups otb)."
)

NOT_HALVED = "Group sizes were not compared: groups of {} cannot be cut into equal groups of at least 2."


@dataclass(frozen=True)
class Choice:
    """An estimator with its energies, in groups of one size."""

    estimator: str
    energy_source: str
    size: int

    def __str__(self) -> str:
        """Return how it is named in a sentence."""
        energies = "" if self.energy_source == "none" else f" ({self.energy_source} energies)"
        return f"{self.estimator}{energies} in groups of {self.size}"


@dataclass(frozen=True)
class Advised:
    """One candidate beside the present choice."""

    choice: Choice
    efficiency: float | None  # Share of an update that points along ∇J, None where it is undefined
    # Efficiency over that of the present choice with its simultaneous interval, None where it is undefined.
    ratio: Interval | None

    @property
    def better(self) -> bool:
        """True when the simultaneous interval lies above 1."""
        return self.ratio is not None and self.ratio.low is not None and self.ratio.low > 1

    @property
    def worse(self) -> bool:
        """True when it lies below 1."""
        return self.ratio is not None and self.ratio.high is not None and self.ratio.high < 1


@dataclass(frozen=True)
class Advice:
    """What to train with instead, if anything was shown to be better."""

    present: Choice
    best: Advised | None  # The most efficient of the candidates shown to be better, None where none was
    candidates: tuple[Advised, ...]  # All of them, most efficient first
    n_rollouts: int
    n_clusters: int
    reason: str

    @property
    def sizes(self) -> tuple[int, ...]:
        """Group sizes among the candidates, smallest first."""
        return tuple(sorted({one.choice.size for one in self.candidates}))

    @property
    def sizes_line(self) -> str:
        """One sentence: which group sizes were compared, or what measures them."""
        if len(self.sizes) < 2:
            whole = self.present.size
            return SIZES_UNKNOWN if whole >= 4 and whole % 2 == 0 else NOT_HALVED.format(whole)
        *smaller, whole = self.sizes
        return (
            f"Groups of {', '.join(map(str, smaller))} and {whole} were compared at the same {self.n_rollouts} "
            "rollouts, smaller ones with more prompts."
        )
