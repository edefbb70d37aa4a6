"""How every table fits the line: a wide one becomes several, and no number is cut."""

import shutil
from collections.abc import Collection, Sequence
from textwrap import wrap

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE, NARROWEST = 100, 60
"""Characters of a line where neither COLUMNS nor a terminal says how many, and the fewest that tables are made for."""


def line_width() -> int:
    """Return the characters of a line: COLUMNS, else the terminal's, else those of a pipe."""
    return max(NARROWEST, shutil.get_terminal_size((PIPE, 24)).columns)


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
        keys = _keys(table, needs, 2 * third)
        parts = [[*range(keys)]]
        for k in columns[keys:]:
            if 1 + sum(needs[j] for j in (*parts[-1], k)) > width:
                parts.append([*range(keys)])
            parts[-1].append(k)
    around = [Text(str(table.title or ""), "table.title"), Text(str(table.caption or ""), "table.caption")]
    tables = [_part(table, part, stacked, wide) for part in parts]
    return [part for part in (around[0], *tables, around[1]) if isinstance(part, Table) or part]


def _keys(table: Table, needs: Sequence[int], room: int) -> int:
    """Return how many of the first columns tell all rows apart; 1 where these take more than `room` characters."""
    rows = list(zip(*(map(str, column.cells) for column in table.columns), strict=True))
    enough = (n for n in range(1, len(needs) + 1) if len({row[:n] for row in rows}) == len(rows))
    return n if sum(needs[: (n := next(enough, 1))]) <= room else 1


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
