"""Tables of the terminal: one look, one way of writing a number and an interval."""

from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from otb_analysis.statistics import Interval

NOT_MEASURED = "–"


def terminal_table(title: str, caption: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return an empty table."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
    )
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def number_cell(value: float | None, form: str = ".2f") -> str:
    """Return a number, or a dash where there is none."""
    if value is None:
        return NOT_MEASURED
    return "∞" if np.isinf(value) else format(value, form)


def interval_cell(value: Interval | None) -> str:
    """Return a point with its interval in brackets, where it has one."""
    if value is None or value.estimate is None:
        return NOT_MEASURED
    if value.low is None or value.high is None:
        return f"{value.estimate:.2f}"
    return f"{value.estimate:.2f} [{value.low:.2f}, {value.high:.2f}]"
