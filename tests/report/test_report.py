"""`otb report`: one file that loads nothing, Markdown beside it, and one sentence where runs do not belong together."""

import json
import re
import shutil
import sys
from html import escape
from html.parser import HTMLParser

import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from otb_analysis.answers import opened
from otb_analysis.commands.cli import main
from otb_analysis.config import AttributionSchedule, MeasureConfig, Schedule
from otb_analysis.figures.curves import curves_info
from otb_analysis.figures.styles import cell
from otb_analysis.report.document import Document, Formulas, Grid, Picture, Section, to_html, to_markdown

HOSTILE = "<script>alert(1)</script> a|b *c* [d](http://e)"


class Loads(HTMLParser):
    """Collects what a page would fetch, and its tags."""

    def __init__(self):
        super().__init__()
        self.fetched, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]


def parsed(text):
    reader = Loads()
    # The library is one long script; what it holds is no markup.
    reader.feed(text)
    return reader


@pytest.fixture(scope="module")
def runs(trained):
    measure = MeasureConfig(exact=Schedule(every=1, prompts=0), attribution=AttributionSchedule(every=2))
    return [trained("reported", measure=measure), trained("reported_rloo", measure=measure, seed=3)]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "r.html"
    words = ["report", *(run.name for run in runs), "--root", str(runs[0].parent), "--out", str(out)]
    assert main(words) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_loads_nothing_and_holds_the_library_once(page):
    found = parsed(page)
    assert [target for target in found.fetched if not target.startswith("#")] == []
    assert not {"link", "iframe", "img", "object", "embed"} & set(found.tags)
    assert page.count(get_plotlyjs()) == 1
    assert "@import" not in page.split("</style>")[0] and "url(" not in page.split("</style>")[0]


def test_text_of_a_figure_cannot_end_its_element():
    figure = go.Figure(go.Scatter(x=[0], y=[1], name="</script><b>"), layout={"height": 300})
    body = to_html(Document("", "", "", (Section("", (Picture("p", "", figure),)),))).split("</head>")[1]
    assert body.count("</script>") == body.count("<script") and "<b>" not in body
    (name,) = re.findall(r'"name":("[^"]*")', body)
    assert json.loads(name) == "</script><b>"


def test_every_quantity_of_the_page_has_its_formula(page, runs):
    for words in ("(1 − π_y)² + Σ_{v≠y} π_v²", "corr(x − x̄_c, y − ȳ_c)", "log-Pearson", "(e_exact − e_proxy)"):
        assert page.count(words) >= len(runs), words
    # Alarms once; estimators, fidelity and attribution for each run.
    assert page.count("<summary>Formulas</summary>") == 1 + 3 * len(runs)
    assert page.count("Gain lost by the proxy: ") == len(runs)


def test_the_page_names_its_command_and_shows_every_section(page, runs):
    assert f"otb report {runs[0].name} {runs[1].name}" in page
    titles = re.findall(r'<h2 id="s\d+">(.*?)</h2>', page)
    assert titles[:4] == ["Verdict", "Runs", "B against A", "Alarms and health over steps"]
    assert titles[-1] == "How the runs were made"
    assert len(titles) == 5 + 3 * len(runs)
    # Learning once; health, estimators, fidelity and attribution for each run.
    assert page.split("</head>")[1].count("Plotly.newPlot(") == 1 + 4 * len(runs)
    lines = [line for run in opened(runs).values() for line in run.lines]
    assert all(escape(line) in page for line in lines)
    assert "hold half of the gradient" in page and "Horvitz" not in page


def test_text_from_runs_is_never_markup():
    parts = (HOSTILE, Grid(HOSTILE, pd.DataFrame({HOSTILE: [HOSTILE]})), Formulas(((HOSTILE, HOSTILE),)))
    document = Document(HOSTILE, HOSTILE, HOSTILE, (Section(HOSTILE, parts),))
    body = to_html(document).split("</head>")[1]
    assert "<script>" not in body and "&lt;script&gt;" in body
    text, _ = to_markdown(document, "files")
    assert "| <script>" not in text and r"a\|b \*c\* \[d\](http://e)" in text


def test_cells_are_read_as_numbers_words_and_dashes():
    shown = [cell(x) for x in (0.123456, 12, True, None, float("nan"), pd.NA, pd.NaT, "x", pd.Series([7])[0])]
    assert shown == ["0.123", "12", "yes", "–", "–", "–", "–", "x", "7"]


def test_markdown_without_matplotlib_names_its_pictures(monkeypatch):
    info = curves_info({}, (), {})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text, files = to_markdown(
        Document("t", "c", "n", (Section("s", (Picture("p", "Curves.", go.Figure(), info),)),)), "f"
    )
    assert "Curves. The figure is in the HTML form" in text and not files


def test_markdown_has_the_tables_and_its_curves_beside_it(runs, tmp_path, capsys):
    out = tmp_path / "r.md"
    assert main(["report", runs[0].name, "--root", str(runs[0].parent), "--out", str(out)]) == 0
    assert "and 2 pictures" in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    images = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert images == ["r_files/learning.svg", f"r_files/health-{runs[0].name}.svg"]
    assert all((tmp_path / name).read_text().startswith("<svg") for name in images)
    assert "The figure is in the HTML form of this report" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 20 and any("gradient" in row.lower() for row in rows)


def test_settings_that_one_run_does_not_have_are_counted_below_the_differences(runs, tmp_path):
    for run in runs:
        shutil.copytree(run, tmp_path / run.name)
    file = tmp_path / runs[1].name / "run.json"
    info = json.loads(file.read_text())
    del info["checksum"], info["config"]["checkpoint"]  # its two settings are at their defaults in the other run
    file.write_text(json.dumps(info))
    assert main(["report", *(run.name for run in runs), "--root", str(tmp_path), "--out", str(tmp_path / "r.md")]) == 0
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    assert "Where the configurations differ. Left out" in text and ": 2 settings." in text
    assert "| seed |" in text and "checkpoint.every" not in text


def refused(capsys, *words):
    capsys.readouterr()  # what training a run said
    assert main(["report", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_runs_of_different_scope_are_one_sentence(runs, trained, capsys):
    head = trained("bare_head", measure=MeasureConfig(exact=Schedule(every=0), scope="lm_head"))
    line = refused(capsys, runs[0].name, head.name, "--root", str(head.parent))
    assert "reported measured gradients of scope 'all' but bare_head of 'lm_head'" in line and "--measure.scope" in line


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--out", "r.pdf"], "--out is r.pdf; pass a file that ends in .html or .md."),
        (["reported"], "pass each name once."),
        (["--out", "/proc/none/r.html"], "cannot write the report to /proc/none/r.html"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(runs, words, answer, capsys):
    assert answer in refused(capsys, "reported", *words, "--root", str(runs[0].parent))


def test_a_run_that_measured_nothing_says_what_measures_it(trained, tmp_path):
    bare = trained("plain", measure=MeasureConfig(exact=Schedule(every=0)))
    out = tmp_path / "r.html"
    assert main(["report", "plain", "--root", str(bare.parent), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    assert "--measure.attribution.every 1" in text and "--measure.exact.every 10" in text
