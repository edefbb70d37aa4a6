"""What commands show: progress as bars, one for each open phase (see `phases`), and tables that fit the line.

A pipe gets the notes alone. A table that is too wide becomes several, and no number is cut.
"""

import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from textwrap import wrap
from threading import Event, Thread
from time import monotonic

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from otb_analysis.extras import require_models
from otb_analysis.phases import NOTES, OPEN, Phase, phase

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
        for key, one in phases.items():
            if key not in self.of_phase:
                self.of_phase[key] = self.add_task("", total=None)
                self.tasks[-1].start_time = one.began
            # What is not counted lasts as long as the last time, or as forecast.
            uncounted = one.total is None and one.expected is not None
            total, done = (one.expected, now - one.began) if uncounted else (one.total, one.done)
            self.update(self.of_phase[key], total=total, completed=done, description="  " * key[1] + phase_text(one))
        self.start()
        self.refresh()


def phase_text(phase: Phase) -> str:
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

    def draw() -> None:
        while NOTES:
            screen.print(Text(NOTES.popleft()), soft_wrap=True)
        if terminal and monotonic() - began > AT_ONCE:
            bars.show(stacks())

    try:
        with _repeated(draw):
            yield
    finally:
        with suppress(Exception):
            if bars.live.is_started:
                bars.stop()


@contextmanager
def reported(send: Callable[[list[Phase], list[str]], None]) -> Iterator[None]:
    """Send what goes on in the block, and its notes, twice a second: to a process that has the terminal."""
    with _repeated(lambda: send(list(OPEN), [NOTES.popleft() for _ in range(len(NOTES))])):
        yield


@contextmanager
def _repeated(work: Callable[[], None]) -> Iterator[None]:
    """Do some work every so often in a thread while the block runs, and once more at its end.

    An error in it ends the work, and never the block. Notes of earlier work are forgotten.
    """
    over = Event()
    NOTES.clear()

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
        with suppress(Exception):
            work()


PIPE, NARROWEST = 100, 60
"""Characters of a line where neither COLUMNS nor a terminal says how many, and the fewest that tables are made for."""


def line_width() -> int:
    """Return the characters of a line: COLUMNS, else the terminal's, else those of a pipe."""
    return max(NARROWEST, shutil.get_terminal_size((PIPE, 24)).columns)


def print_all(parts: Sequence[object]) -> None:
    """Print tables and sentences, each after an empty line, in lines that fit the terminal or the pipe."""
    console = Console(width=line_width())
    for part in parts:
        console.print()
        for piece in fitted(part, console.width) if isinstance(part, Table) else [part]:
            console.print(piece, markup=False, highlight=False)


def fitted(table: Table, width: int) -> list[Table | Text]:
    """Return what is printed of a table in lines of `width` characters: its title, the table, its caption.

    A table that is too wide becomes several, one below the other, which repeat the first columns, as many as tell the
    rows apart. A column wider than a third of the line folds between words, so that texts do, and no number is cut.
    """
    columns, third = range(len(table.columns)), width // 3
    parts, wide = [list(columns)], set[int]()
    if stacked := 1 + sum(whole for _, whole in _needs(table, False)) > width:
        words_and_whole = _needs(table, True)
        needs = [min(whole, max(third, min(word, width // 2))) for word, whole in words_and_whole]
        wide = {k for k in columns if needs[k] < words_and_whole[k][1]}
        # As many of the first columns as tell all rows apart; one where these take too much room.
        rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
        enough = (n for n in range(1, len(needs) + 1) if len({row[:n] for row in rows}) == len(rows))
        apart = next(enough, 1)
        keys = apart if sum(needs[:apart]) <= 2 * third else 1
        parts = [[*range(keys)]]
        for k in columns[keys:]:
            if 1 + sum(needs[j] for j in (*parts[-1], k)) > width:
                parts.append([*range(keys)])
            parts[-1].append(k)
    around = [Text(str(table.title or ""), "table.title"), Text(str(table.caption or ""), "table.caption")]
    tables = [_part(table, part, stacked, wide) for part in parts]
    return [part for part in (around[0], *tables, around[1]) if isinstance(part, Table) or part]


def _needs(table: Table, stacked: bool) -> list[tuple[int, int]]:
    """Return the characters that each column takes of a line, folded to its longest word and as a whole.

    The frame takes one more.
    """
    console, columns = Console(width=10_000, markup=False), range(len(table.columns))
    measured = [console.measure(_part(table, [k], stacked, columns)) for k in columns]
    return [(one.minimum - 1, one.maximum - 1) for one in measured]


def _part(table: Table, chosen: Sequence[int], stacked: bool, wide: Collection[int] = ()) -> Table:
    """Return some columns of a table, those in `wide` folding, and headers no wider than their cells if `stacked`."""
    part = Table(box=table.box, padding=table.padding)
    for k in chosen:
        column, name = table.columns[k], str(table.columns[k].header)
        if stacked:
            widest = max((cell_len(str(cell)) for cell in column.cells), default=0)
            name = "\n".join(wrap(name, max(widest, 1), break_long_words=False, break_on_hyphens=False))
        part.add_column(Text(name), justify=column.justify, no_wrap=k not in wide, overflow="fold")
    for row in zip(*(table.columns[k].cells for k in chosen), strict=True):
        part.add_row(*row)
    return part


@contextmanager
def models_loading(command: str) -> Iterator[None]:
    """Show that a command loads them inside the block, and keep their own bars and notes off the terminal.

    Raises:
        InputError: They are not installed; the sentence says what installs them.
    """
    require_models(command)
    with phase("loading PyTorch and transformers"):
        from otb_analysis.rollouts.models import quiet_loading

        quiet_loading()
        yield
