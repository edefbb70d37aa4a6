"""Studies: a question, cells that can be interrupted, small committed tables, and a README that is made of them.

Here is what the files of a study use; `run` runs one.
"""

from studies.lib.formats import column, interval_columns, mean, or_nan, rounded
from studies.lib.record import Cell, Row, Rows, Study, Tables, distinct, select

__all__ = [
    "Cell", "Row", "Rows", "Study", "Tables", "column", "distinct", "interval_columns", "mean", "or_nan", "rounded",
    "select",
]  # fmt: skip
