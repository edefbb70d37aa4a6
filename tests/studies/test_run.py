import json
import re
import shutil

import pytest
from jinja2 import UndefinedError

from otb_analysis.commands.cli import main
from otb_analysis.errors import InputError, StoreError
from otb_analysis.store import committed_studies
from studies.lib import distinct, select
from studies.lib.record import (
    CellCache,
    Finished,
    find_studies_folder,
    find_study,
    joined_tables,
    load_study,
    read_tables,
    write_tables,
)
from studies.lib.run import Setting, index_page, run_study

PAGE = """\
# 07 · Squares

**Question.** How large are they?

**Verdict.** they sum to 14

![squares](results/squares.svg)

| n | square |
| --- | ---: |
| 1 | 1 |
| 2 | 4 |
| 3 | 9 |

## How it was made

```
otb study 07_squares
```
"""


def setting(tmp_path, **changes):
    return Setting(cache=tmp_path / "cache", **changes)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_index_says_of_a_study_without_results_that_it_was_not_run(squares):
    index = index_page(squares.parent)
    assert (
        "| [07_squares](07_squares/study.py) | How large are they? | not run yet | `otb study 07_squares` | – |"
        in index
    )


def test_page_tables_figure_and_index_are_written_from_what_was_measured(squares, tmp_path):
    assert run_study(squares, setting(tmp_path)) == squares
    page = (squares / "README.md").read_text()
    assert page.startswith(PAGE)
    assert "in 3 cells" in page and "[squares.csv](results/squares.csv)" in page
    assert (squares / "results" / "squares.csv").read_text() == "n,square\n1,1\n2,4\n3,9\n"
    assert (squares / "results" / "squares.svg").read_text().startswith("<svg")
    index = (squares.parent / "README.md").read_text()
    assert (
        "| [07_squares](07_squares/README.md) | How large are they? | they sum to 14 | `otb study 07_squares` |"
        in index
    )


def test_finished_cells_are_not_measured_again(squares, asked, tmp_path):
    run_study(squares, setting(tmp_path))
    before = files(squares)
    run_study(squares, setting(tmp_path))
    assert asked.read_text().split() == ["cell-1", "cell-2", "cell-3"]
    assert files(squares) == before


def test_committed_cells_are_not_measured_again_on_another_machine(squares, asked, tmp_path):
    source = squares / "study.py"
    source.write_text(
        source.read_text().replace("figures=figures)", 'later=[Cell("cell-9", {"n": 9, "constant": 1})])')
    )
    run_study(squares, setting(tmp_path, only=["cell-1", "cell-2", "cell-3"]))
    shutil.rmtree(tmp_path / "cache")
    before = files(squares)
    run_study(squares, setting(tmp_path, only=["cell-1"]))
    assert files(squares) == before
    run_study(squares, setting(tmp_path))
    assert asked.read_text().split() == ["cell-1", "cell-2", "cell-3", "cell-9"]
    assert [row["square"] for row in read_tables(squares / "results")["squares"]] == [1, 4, 9, 81]
    source.write_text(source.read_text().replace("cells(1), cells(10)", "cells(2), cells(10)"))
    run_study(squares, setting(tmp_path))
    assert [row["square"] for row in read_tables(squares / "results")["squares"]] == [2, 8, 18, 81]


def test_interrupting_loses_the_cell_that_was_measured_and_no_other(squares, asked, tmp_path):
    (tmp_path / "break").touch()
    with pytest.raises(KeyboardInterrupt):
        run_study(squares, setting(tmp_path))
    assert not (squares / "README.md").exists()
    (tmp_path / "break").unlink()
    run_study(squares, setting(tmp_path))
    assert asked.read_text().split() == ["cell-1", "cell-2", "cell-2", "cell-3"]
    assert (squares / "README.md").read_text().startswith(PAGE)


def test_a_changed_constant_makes_it_another_cell(squares, asked, tmp_path):
    run_study(squares, setting(tmp_path))
    source = squares / "study.py"
    source.write_text(source.read_text().replace("cells(1), cells(10)", "cells(2), cells(10)"))
    run_study(squares, setting(tmp_path))
    assert len(asked.read_text().split()) == 6
    assert "they sum to 28" in (squares / "README.md").read_text()


