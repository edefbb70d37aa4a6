"""The one table of the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


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
