"""The progress of long work, for a progress display.

Work opens phases and counts what is done in them. These are a few assignments, which cannot fail or block. The display
(`commands.watching`) runs in its own thread, so a slow or broken screen never affects the work.
"""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Phase:
    """One part of the work that is going on; it can be called like a `Bar`."""

    name: str  # What it is
    total: float | None = None  # Units of it, where they are known
    unit: str = ""  # What is counted, in the singular
    at_most: bool = False  # True where the work may end long before `total`
    done: float = 0.0  # Units that are done
    text: str = ""  # Stands in place of the name, once something was reported
    expected: float | None = None  # Seconds that it took last time, or is forecast to take
    began: float = field(default_factory=monotonic)  # When it began
    counted_since: float = field(default_factory=monotonic)  # When counting began
    counted_from: float = 0.0  # What was done then
    moved: float = 0.0  # When the count last changed

    def __call__(self, done: float, total: float, text: str) -> None:
        """Report as `Bar` does: what is done of all, and a text to show."""
        if total != self.total or done < self.done:
            self.count_to(total, self.unit, done)
        self.done, self.text, self.moved = done, text, monotonic()

    def count_to(self, total: float, unit: str, done: float = 0.0) -> None:
        """Start counting again, with `done` of `total` units done."""
        self.total, self.unit = total, unit
        self.done = self.counted_from = done
        self.counted_since = self.moved = monotonic()

    def left(self, now: float) -> float | None:
        """Return the seconds left: by the pace so far, else by what was expected; None where nothing is known."""
        counted = self.done - self.counted_from
        if self.total and counted > 0:
            pace = (self.moved - self.counted_since) / counted
            return max(0.0, pace * (self.total - self.done) - (now - self.moved))
        if self.expected is not None and now - self.began < self.expected:
            return self.expected - (now - self.began)
        return None


OPEN: list[Phase] = []  # The phases that this process is in, outermost first
EXPECTED: dict[str, float] = {}  # Seconds that a phase of some name took last time, or is forecast to take
NOTES: deque[str] = deque(maxlen=100)  # Sentences to show once, oldest first; the display removes them


@contextmanager
def phase(name: str, total: float | None = None, unit: str = "", at_most: bool = False) -> Iterator[Phase]:
    """Open a phase for the block; its duration becomes the expected one of the next phase of that name."""
    depth = len(OPEN)
    here = Phase(name, total, unit, at_most, expected=EXPECTED.get(name))
    OPEN.append(here)
    try:
        yield here
        EXPECTED[name] = monotonic() - here.began
    finally:
        del OPEN[depth:]


def count_to(total: float, unit: str, at_most: bool = False) -> None:
    """Begin to count in the innermost phase, if there is one; see `Phase.count_to`."""
    if OPEN:
        OPEN[-1].count_to(total, unit)
        OPEN[-1].at_most = at_most


def advance(units: float = 1.0) -> None:
    """Say that some more units of the innermost phase are done."""
    if OPEN:
        OPEN[-1].done += units
        OPEN[-1].moved = monotonic()


def counted(items: Collection[T], unit: str) -> Iterator[T]:
    """Yield items one by one, counting those that are done in the innermost phase."""
    count_to(len(items), unit)
    for item in items:
        yield item
        advance()


def note(sentence: str) -> None:
    """Show a sentence once, on the progress display."""
    NOTES.append(sentence)


def plural(count: int, unit: str) -> str:
    """Return a count with its unit: 1 step, 3 steps."""
    return f"{count:,} {unit}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Return a time to read at a glance: 45 s, 3:05 min, 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    upper, lower = divmod(whole, 60) if whole < 3600 else divmod(whole // 60, 60)
    return f"{upper}:{lower:02d} {'min' if whole < 3600 else 'h'}"