def test_cells_can_be_measured_one_at_a_time_and_the_last_one_writes_the_page(squares, asked, tmp_path):
    for name in ("cell-3", "cell-1"):
        assert run_study(squares, setting(tmp_path, only=[name])) is None
    assert not (squares / "results").exists()
    assert run_study(squares, setting(tmp_path, only=["cell-2"])) == squares
    assert asked.read_text().split() == ["cell-3", "cell-1", "cell-2"]
    assert (squares / "README.md").read_text().startswith(PAGE)


def test_unknown_cell_is_one_sentence(squares, tmp_path):
    with pytest.raises(InputError, match=r"'cell-4' .* mean 'cell-3'"):
        run_study(squares, setting(tmp_path, only=["cell-4"]))


def test_quick_writes_elsewhere_and_leaves_results_and_cache_alone(squares, tmp_path):
    run_study(squares, setting(tmp_path))
    before = files(squares.parent) | files(tmp_path / "cache")
    target = run_study(squares, setting(tmp_path, quick=True))
    assert target is not None and squares.parent not in target.parents
    page = (target / "README.md").read_text()
    assert "**Verdict.** None: this is the quick setting" in page and "| 3 | 90 |" in page and "they sum" not in page
    assert files(squares.parent) | files(tmp_path / "cache") == before


def test_quick_begins_anew_in_the_directory_it_is_given(squares, asked, tmp_path):
    quick = setting(tmp_path, quick=True, out=tmp_path / "out")
    assert run_study(squares, quick) == run_study(squares, quick) == tmp_path / "out" / "07_squares"
    assert len(asked.read_text().split()) == 6


def test_out_takes_the_full_results_instead_of_the_studys_folder(squares, tmp_path):
    run_study(squares, setting(tmp_path, out=tmp_path / "out"))
    assert sorted(path.name for path in squares.iterdir()) == ["README.md.j2", "study.py"]
    assert (tmp_path / "out" / "07_squares" / "README.md").read_text().startswith(PAGE)


def test_render_follows_the_tables_and_measures_nothing(squares, asked, tmp_path):
    run_study(squares, setting(tmp_path))
    table = squares / "results" / "squares.csv"
    table.write_text(table.read_text().replace("3,9", "3,10"))
    run_study(squares, setting(tmp_path, render=True))
    assert "they sum to 15" in (squares / "README.md").read_text()
    assert len(asked.read_text().split()) == 3


def test_render_without_tables_says_what_to_run(squares, tmp_path):
    with pytest.raises(InputError, match=r"no result tables.* otb study 07_squares"):
        run_study(squares, setting(tmp_path, render=True))


def test_figures_and_numbers_beside_the_tables_come_from_derived_where_there_is_one(squares, tmp_path):
    derived = (
        "def figures(tables):\n    return {}\n\ndef numbers(tables):\n    return {'roots': len(tables['squares'])}\n"
    )
    (squares / "derived.py").write_text(derived)
    (squares / "README.md.j2").write_text((squares / "README.md.j2").read_text().replace("they sum", "{{ roots }} sum"))
    run_study(squares, setting(tmp_path))
    page = (squares / "README.md").read_text()
    assert "**Verdict.** 3 sum to 14" in page and ".svg" not in page


def test_a_study_without_a_template_says_what_to_write(squares, tmp_path):
    (squares / "README.md.j2").unlink()
    with pytest.raises(InputError, match=r"07_squares has no README\.md\.j2"):
        run_study(squares, setting(tmp_path))


def test_a_name_that_the_tables_lack_is_an_error_and_no_gap_in_the_page(squares, tmp_path):
    (squares / "README.md.j2").write_text('{% extends "study.md.j2" %}{% block page %}{{ cubes }}{% endblock %}')
    with pytest.raises(UndefinedError, match="'cubes' is undefined"):
        run_study(squares, setting(tmp_path))


