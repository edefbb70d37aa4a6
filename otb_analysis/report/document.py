"""What a report is made of: sections of sentences, tables, pictures and formulas; writers make text or a file of it."""

from dataclasses import dataclass, field

import pandas as pd
import plotly.graph_objects as go

from otb_analysis.figures.curves import CurvesInfo


@dataclass(frozen=True)
class Grid:
    """A table with what it shows in a sentence; cells are text already, or numbers that `number` writes."""

    caption: str
    frame: pd.DataFrame
    title: str = ""
    texts: tuple[str, ...] = field(default=())  # Columns of words, on the left; the first one always is
    folds: tuple[str, ...] = ()  # Columns of long sentences


@dataclass(frozen=True)
class Picture:
    """A figure with its caption; `curves` are the same numbers where the form without a browser can draw them."""

    name: str
    caption: str
    figure: go.Figure
    curves: CurvesInfo | None = None


@dataclass(frozen=True)
class Formulas:
    """Definitions: (name, formula) pairs."""

    rows: tuple[tuple[str, str], ...]


Part = str | Grid | Picture | Formulas


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it, in order."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    command: str
    note: str
    sections: tuple[Section, ...]
