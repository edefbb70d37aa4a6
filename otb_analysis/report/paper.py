"""A comparison for a paper: one table as LaTeX, CSV or Markdown, and figures as PDF and SVG at column widths."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pandas as pd
import plotly.io

from otb_analysis.answers import MeasuredSteps
from otb_analysis.errors import InputError, StoreError
from otb_analysis.extras import require
from otb_analysis.figures.comparison import display_table
from otb_analysis.figures.styles import for_background
from otb_analysis.report.document import Document, Grid, Picture, Section, grid_text

COLUMNS = {"column": 3.25, "page": 6.75}
"""Widths of a paper's figures in inches."""
SVG_INCH, SHRUNK = 96, 13 / 16
"""Pixels of an inch, and how much smaller than on a page a figure is printed: text of 13 pixels then has 8 points."""
LATEX = {"÷": "/", "≈": r"$\approx$", "–": "--", "∞": r"$\infty$", "−": "$-$", "∇": r"$\nabla$", "²": "$^2$"}


def comparison_text(steps: Mapping[str, MeasuredSteps], form: str, beside: Sequence[Section] = ()) -> str:
    """Return every estimator over `rloo` with its intervals, a table per design; what is decided stands in comments.

    So does, at the end, what the sections `beside` say of B against A.

    CSV has numbers, all of them, and the columns `alarm` and `told` say what may be claimed; the other forms what the
    terminal shows, no table where another sampler drew the tokens.

    Raises:
        InputError: Nothing was measured, or `rloo` was not.
    """
    known = {name: one for name, one in steps.items() if one.over_rloo.cause != "no reference"}
    if not known:
        raise InputError("no run measured its estimators with rloo among them; otb compare says what does.")
    if form == "csv":
        frames = [one.to_dataframe().assign(design=name, alarm=one.alarm) for name, one in known.items()]
        return pd.concat(frames).to_csv(index=False)
    texts = list[str]()
    for name, one in known.items():
        lines = [f"> {line}" for line in one.lines] if form != "latex" else [f"% {line}" for line in (name, *one.lines)]
        if not one.alarm:
            frame = display_table(one.comparison(), None if one.against_rloo is None else one.decision, every=False)
            if form == "latex":
                table = frame.to_latex(index=False, escape=True, column_format="ll" + "r" * (frame.shape[1] - 2))
                for sign, macro in LATEX.items():
                    table = table.replace(sign, macro)
                lines.append(table.strip())
            else:
                lines += ["", grid_text(Grid(name, frame))]
        texts.append("\n".join(lines))
    mark = "%" if form == "latex" else ">"
    texts += [f"{mark} {part}" for section in beside for part in section.parts if isinstance(part, str)]
    return "\n\n".join(texts) + "\n"


def write_figures(document: Document, folder: Path) -> list[Path]:
    """Write every figure of a report as PDF and SVG, at the width of one column and of a page.

    Raises:
        InputError: kaleido is not installed, or there is no Chrome or Chromium, which draws them.
        StoreError: A file cannot be written.
    """
    require("kaleido", "figures as files")
    pictures = [part for section in document.sections for part in section.parts if isinstance(part, Picture)]
    files: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for width, inches in COLUMNS.items():
            drawn = round(inches * SVG_INCH / SHRUNK)
            each = [(one.figure, folder / f"{one.name}-{width}.{end}") for one in pictures for end in ("pdf", "svg")]
            figures, paths = [for_background(figure, dark=False) for figure, _ in each], [path for _, path in each]
            heights = [cast(Any, figure.layout).height or 450 for figure in figures]
            scale = inches * SVG_INCH / drawn
            plotly.io.write_images(figures, cast(Any, paths), width=drawn, height=heights, scale=scale)
            files += paths
    except OSError as error:
        raise StoreError(f"cannot write figures to {folder} ({error.strerror}); pass another --figures.") from error
    except RuntimeError as error:  # kaleido's, where it finds no browser
        raise InputError("figures need Chrome or Chromium, which was not found; install one of them.") from error
    return files
