"""One line of the table of `otb bench engine`, and the candidate behind it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from otb_analysis.bench.engine_cases import LOOP, STEP
from otb_analysis.bench.timing import Timing
from otb_analysis.errors import InputError

HEADERS = ("model", "T", "what", "seconds", "median", "loop ÷ it", "medians", "× fwd+bwd", "MiB", "error")


@dataclass(frozen=True)
class EngineRow:
    """One line of the table.

    Attributes:
        size: Model.
        rollouts: N.
        tokens: T of each.
        name: What ran.
        seconds: Best time of one call; None if it was not measured.
        median_seconds: Median time.
        repeats: Repetitions.
        loop_ratio: Best time of the plain loop over `seconds`; None where no loop ran.
        loop_ratio_median: The same of medians.
        step_ratio: `seconds` over the best time of one forward and one backward pass.
        memory: Peak extra bytes of one call in a fresh process.
        error: Largest difference from float64 over the largest value (see the notes).
        remark: Why it was not measured.
    """

    size: str
    rollouts: int
    tokens: int
    name: str
    seconds: float | None = None
    median_seconds: float | None = None
    repeats: int = 0
    loop_ratio: float | None = None
    loop_ratio_median: float | None = None
    step_ratio: float | None = None
    memory: int | None = None
    error: float | None = None
    remark: str = ""

    @property
    def place(self) -> tuple[str, int, int]:
        """Model, N and T."""
        return self.size, self.rollouts, self.tokens

    @property
    def label(self) -> str:
        """The place in words: "S 128", or "S 8 × 128" for eight rollouts."""
        return f"{self.size} {self.length}"

    @property
    def length(self) -> str:
        """T, with N in front of it where there are several rollouts."""
        return str(self.tokens) if self.rollouts == 1 else f"{self.rollouts} × {self.tokens}"

    def timed(self, found: Mapping[str, Timing]) -> dict[str, Any]:
        """The fields that come from the timings of a place, by row name."""
        mine, loop = found[self.name], found.get(LOOP)
        return {
            "seconds": mine.minimum,
            "median_seconds": mine.median,
            "repeats": mine.repeats,
            "loop_ratio": None if loop is None else loop.minimum / mine.minimum,
            "loop_ratio_median": None if loop is None else loop.median / mine.median,
            "step_ratio": mine.minimum / found[STEP].minimum,
        }


class Recorder:
    """A candidate that remembers its last result, and the sentence with which it was refused."""

    def __init__(self, run: Callable[[], Any]):
        self.run, self.result, self.remark = run, None, ""

    def __call__(self) -> None:
        """Run unless it was refused before."""
        if self.remark:
            return
        try:
            self.result = self.run()
        except InputError as refusal:
            self.remark = str(refusal)


def cells(row: EngineRow) -> tuple[str, ...]:
    """Return a row as it is printed."""
    what = (row.size, row.length, row.name)
    if row.seconds is None:
        return (*what, "not measured", *["–"] * 6)
    memory = None if row.memory is None else row.memory / 2**20
    shown = (
        (row.seconds, ".3f"),
        (row.median_seconds, ".3f"),
        (row.loop_ratio, ".2f"),
        (row.loop_ratio_median, ".2f"),
        (row.step_ratio, ".2f"),
        (memory, ".0f"),
        (row.error, ".0e"),
    )
    return (*what, *("–" if value is None else format(value, form) for value, form in shown))
