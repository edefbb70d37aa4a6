"""Progress of long work: bars on a terminal, a plain line every 10 s elsewhere; see `phases`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from otb_analysis.phases import NOTES, OPEN, Phase, duration

REFRESH = 0.5
"""Seconds between two pictures on a terminal."""
WIDE, LEFT = 110, 21
"""Characters of a terminal with room for long bars, and of the longest time left."""
REPORT = 0.5
"""Seconds between two reports to another process."""
LINE_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""
AT_ONCE = 1.0
"""Phases shorter than this many seconds are not shown, so that the picture does not flicker."""

Stacks = Callable[[], Sequence[Sequence[Phase]]]
"""Gives the open phases of each process that works, outermost first."""


@dataclass(frozen=True)
class Row:
    """One line of the picture; `share` is what is done of all, None where that is not known."""

    text: str
    share: float | None
    elapsed: float
    remaining: str  # The time left in words, empty where nothing is known

    @property
    def line(self) -> str:
        """The row as plain text."""
        return ", ".join(filter(None, (self.text, self.remaining)))


def rows(stack: Sequence[Phase], now: float) -> list[Row]:
    """Return the whole work in one row, and below it, joined in one, the phases inside it."""
    lines = [_row(part, now) for part in (stack[:1], stack[1:]) if part]
    return lines[:1] + [row for row in lines[1:] if row.elapsed >= AT_ONCE]


def _row(stack: Sequence[Phase], now: float) -> Row:
    known = [phase for phase in stack if phase.left(now) is not None]
    timed = known[-1] if known else stack[-1]
    left = timed.left(now)
    share = timed.done / timed.total if timed.total else None
    if share is None and left is not None and timed.expected:
        share = 1 - left / timed.expected
    text = ": ".join(phase.text or phase.name for phase in stack)
    last = stack[-1]
    if last.total and last.unit:
        text += f", {last.unit} {min(last.done + 1, last.total):,.0f} of {'at most ' * last.at_most}{last.total:,.0f}"
    remaining = "" if left is None else f"{'at most ' * timed.at_most}{duration(left)} left"
    return Row(text, share, now - stack[0].began, remaining)


@contextmanager
def shown(console: Console | None = None, stacks: Stacks = lambda: [OPEN]) -> Iterator[None]:
    """Show what goes on while the block runs, and every note that it leaves."""
    # Piped output stays clean: where stdout is no terminal, progress goes to stderr.
    screen = console or (Console() if sys.stdout.isatty() else Console(stderr=True))
    live = Live(console=screen, auto_refresh=False, transient=True, redirect_stdout=screen.file is sys.stdout)
    began = monotonic()

    def tell() -> None:
        while NOTES:
            screen.print(Text(NOTES.popleft()), soft_wrap=True)

    def draw() -> None:
        tell()
        if monotonic() - began > AT_ONCE:
            live.start()
            live.update(_picture(screen.width, stacks()), refresh=True)

    def write() -> None:
        now = monotonic()
        for shown_rows in filter(None, (rows(list(stack), now) for stack in stacks())):
            line = " · ".join(row.line for row in shown_rows)
            screen.print(Text(f"[{duration(now - began)}] {line}"), soft_wrap=True)

    NOTES.clear()
    try:
        if screen.is_terminal and not screen.is_dumb_terminal:
            with _repeated(draw, REFRESH):
                yield
        else:
            with _repeated(tell, REFRESH), _repeated(write, LINE_EVERY):
                yield
    finally:
        with suppress(Exception):
            live.stop()
            tell()


@contextmanager
def reported(send: Callable[[list[Phase], list[str]], None]) -> Iterator[None]:
    """Send what goes on in the block, and its notes, twice a second: to a process that has the terminal."""

    def report() -> None:
        send(list(OPEN), [NOTES.popleft() for _ in range(len(NOTES))])

    NOTES.clear()
    try:
        with _repeated(report, REPORT):
            yield
    finally:
        with suppress(Exception):
            report()


@contextmanager
def _repeated(work: Callable[[], None], seconds: float) -> Iterator[None]:
    """Do some work every so often in a thread while the block runs; an error in it ends it, and never the block."""
    over = Event()

    def go_on() -> None:
        with suppress(Exception):
            while not over.wait(seconds):
                work()

    thread = Thread(target=go_on, daemon=True, name="otb progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _picture(width: int, stacks: Sequence[Sequence[Phase]]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    wide = width >= WIDE
    size = 20 if wide else 8
    for column in (size, 8, LEFT if wide else None):
        table.add_column(width=column, no_wrap=True)
    table.add_column()  # the one that gives way in a narrow terminal
    now = monotonic()
    for row in (row for stack in stacks for row in rows(list(stack), now)):
        known = row.share is not None
        bar = ProgressBar(total=1.0 if known else None, completed=row.share or 0.0, width=size, pulse=not known)
        text = Text(row.text, no_wrap=True, overflow="ellipsis")
        table.add_row(bar, duration(row.elapsed), row.remaining, text)
    return table
