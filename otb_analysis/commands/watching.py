"""Progress of long work as bars on a terminal, one for each open phase; a pipe gets the notes alone. See `phases`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from otb_analysis.phases import NOTES, OPEN, Phase

REFRESH = 0.5
"""Seconds between two pictures on a terminal, and between two reports to another process."""
AT_ONCE = 1.0
"""Phases shorter than this many seconds are not shown, so that the picture does not flicker."""
MEMORY = 3600.0
"""Seconds of which the pace is taken: of steps that take minutes the last thirty seconds, as usual, say nothing."""

Stacks = Callable[[], Sequence[Sequence[Phase]]]
"""Gives the open phases of each process that works, outermost first."""


class Bars(Progress):
    """One bar for each open phase, those inside another one below it."""

    def __init__(self, console: Console) -> None:
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = (BarColumn(20 if console.width >= 110 else 8), TimeElapsedColumn(), TimeRemainingColumn(), text)
        super().__init__(
            *columns, console=console, auto_refresh=False, transient=True, speed_estimate_period=MEMORY,
            redirect_stdout=console.file is sys.stdout, redirect_stderr=console.file is sys.stderr,
        )  # fmt: skip
        self.of_phase: dict[tuple[int, int, str], TaskID] = {}

    def show(self, stacks: Sequence[Sequence[Phase]]) -> None:
        """Draw these phases, without those inside that began only just now."""
        now = monotonic()
        phases = {
            (process, depth, phase.name): phase
            for process, stack in enumerate(stacks)
            for depth, phase in enumerate(list(stack))
            if depth == 0 or now - phase.began >= AT_ONCE
        }
        for gone in self.of_phase.keys() - phases.keys():
            self.remove_task(self.of_phase.pop(gone))
        for key, phase in phases.items():
            if key not in self.of_phase:
                self.of_phase[key] = self.add_task("", total=None)
                self.tasks[-1].start_time = phase.began
            # What is not counted lasts as long as the last time, or as forecast.
            uncounted = phase.total is None and phase.expected is not None
            total, done = (phase.expected, now - phase.began) if uncounted else (phase.total, phase.done)
            self.update(self.of_phase[key], total=total, completed=done, description="  " * key[1] + words(phase))
        self.start()
        self.refresh()


def words(phase: Phase) -> str:
    """Return what a phase is doing: its name or text, and what is counted."""
    text = phase.text or phase.name
    if not phase.total or not phase.unit:
        return text
    at, at_most = min(phase.done + 1, phase.total), "at most " * phase.at_most
    return f"{text}, {phase.unit} {at:,.0f} of {at_most}{phase.total:,.0f}"


@contextmanager
def shown(console: Console | None = None, stacks: Stacks = lambda: [OPEN]) -> Iterator[None]:
    """Show what goes on while the block runs, and every note that it leaves."""
    # Piped output stays clean: where stdout is no terminal, progress and notes go to stderr.
    screen = console or (Console() if sys.stdout.isatty() else Console(stderr=True))
    bars, began = Bars(screen), monotonic()
    terminal = screen.is_terminal and not screen.is_dumb_terminal

    def tell() -> None:
        while NOTES:
            screen.print(Text(NOTES.popleft()), soft_wrap=True)

    def draw() -> None:
        tell()
        if terminal and monotonic() - began > AT_ONCE:
            bars.show(stacks())

    NOTES.clear()
    try:
        with _repeated(draw):
            yield
    finally:
        with suppress(Exception):
            if bars.live.is_started:
                bars.stop()
            tell()


@contextmanager
def reported(send: Callable[[list[Phase], list[str]], None]) -> Iterator[None]:
    """Send what goes on in the block, and its notes, twice a second: to a process that has the terminal."""

    def report() -> None:
        send(list(OPEN), [NOTES.popleft() for _ in range(len(NOTES))])

    NOTES.clear()
    try:
        with _repeated(report):
            yield
    finally:
        with suppress(Exception):
            report()


@contextmanager
def _repeated(work: Callable[[], None]) -> Iterator[None]:
    """Do some work every so often in a thread while the block runs; an error in it ends it, and never the block."""
    over = Event()

    def go_on() -> None:
        with suppress(Exception):
            while not over.wait(REFRESH):
                work()

    thread = Thread(target=go_on, daemon=True, name="otb progress")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
