"""A study that measures nothing but how often it was asked: three cells, one table, one figure."""

import pytest

SOURCE = """
from pathlib import Path
from otb_analysis.figures.svg import Curve, Panel, svg
from otb_analysis.study import Cell, Findings, Study, markdown_table

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

def report(tables):
    found = tables["squares"]
    rows = [[str(row["n"]), str(row["square"])] for row in found]
    curve = Curve([row["n"] for row in found], [row["square"] for row in found], "square")
    picture = svg([Panel("Squares", "of n", "n", [curve])])
    verdict = f"they sum to {{sum(row['square'] for row in found)}}"
    return Findings(verdict, markdown_table(["n", "square"], rows), {{"squares.svg": picture}})

STUDY = Study("Squares", "How large are they?", cells(1), cells(10), measure, report)
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
    return folder
