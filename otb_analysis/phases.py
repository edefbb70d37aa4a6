"""The progress of long work, for a progress display.

Work opens phases and counts what is done in them. These are a few assignments, which cannot fail or block. The display
(`commands.screen`) runs in its own thread, so a slow or broken screen never affects the work.
"""

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
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

    def __call__(self, done: float, total: float, text: str) -> None:
        """Report as `Bar` does: what is done of all, and a text to show."""
        self.done, self.total, self.text = done, total, text


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
    """Begin to count in the innermost phase, if there is one."""
    if OPEN:
        OPEN[-1].done, OPEN[-1].total, OPEN[-1].unit, OPEN[-1].at_most = 0.0, total, unit, at_most


def advance(units: float = 1.0) -> None:
    """Say that some more units of the innermost phase are done."""
    if OPEN:
        OPEN[-1].done += units


def counted(items: Collection[T], unit: str) -> Iterator[T]:
    """Yield items one by one, counting those that are done in the innermost phase."""
    count_to(len(items), unit)
    for item in items:
        yield item
        advance()


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield items, each made in a thread beside the work on the one before: reading goes on while files are written."""

    def begun() -> Future[T | None]:
        item = Future[T | None]()

        def make() -> None:
            try:
                item.set_result(next(items, None))
            except BaseException as error:  # raised where the item is asked for
                item.set_exception(error)

        Thread(target=make, daemon=True).start()  # nothing waits for it once the work is stopped
        return item

    coming = begun()
    while (item := coming.result()) is not None:
        coming = begun()
        yield item


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