def test_values_come_back_from_the_tables_as_they_were(tmp_path):
    # 0.1 + 0.2 is 0.30000000000000004: all of its 17 digits are needed.
    rows = [
        {"x": 0.1 + 0.2, "n": 3, "name": "a, b", "right": True, "sometimes": None},
        {"x": 1e-300, "n": -4, "name": "“c”", "right": False, "sometimes": 2.5},
    ]
    write_tables(tmp_path, {"values": rows})
    assert read_tables(tmp_path) == {"values": rows}


def test_a_column_that_some_rows_lack_is_none_there(tmp_path):
    write_tables(tmp_path, {"uneven": [{"a": 1}, {"a": 2, "b": 3.5}]})
    assert read_tables(tmp_path)["uneven"] == [{"a": 1, "b": None}, {"a": 2, "b": 3.5}]


def test_a_file_that_is_no_table_is_one_sentence(tmp_path):
    (tmp_path / "broken.csv").write_text("a,b\n1\n")
    with pytest.raises(StoreError, match=r"broken\.csv cannot be read"):
        read_tables(tmp_path)


def test_rows_are_selected_by_values_and_values_listed_once():
    rows = [{"task": "b", "n": 1}, {"task": "a", "n": 2}, {"task": "b", "n": 3}]
    assert select(rows, task="b", n=3) == [{"task": "b", "n": 3}]
    assert distinct(rows, "task") == ["b", "a"]


def test_cost_has_minutes_memory_and_machine_of_each_cell(squares, tmp_path):
    run_study(squares, setting(tmp_path))
    cost = read_tables(squares / "results")["cost"]
    assert distinct(cost, "cell") == ["cell-1", "cell-2", "cell-3"]
    assert all(row["minutes"] >= 0 and row["processor_minutes"] >= 0 and row["peak_mib"] > 10 for row in cost)
    assert all(re.fullmatch(r"\d+ cores? of .+, \d+ GiB of memory", row["machine"]) for row in cost)


def test_tables_of_cells_are_joined_in_their_order():
    first = Finished({"a": [{"n": 1}], "b": [{"m": 1}]}, 0.0, None, "here", 0.0)
    second = Finished({"a": [{"n": 2}, {"n": 3}]}, 0.0, None, "here", 0.0)
    assert joined_tables([first, second]) == {"a": [{"n": 1}, {"n": 2}, {"n": 3}], "b": [{"m": 1}]}


def test_broken_cell_file_names_itself_and_the_remedy(squares, tmp_path):
    run_study(squares, setting(tmp_path))
    cache = CellCache(tmp_path / "cache" / "07_squares")
    cell = load_study(squares).cells[0]
    cache.file(cell).write_text("{")
    with pytest.raises(StoreError, match=r"cell-1-\w+\.json cannot be read"):
        run_study(squares, setting(tmp_path))
    cache.file(cell).write_text(json.dumps({"tables": {}}))
    with pytest.raises(StoreError, match="cannot be read"):
        cache.load(cell)


@pytest.mark.parametrize("name", ["07_squares", "squares", "07", "7"])
def test_a_study_is_found_by_name_number_and_slug(name, squares):
    assert find_study(name, squares.parent) == squares


