"""The committed studies: every number of a page is one of its tables, every verdict is short, every study runs."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from otb_analysis.store import committed_studies
from otb_analysis.store.studies import MEASURED
from studies.lib.record import load_study, read_tables, study_folders
from studies.lib.run import OUTDATED, Setting, index_page, run_study, study_page

ROOT = Path(__file__).parent.parent.parent
STUDIES = ROOT / "studies"
FOLDERS = study_folders(STUDIES)
REQUIRED = (
    *("01_enumeration", "02_proxy_fidelity", "03_baseline_variance", "04_group_size", "05_collapse"),
    *("06_off_policy", "07_multi_turn", "08_real_model", "09_progress", "10_counting_readout"),
    *("11_critical_tokens", "12_allocation", "13_token_weights", "14_triadic_tokens", "15_filters", "16_soft_tokens"),
    *("17_horizon", "18_large_groups", "19_long_answers"),
)
NUMBER = r"\d+(?:[.,]\d+)*"
QUICK_SECONDS = 120
"""Processor time that the quick setting of a study may take, whatever else the machine does meanwhile."""
WITH_RESULTS = [folder for folder in FOLDERS if (folder / "results").is_dir()]


@pytest.mark.parametrize("name", REQUIRED)
def test_study_is_there_with_its_results(name):
    assert (STUDIES / name / "study.py").is_file()
    tables = read_tables(STUDIES / name / "results")
    assert len(tables) > 1 and all(tables.values())  # what it cost is one of them
    assert (STUDIES / name / "README.md").is_file()


@pytest.mark.parametrize("folder", WITH_RESULTS, ids=lambda path: path.name)
def test_numbers_of_a_page_are_those_of_its_tables_and_its_figures_are_there(folder):
    page, figures = study_page(folder, load_study(folder), read_tables(folder / "results"))
    committed = (folder / "README.md").read_text(encoding="utf-8")
    assert re.findall(NUMBER, committed) == re.findall(NUMBER, page)
    assert re.findall(r"\(results/(\w+\.svg)\)", committed) == list(figures)
    for name, drawn in figures.items():
        words = [
            re.findall(r">([^<>]+)<", svg) for svg in (drawn, (folder / "results" / name).read_text(encoding="utf-8"))
        ]
        assert words[0] == words[1]


@pytest.mark.parametrize(
    "one", [s for s in committed_studies(STUDIES) if s.state == MEASURED], ids=lambda one: one.folder.name
)
def test_verdict_is_short_and_says_that_it_holds(one):
    assert 0 < len([word for word in one.verdict.split() if re.search(r"\w", word)]) <= 40
    assert one.verdict != OUTDATED


@pytest.mark.parametrize("folder", WITH_RESULTS, ids=lambda path: path.name)
def test_a_page_has_one_open_figure_and_one_open_table_of_at_most_ten_rows(folder):
    page = (folder / "README.md").read_text(encoding="utf-8")
    seen = re.sub(r"<details.*?</details>", "", page, flags=re.S)
    tables = re.findall(r"(?:^\|.*\n)+", seen, re.MULTILINE)
    assert [table.count("\n") - 2 <= 10 for table in tables] == [True]
    assert len(re.findall(r"^!\[", seen, re.MULTILINE)) <= 1


@pytest.mark.parametrize("folder", WITH_RESULTS, ids=lambda path: path.name)
def test_tables_are_small_and_cost_every_cell_of_the_study(folder):
    cost, study = read_tables(folder / "results")["cost"], load_study(folder)
    measured = [row["cell"] for row in cost]
    planned = [cell.name for cell in (*study.cells, *study.later)]
    assert measured == [name for name in planned if name in measured]  # all of them planned, in their order
    assert {cell.name for cell in study.cells} <= set(measured)
    assert sum(path.stat().st_size for path in (folder / "results").glob("*.csv")) < 500_000
    assert all(path.stat().st_size < 250_000 for path in (folder / "results").glob("*.svg"))


def test_index_has_the_verdicts_and_numbers_of_the_pages():
    index = (STUDIES / "README.md").read_text(encoding="utf-8")
    assert all(one.verdict in index for one in committed_studies(STUDIES))
    assert re.findall(NUMBER, index) == re.findall(NUMBER, index_page(STUDIES))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_cells_have_names_that_can_be_file_names_and_differ(folder):
    study = load_study(folder)
    for cells in (study.cells, study.quick):
        names = [cell.name for cell in cells]
        assert len(set(names)) == len(names) > 0
        assert all(re.fullmatch(r"[a-z0-9_-]+", name) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_quick_study_runs_in_its_time_and_touches_nothing_that_is_committed(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in STUDIES.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    begun = processor_seconds()
    target = run_study(folder, Setting(quick=True, out=tmp_path / "out"))
    assert processor_seconds() - begun < QUICK_SECONDS
    assert target == tmp_path / "out" / folder.name
    assert "**Verdict.** None: this is the quick setting" in (target / "README.md").read_text(encoding="utf-8")
    assert {
        path: path.read_bytes() for path in STUDIES.rglob("*") if path.is_file() and path.suffix != ".pyc"
    } == before


def processor_seconds():
    """Processor time that this process and the children it waited for have used, all threads together."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in own)


def test_render_from_a_shell_leaves_the_repository_as_it_is(tmp_path):
    folder = WITH_RESULTS[0]
    before = (folder / "README.md").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "otb_analysis", "study", folder.name, "--render"],
        cwd=ROOT,
        capture_output=True,
    )
    assert (done.returncode, (folder / "README.md").read_bytes()) == (0, before)
