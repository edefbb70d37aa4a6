"""Cells and tables of the generated pages."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.types import Float


def number(x: float) -> str:
    """Return three decimals, and a bare 0 for rounding."""
    return "0" if abs(x) < 1e-9 else f"{x:.3f}"


def spread(x: Float) -> str:
    """Return the median and the quartiles."""
    low, middle, high = np.quantile(x, [0.25, 0.5, 0.75])
    return number(middle) if number(low) == number(high) else f"{number(middle)} [{number(low)}, {number(high)}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
