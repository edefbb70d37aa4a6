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
    """One line of the picture.

    Attributes:
        at_most: True where it may be less.
    """

    text: str
    share: float | None
    elapsed: float
    left: float | None
    at_most: bool

    @property
    def line(self) -> str:
        """The row as plain text."""
        return ", ".join(filter(None, (self.text, remaining(self))))


def remaining(row: Row) -> str:
    """Return the time left in words; empty where nothing is known."""
    return "" if row.left is None else f"{'at most ' if row.at_most else ''}{duration(row.left)} left"


def rows(stack: Sequence[Phase], now: float) -> list[Row]:
    """Return the whole work in one row, and below it, joined in one, the phases inside it."""
    lines = [_row(part, now) for part in (stack[:1], stack[1:]) if part]
    return lines[:1] + [row for row in lines[1:] if row.elapsed >= AT_ONCE]


def _row(stack: Sequence[Phase], now: float) -> Row:
    known = [phase for phase in stack if phase.left(now) is not None]
    timed = known[-1] if known else stack[-1]
    share = timed.done / timed.total if timed.total else None
    if share is None and (left := timed.left(now)) is not None and timed.expected:
        share = 1 - left / timed.expected
    text = ": ".join(phase.text or phase.name for phase in stack)
    last = stack[-1]
    if last.total and last.unit:
        text += f", {last.unit} {min(last.done + 1, last.total):,.0f} of {'at most ' * last.at_most}{last.total:,.0f}"
    return Row(text, share, now - stack[0].began, timed.left(now), timed.at_most)


@contextmanager
def shown(console: Console | None = None, stacks: Stacks = lambda: [OPEN]) -> Iterator[None]:
    """Show what goes on while the block runs, and every note that it leaves."""
    NOTES.clear()
    watcher = _Watcher(console or progress_console(), stacks)
    watcher.start()
    try:
        yield
    finally:
        watcher.end()


def progress_console() -> Console:
    """Return stdout where it is a terminal, else stderr, so that piped output stays clean."""
    return Console() if sys.stdout.isatty() else Console(stderr=True)


@contextmanager
def reported(send: Callable[[list[Phase], list[str]], None]) -> Iterator[None]:
    """Send what goes on in the block, and its notes, twice a second: to a process that has the terminal."""
    over = Event()

    def report() -> None:
        with suppress(Exception):
            send(list(OPEN), [NOTES.popleft() for _ in range(len(NOTES))])

    def go_on() -> None:
        while not over.wait(REPORT):
            report()

    NOTES.clear()
    thread = Thread(target=go_on, daemon=True, name="otb progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        report()


class _Watcher(Thread):
    def __init__(self, console: Console, stacks: Stacks):
        super().__init__(daemon=True, name="otb progress")
        self.console, self.stacks, self.over = console, stacks, Event()
        self.began = self.printed = monotonic()

    def run(self) -> None:
        """Draw until the work is over; an error here never stops the work."""
        draws = self.console.is_terminal and not self.console.is_dumb_terminal
        with suppress(Exception):
            self._draw() if draws else self._write()

    def end(self) -> None:
        """Remove the picture and print the notes that are left."""
        self.over.set()
        self.join()
        with suppress(Exception):
            self._tell()

    def _draw(self) -> None:
        live = Live(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=self.console.file is sys.stdout
        )
        while not self.over.wait(REFRESH):
            self._tell()
            if not live.is_started and monotonic() - self.began > AT_ONCE:
                live.start()
            if live.is_started:
                live.update(self._picture(), refresh=True)
        live.stop()

    def _picture(self) -> Table:
        table = Table.grid(padding=(0, 1, 0, 0))
        wide = self.console.width >= WIDE
        size = 20 if wide else 8
        for width in (size, 8, LEFT if wide else None):
            table.add_column(width=width, no_wrap=True)
        table.add_column()  # the one that gives way in a narrow terminal
        now = monotonic()
        for row in (row for stack in self.stacks() for row in rows(list(stack), now)):
            share = row.share
            bar = ProgressBar(
                total=None if share is None else 1.0, completed=share or 0.0, width=size, pulse=share is None
            )
            table.add_row(bar, duration(row.elapsed), remaining(row), Text(row.text, no_wrap=True, overflow="ellipsis"))
        return table

    def _write(self) -> None:
        while not self.over.wait(REFRESH):
            self._tell()
            now = monotonic()
            if now - self.printed < LINE_EVERY:
                continue
            self.printed = now
            for stack in self.stacks():
                if lines := rows(list(stack), now):
                    line = " · ".join(row.line for row in lines)
                    self._print(f"[{duration(now - self.began)}] {line}")

    def _tell(self) -> None:
        while NOTES:
            self._print(NOTES.popleft())

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)
