from pathlib import Path

import pytest

from otb_analysis.errors import StoreError
from otb_analysis.store import committed_studies, study_figure, study_table, study_tables

COMMITTED = Path(__file__).parents[2] / "studies"
PAGE = """\
# 07 · Squares

**Question.** How large are they?

**Verdict.** they sum to 14

![squares](results/squares.svg)

Read them so.

## All of them

| n | square |
| --- | ---: |
| 1 | 1 |

## How it was made

```
otb study 07_squares
```

1.5 min in 3 cells, each on a machine. Tables: [cost.csv](results/cost.csv). This page is made of them.
"""
INDEX = """| study | question | verdict | command | cost |
|---|---|---|---|---|
| [08_cubes](08_cubes/study.py) | And cubes? | not run yet | `otb study 08_cubes` | – |
"""


@pytest.fixture
def studies(tmp_path):
    """One study with results, one that was not run."""
    results = tmp_path / "07_squares" / "results"
    results.mkdir(parents=True)
    (tmp_path / "08_cubes").mkdir()
    for name in ("07_squares", "08_cubes"):
        (tmp_path / name / "study.py").write_text("raise RuntimeError('a reader runs no study')")
    (tmp_path / "07_squares" / "README.md").write_text(PAGE)
    (tmp_path / "README.md").write_text(INDEX)
    (results / "squares.svg").write_text("<svg/>")
    (results / "cost.csv").write_text("cell,minutes\na,0.5\nb,1.0\n")
    (results / "squares.csv").write_text("n,square\n1,1\n2,\n")
    return tmp_path


def test_page_comes_apart_into_what_it_was_joined_of(studies):
    found, _ = committed_studies(studies)
    assert (found.title, found.question, found.verdict) == ("Squares", "How large are they?", "they sum to 14")
    assert found.body == "Read them so.\n\n## All of them\n\n| n | square |\n| --- | ---: |\n| 1 | 1 |"
    assert (found.command, found.minutes) == ("otb study 07_squares", "1.5 min")
    assert found.cost == "1.5 min in 3 cells, each on a machine."
    assert [path.name for path in found.figures] == ["squares.svg"]
    assert found.state == "measured"


def test_study_without_a_page_was_not_run_and_has_its_question_from_the_index(studies):
    _, found = committed_studies(studies)
    assert (found.state, found.question, found.title) == ("not run yet", "And cubes?", "Cubes")
    assert (found.verdict, found.cost, found.figures) == ("", "", ())


def test_costs_come_last_and_missing_values_are_missing(studies):
    assert study_tables(studies / "07_squares") == ["squares", "cost"]
    assert study_table(studies / "07_squares", "squares")["square"].isna().tolist() == [False, True]
    assert study_tables(studies / "08_cubes") == []


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2,3\n", b"\xff\xfe\x00broken\n\xff"])
def test_broken_table_is_one_sentence_that_names_the_file(studies, content):
    (studies / "07_squares" / "results" / "squares.csv").write_bytes(content)
    with pytest.raises(StoreError, match=r"squares\.csv cannot be read .*otb study 07_squares"):
        study_table(studies / "07_squares", "squares")


@pytest.mark.parametrize("page", [b"", b"\xff\xfe", b"# Another page\n\nIt says nothing.\n"])
def test_broken_page_spoils_only_its_own_study(studies, page):
    (studies / "07_squares" / "README.md").write_bytes(page)
    broken, other = committed_studies(studies)
    assert broken.state == "cannot be read" and "otb study 07_squares --render" in broken.verdict
    assert other.state == "not run yet"


@pytest.mark.parametrize("name", ["squares.csv", "squares.svg"])
def test_file_of_a_study_that_leads_out_is_one_sentence(studies, tmp_path_factory, name):
    folder = studies / "07_squares"
    path, outside = folder / "results" / name, tmp_path_factory.mktemp("outside") / name
    path.rename(outside)
    path.symlink_to(outside)
    read = (lambda: study_table(folder, "squares")) if name.endswith("csv") else (lambda: study_figure(path))
    with pytest.raises(StoreError, match=rf"^{path} leads out of {folder}"):
        read()
    path.unlink()
    outside.rename(folder / name)
    path.symlink_to(Path("..") / name)  # within the study
    assert len(read())


def test_name_of_a_table_leads_nowhere_else(studies):
    (studies / "secret.csv").write_text("a\n1\n")
    with pytest.raises(StoreError, match="leads out of"):
        study_table(studies / "07_squares", "../../secret")


@pytest.mark.parametrize("linked", ["README.md", "."])
def test_page_or_folder_that_leads_out_spoils_only_its_own_study(studies, tmp_path_factory, linked):
    folder, outside = studies / "07_squares", tmp_path_factory.mktemp("outside") / "moved"
    (folder / linked).resolve().rename(outside)
    (folder / linked if linked != "." else folder).symlink_to(outside)
    broken, other = committed_studies(studies)
    assert broken.state == "cannot be read" and broken.verdict.endswith(
        f"leads out of {folder}; put what it points to there."
    )
    assert broken.figures == () and (study_tables(folder) == [] or linked != ".")
    assert other.state == "not run yet" and other.question == "And cubes?"


def test_index_that_is_a_link_is_not_read(studies, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "README.md"
    (studies / "README.md").rename(outside)
    (studies / "README.md").symlink_to(outside)
    assert [study.question for study in committed_studies(studies)] == ["How large are they?", ""]


def test_folder_that_is_absent_or_holds_no_study_is_empty(tmp_path):
    (tmp_path / "7_no").mkdir()
    assert committed_studies(tmp_path / "nowhere") == committed_studies(tmp_path) == []


@pytest.mark.skipif(not COMMITTED.is_dir(), reason="installed without its repository")
def test_every_committed_study_can_be_read():
    for study in committed_studies(COMMITTED):
        assert study.question and study.title
        assert study.state == ("measured" if (study.folder / "README.md").exists() else "not run yet")
        if study.state == "measured":
            assert study.verdict and study.cost and study.body
            assert [len(study_table(study.folder, name)) > 0 for name in study_tables(study.folder)]
