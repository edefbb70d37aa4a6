"""The one table of the terminal, and a report's parts as the terminal prints them."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from otb_analysis.figures.numbers import cell
from otb_analysis.report.document import Grid, Part, Section


def terminal_table(title: str, caption: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table: a title above, a caption below, columns of text on the left, of numbers on the right."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=Text(title, "table.title"),  # a run's name in it is no markup
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def printed(sections: Iterable[Section]) -> list[Table | str]:
    """Return the sentences and tables of some sections; pictures and formulas are for files."""
    return printed_parts([part for section in sections for part in section.parts])


def printed_parts(parts: Iterable[Part]) -> list[Table | str]:
    """Return some parts as the terminal prints them."""
    return [grid_table(part) if isinstance(part, Grid) else part for part in parts if isinstance(part, Grid | str)]


def grid_table(grid: Grid) -> Table:
    """Return a grid as a table; whatever a cell holds is shown as text."""
    table = terminal_table(grid.title, grid.caption, (), ())
    for place, name in enumerate(map(str, grid.frame)):
        left = not place or name in (*grid.texts, *grid.folds)
        folds = name in grid.folds
        table.add_column(
            name, justify="left" if left else "right", no_wrap=not folds, overflow="fold" if folds else "ellipsis"
        )
    for row in grid.frame.itertuples(index=False):
        table.add_row(*(Text(cell(value)) for value in row))
    return table
