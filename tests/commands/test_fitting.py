"""Tables in lines of a given width: parts one below the other, no number cut."""

import io

import pandas as pd
import pytest
from rich.console import Console
from rich.text import Text

from otb_analysis.commands.screen import NARROWEST, PIPE, fitted, line_width
from otb_analysis.report.document import Grid, grid_table


def empty(title, caption, texts, numbers):
    """A table without rows."""
    return grid_table(Grid(caption, pd.DataFrame(columns=[*texts, *numbers]), title, texts=tuple(texts)))


def lines(table, width):
    console = Console(file=io.StringIO(), width=width)
    for part in fitted(table, width):
        console.print(part, markup=False, highlight=False)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def estimators(sources=("none", "proxy", "exact")):
    """A table of seven columns: 16 + 8 + 5·20 characters and its frame, 125."""
    numbers = [f"number {k}" for k in range(5)]
    table = empty("A title", "what it says " * 12, ("estimator", "energy"), numbers)
    for source in sources:
        table.add_row("sequence_mean", source, *(f"0.7{k} [0.73, 0.8{k}]" for k in range(5)))
    return table


def test_table_that_fits_is_one_with_its_title_above_and_its_caption_below():
    shown = lines(estimators(), 140)
    assert shown[0] == "A title" and "what it says" in shown[-1]
    assert sum("estimator" in line and line.endswith("number 4") for line in shown) == 1


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_asked_and_no_number_is_cut(width):
    shown = lines(estimators(), width)
    assert max(map(len, shown)) <= width and "…" not in "".join(shown)
    for k in range(5):
        assert sum(f"0.7{k} [0.73, 0.8{k}]" in line for line in shown) == 3


def test_parts_repeat_as_many_columns_as_tell_the_rows_apart():
    both, one = ("\n".join(lines(estimators(sources), 80)) for sources in (("none", "exact"), ("exact",)))
    assert both.count("estimator") == both.count("energy") == 3
    assert one.count("estimator") == 2 and one.count("energy") == 1


def test_rows_that_only_many_columns_tell_apart_repeat_the_first_one_alone():
    table = empty("", "", [f"text {k}" for k in range(5)], ())
    table.add_row(*["x" * 24] * 4, "y")
    table.add_row(*["x" * 24] * 4, "z")
    assert "\n".join(lines(table, 60)).count("text 0") == 3


def test_texts_fold_between_words_beside_numbers_that_do_not():
    table = empty("", "", ("level",), ("first alarm",))
    table.add_column("why")
    table.add_row("alarm", "1,234,567", Text("the reward fell and did not come back [again]; " * 5))
    shown = lines(table, 60)
    assert max(map(len, shown)) <= 60 and sum("1,234,567" in line for line in shown) == 1
    assert " ".join(" ".join(shown).split()).count("[again];") == 5


def test_a_word_longer_than_a_third_of_the_line_stays_whole():
    table = empty("", "", ("estimator",), ("SF", "efficiency"))
    table.add_row("blend_otb_regression/exact", "0.64 [0.00, 1456867691294463098880]", "0.70 [0.60, 0.80]")
    shown = "\n".join(lines(table, 60))
    assert shown.count("blend_otb_regression/exact") == 2 and "1456867691294463098880]" in shown


def test_headers_wider_than_their_cells_stand_on_several_lines_where_room_is_short():
    table = empty("", "", ("run",), [f"of column {k}" for k in range(8)])
    table.add_row("mine", *map(str, range(8)))
    assert len(lines(table, 120)) == 5  # blank, header, rule, row, blank
    assert len(lines(table, 80)) == 7 and max(map(len, lines(table, 80))) < 80


def test_table_without_columns_or_rows_is_printed():
    assert lines(empty("a", "b", (), ()), 80)[0] == "a"
    assert "two" * 10 in "".join(lines(empty("", "", ("one",), ("two" * 40,)), 60))


def test_columns_says_how_wide_a_line_is_and_a_pipe_has_a_width_of_its_own(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert line_width() == 80
    monkeypatch.setenv("COLUMNS", "20")
    assert line_width() == NARROWEST
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("os.get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    assert line_width() == PIPE