def test_unknown_study_is_one_sentence_that_lists_those_there_are(squares, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", "triangles"]) == 2
    said = capsys.readouterr().err
    assert "'triangles' does not exist" in said and "07_squares" in said and said.count("\n") == 1


def test_studies_are_looked_for_here_and_then_in_the_clone(squares, tmp_path):
    assert find_studies_folder(tmp_path) == squares.parent
    elsewhere = find_studies_folder(tmp_path / "nowhere")
    assert (elsewhere / "00_training" / "study.py").is_file()


def test_a_file_without_a_study_is_one_sentence(squares):
    (squares / "study.py").write_text("STUDY = 3\n")
    with pytest.raises(InputError, match=re.escape("defines no STUDY")):
        load_study(squares)


def test_the_command_runs_a_study_and_says_where_its_page_is(squares, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["study", "squares", "--only", "cell-1"]) == 0
    assert "others are still missing" in capsys.readouterr().out
    assert main(["study", "squares"]) == 0
    assert "07_squares/README.md is written." in capsys.readouterr().out
    assert (tmp_path / "runs" / "studies" / "07_squares" / "results").is_dir()


CHAIN = """
from studies.lib import Cell, Study

FIRST = [Cell(f"sweep-{n}", {"n": n}) for n in (2, 5, 3)]
LAST = Cell("best", {"times": 10}, after=tuple(FIRST))

def measure(cell, work, bar):
    if cell.name == "best":
        top = max(row["n"] for row in cell.given["tried"])
        return {"found": [{"value": cell.settings["times"] * top, "tried": len(cell.given["tried"])}]}
    return {"tried": [dict(cell.settings)]}

STUDY = Study("Chain", "Which?", [*FIRST, LAST], [*FIRST, LAST], measure)
"""


@pytest.fixture
def chain(tmp_path):
    """A study whose last cell reads what the others found."""
    folder = tmp_path / "studies" / "08_chain"
    folder.mkdir(parents=True)
    (folder / "study.py").write_text(CHAIN)
    (folder / "README.md.j2").write_text(
        '{% extends "study.md.j2" %}{% block verdict %}{{ found[0].value }}{% endblock %}'
    )
    return folder


def test_a_cell_is_given_the_tables_of_those_it_comes_after(chain, tmp_path):
    run_study(chain, setting(tmp_path))
    assert read_tables(chain / "results")["found"] == [{"value": 50, "tried": 3}]


def test_a_cell_asked_for_before_those_it_comes_after_is_one_sentence(chain, tmp_path):
    run_study(chain, setting(tmp_path, only=["sweep-2"]))
    with pytest.raises(InputError, match="'best' comes after sweep-5, sweep-3"):
        run_study(chain, setting(tmp_path, only=["best"]))


def test_a_change_in_an_earlier_cell_measures_the_later_one_again(chain, tmp_path):
    run_study(chain, setting(tmp_path))
    source = chain / "study.py"
    source.write_text(source.read_text().replace("(2, 5, 3)", "(2, 7, 3)"))
    run_study(chain, setting(tmp_path))
    assert read_tables(chain / "results")["found"] == [{"value": 70, "tried": 3}]


def test_what_committed_cells_left_to_a_later_one_is_made_again(chain, tmp_path):
    run_study(chain, setting(tmp_path))
    shutil.rmtree(tmp_path / "cache")
    source = chain / "study.py"
    source.write_text(source.read_text().replace('"times": 10', '"times": 20'))
    run_study(chain, setting(tmp_path))
    assert read_tables(chain / "results")["found"] == [{"value": 100, "tried": 3}]
    assert len(list((tmp_path / "cache" / "08_chain" / "results").iterdir())) == 4


def test_what_came_after_a_cell_on_another_machine_is_not_mixed_with_what_comes_after_it_here(chain, tmp_path):
    source = chain / "study.py"
    twice = "[*FIRST, LAST, Cell('worst', {'times': 10}, after=tuple(FIRST))]"
    source.write_text(source.read_text().replace("[*FIRST, LAST]", twice).replace('== "best"', 'in ("best", "worst")'))
    run_study(chain, setting(tmp_path))
    shutil.rmtree(tmp_path / "cache")
    source.write_text(
        source.read_text().replace('LAST = Cell("best", {"times": 10}', 'LAST = Cell("best", {"times": 20}')
    )
    assert run_study(chain, setting(tmp_path, only=["best"])) is None  # worst is missing now
    run_study(chain, setting(tmp_path))
    assert [row["value"] for row in read_tables(chain / "results")["found"]] == [100, 50]
    assert len(list((tmp_path / "cache" / "08_chain" / "results").iterdir())) == 5


def test_committed_cells_that_differ_in_name_alone_keep_their_own_rows(squares, tmp_path):
    source = squares / "study.py"
    source.write_text(
        source.read_text()
        .replace("figures=figures)", 'figures=figures, later=[Cell("other", {"n": 1, "constant": 1})])')
        .replace('cell.settings["n"] ** 2', '(cell.settings["n"] + 9 * (cell.name == "other")) ** 2')
    )
    run_study(squares, setting(tmp_path))
    before = files(squares)
    shutil.rmtree(tmp_path / "cache")
    run_study(squares, setting(tmp_path))
    assert files(squares) == before
    assert [row["square"] for row in read_tables(squares / "results")["squares"]] == [1, 4, 9, 100]


@pytest.mark.parametrize("damage", ["n,square\n1,1\n2,4\n", "<<<<<<< HEAD\nn,square\n1,1\n2,4\n3,9\n", None])
def test_tables_that_do_not_fit_their_cells_are_measured_again(squares, asked, tmp_path, damage):
    run_study(squares, setting(tmp_path))
    whole, table = files(squares), squares / "results" / "squares.csv"
    shutil.rmtree(tmp_path / "cache")
    table.unlink() if damage is None else table.write_text(damage)
    run_study(squares, setting(tmp_path))
    assert len(asked.read_text().split()) == 6
    assert files(squares)[table.relative_to(squares)] == whole[table.relative_to(squares)]


def test_a_cell_that_needs_one_of_two_makes_both_anew_for_those_that_come_after_both(chain, tmp_path):
    source = chain / "study.py"
    both = source.read_text().replace("[*FIRST, LAST]", "[*FIRST, LAST, *NEW]")
    source.write_text(both.replace("def measure", "NEW = []\n\ndef measure"))
    run_study(chain, setting(tmp_path))
    shutil.rmtree(tmp_path / "cache")
    new = 'NEW = [Cell("new", {"n": 7}, after=(FIRST[0],))]'
    source.write_text(source.read_text().replace("NEW = []", new))
    run_study(chain, setting(tmp_path))
    assert [row["n"] for row in read_tables(chain / "results")["tried"]] == [2, 5, 3, 7]
    assert len(list((tmp_path / "cache" / "08_chain" / "results").iterdir())) == 5


def test_page_can_come_before_its_later_cells_and_names_them(squares, asked, tmp_path):
    source = squares / "study.py"
    later = 'figures=figures, later=[Cell("cell-9", {"n": 9, "constant": 1})])'
    source.write_text(source.read_text().replace("figures=figures)", later))
    assert run_study(squares, setting(tmp_path, only=["cell-1", "cell-2"])) is None
    assert run_study(squares, setting(tmp_path, only=["cell-3"])) == squares
    page = (squares / "README.md").read_text()
    assert (
        "they sum to 14" in page and "**Not computed yet**: 1 cells, which the same command measures: cell-9." in page
    )
    run_study(squares, setting(tmp_path))
    assert asked.read_text().split() == ["cell-1", "cell-2", "cell-3", "cell-9"]
    page = (squares / "README.md").read_text()
    assert "they sum to 95" in page and "Not computed yet" not in page


def test_one_table_of_few_rows_is_open_and_the_others_are_folded(squares, tmp_path):
    def table(rows):
        return f"| {rows} |\n| - |\n" + "".join(f"| {n} |\n" for n in range(rows))

    body = "\n".join([table(11), "words\n", table(3), table(3), table(3)])
    (squares / "README.md.j2").write_text(
        '{% extends "study.md.j2" %}{% block verdict %}Few.{% endblock %}{% block page %}' + body + "{% endblock %}"
    )
    run_study(squares, setting(tmp_path))
    page = (squares / "README.md").read_text()
    fold = "<details markdown><summary>Table of {} rows</summary>\n\n{}\n</details>\n"
    assert page.count("<details") == 3 and page.count(table(3)) == 3
    assert fold.format(11, table(11)) in page and page.count(fold.format(3, table(3))) == 2
    assert page.index("words") < page.index(table(3)) < page.index(fold.format(3, table(3)))
    (study,) = committed_studies(squares.parent)
    assert study.body.count("| 3 |\n| - |") == 3 and "details" not in study.body
    # a template may name the open one
    (squares / "README.md.j2").write_text(
        (squares / "README.md.j2").read_text().replace(table(11), "<!-- open -->\n" + table(11))
    )
    run_study(squares, setting(tmp_path))
    page = (squares / "README.md").read_text()
    assert page.count(fold.format(3, table(3))) == 3 and fold.format(11, table(11)) not in page and "<!--" not in page
