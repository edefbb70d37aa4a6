"""A study that measures nothing but how often it was asked: three cells, one table, one figure."""

import pytest

SOURCE = """
from pathlib import Path
from otb_analysis.figures.svg import Curve, Panel, svg
from studies.lib import Cell, Study

ASKED = Path({asked!r})

def cells(constant):
    return [Cell(f"cell-{{n}}", {{"n": n, "constant": constant}}) for n in (1, 2, 3)]

def measure(cell, work, bar):
    assert list(work.iterdir()) == []
    (work / "half").touch()
    with ASKED.open("a") as file:
        file.write(cell.name + "\\n")
    if (ASKED.parent / "break").exists() and cell.name == "cell-2":
        raise KeyboardInterrupt
    return {{"squares": [{{"n": cell.settings["n"], "square": cell.settings["n"] ** 2 * cell.settings["constant"]}}]}}

def figures(tables):
    n, square = ([row[name] for row in tables["squares"]] for name in ("n", "square"))
    return {{"squares.svg": svg([Panel("Squares", "of n", "n", [Curve(n, square, "square")])])}}

STUDY = Study("Squares", "How large are they?", cells(1), cells(10), measure, figures=figures)
"""
PAGE = """\
{% extends "study.md.j2" %}
{% block verdict %}
they sum to
{{ squares | column("square") | sum }}
{% endblock %}
{% block page %}
{{ heads("n", "square") }}
{% for row in squares %}
| {{ row.n }} | {{ row.square }} |
{% endfor %}
{% endblock %}
"""


@pytest.fixture
def asked(tmp_path):
    """The file that lists the cells measured so far, one a line."""
    return tmp_path / "asked"


@pytest.fixture
def squares(tmp_path, asked):
    """The folder of that study."""
    folder = tmp_path / "studies" / "07_squares"
    folder.mkdir(parents=True)
    (folder / "study.py").write_text(SOURCE.format(asked=str(asked)))
    (folder / "README.md.j2").write_text(PAGE)
    return folder
