"""Every door says the same of a run: terminal, JSON, CSV, LaTeX, Markdown, HTML, the audit and the pages."""

import html
import io
import json
import re
import sys
from pathlib import Path

import pandas as pd
import pytest

from otb_analysis.answers import RunAnswers, compare
from otb_analysis.commands.cli import main
from otb_analysis.store import RunStore

APP = Path(__file__).parents[2] / "app"
RUNS = ("demo", "alarm", "few")


def otb(capsys, *words):
    """What a command prints."""
    capsys.readouterr()
    assert main([str(word) for word in words]) in (0, None)
    return capsys.readouterr().out


def plain(text):
    """Text without markup, line breaks and what a table of LaTeX or Markdown escapes."""
    text = re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.S)
    text = html.unescape(re.sub(r"<[^>]+>", " ", text)).replace("\\", "")
    return " ".join(re.sub(r"[*>%•]", " ", text).split())


def has(text, line):
    return plain(line) in plain(text)


@pytest.fixture
def answers(three_runs):
    return {name: RunAnswers(RunStore(path)) for name, path in three_runs.items()}


@pytest.fixture
def page(monkeypatch):
    """Open a page of the dashboard on one run."""
    from streamlit.testing.v1 import AppTest

    def opened(path, name, **query):
        monkeypatch.setenv("OTB_RUNS", str(path.parent))
        monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        monkeypatch.setattr(sys, "path", [str(APP), *sys.path])
        app = AppTest.from_file(str(APP / "streamlit_app.py"), default_timeout=60)
        for key, value in {"run": path.name, **query}.items():
            app.query_params[key] = value
        app.run()
        app.switch_page(f"views/{name}.py").run()
        assert not app.exception
        return app

    return opened


def doors(capsys, path, tmp_path):
    """What every command prints or writes about a run, by the name of the door."""
    root = path.parent
    texts = {
        "compare": otb(capsys, "compare", path.name, "--root", root),
        "latex": otb(capsys, "compare", path.name, "--root", root, "--format", "latex"),
        "markdown": otb(capsys, "compare", path.name, "--root", root, "--format", "markdown"),
        "diagnose": otb(capsys, "diagnose", path.name, "--root", root),
        "audit": otb(capsys, "audit", "--run", path.name, "--root", root),
    }
    for ending in ("html", "md"):
        otb(capsys, "report", path.name, "--root", root, "--out", tmp_path / f"r.{ending}")
        texts[f"report.{ending}"] = (tmp_path / f"r.{ending}").read_text()
    texts["audit.html"] = (path / "audit.html").read_text()
    return texts


@pytest.mark.parametrize("name", RUNS)
def test_every_command_says_what_the_run_says_in_the_same_sentences(name, three_runs, answers, capsys, tmp_path):
    lines = answers[name].measured.lines
    for door, text in doors(capsys, three_runs[name], tmp_path).items():
        assert [line for line in lines if not has(text, line)] == [], door


@pytest.mark.parametrize("name", RUNS)
def test_json_has_the_same_recommendation_and_reservations(name, three_runs, answers, capsys):
    path, measured = three_runs[name], answers[name].measured
    (design,) = json.loads(otb(capsys, "compare", name, "--root", path.parent, "--json"))["estimators"]
    (diagnosis,) = json.loads(otb(capsys, "diagnose", name, "--root", path.parent, "--json"))
    otb(capsys, "audit", "--run", name, "--root", path.parent)
    audit = json.loads((path / "audit.json").read_text())
    assert design["conclusion"] == list(measured.lines)
    assert design["alarm"] == diagnosis["alarm"] == answers[name].alarm
    assert diagnosis["conclusion"] == list(answers[name].lines) == audit["verdict"][: len(answers[name].lines)]
    best = None if measured.decision.best is None else list(measured.decision.best.label)
    assert (design["recommended"] and design["recommended"]["label"]) == best
    rows = {(row["estimator"], row["energy_source"]): row for row in design["rows"]}
    assert {(row["estimator"], row["energy_source"]): row for row in audit["estimators"]} == rows


@pytest.mark.parametrize("name", RUNS)
def test_numbers_of_csv_python_and_the_page_are_those_of_json(name, three_runs, capsys, page):
    path = three_runs[name]
    (design,) = json.loads(otb(capsys, "compare", name, "--root", path.parent, "--json"))["estimators"]
    frame = pd.DataFrame(design["rows"]).set_index(["estimator", "energy_source"])
    csv = pd.read_csv(
        io.StringIO(otb(capsys, "compare", name, "--root", path.parent, "--format", "csv")),
        keep_default_na=False,
        na_values=[""],
    )
    python = compare(path).to_dataframe()
    from otb_analysis.figures.comparison import comparison_table

    page(path, "estimators")
    shown = comparison_table(RunAnswers(RunStore(path)).measured.comparison("rloo"))
    numbers = [column for column in frame if column not in ("decides", "told", "c_known")]
    for other in (csv, python, shown):
        other = other.set_index(["estimator", "energy_source"]).loc[frame.index]
        pd.testing.assert_frame_equal(
            other[numbers].astype(float), frame[numbers].astype(float), rtol=1e-9, check_names=False
        )


@pytest.mark.parametrize("name", RUNS)
def test_pages_say_the_same_sentences(name, three_runs, answers, page):
    path, lines = three_runs[name], answers[name].lines
    for view in ("estimators", "run"):
        app = page(path, view)
        if view == "run":
            app.toggle(key="advise").set_value(True).run()
        said = " ".join(element.value for kind in ("markdown", "warning", "caption") for element in app.get(kind))
        assert [line for line in lines if not has(said, line)] == [], view


def test_an_alarm_stands_in_the_first_lines_of_every_door_and_nothing_is_proved(three_runs, answers, capsys, tmp_path):
    alarm = answers["alarm"].alarm
    assert "were not drawn by the stated sampler" in alarm
    assert not answers["alarm"].known.projection and answers["alarm"].measured.decision.best is None
    for door, text in doors(capsys, three_runs["alarm"], tmp_path).items():
        body = plain(text)
        assert body.index(plain(alarm)) < 800, door
        assert "1 proved" not in body, door
    frame = compare(three_runs["alarm"]).to_dataframe()
    assert not frame["c_known"].any() and (frame["told"] == "").all()


def test_a_demo_keeps_what_trained_and_names_the_best_against_rloo(answers):
    measured = answers["demo"].measured
    assert measured.against == ("otb", "proxy") and measured.beside.best.label == ("energy_regression", "proxy")
    assert measured.beside.best.by == "variance" and {one.by for one in measured.decision.comparisons} == {"efficiency"}
    assert measured.lines[0].startswith("Keep otb") and measured.decision.best is None


def test_too_few_prompts_get_no_recommendation_but_the_command(answers):
    measured = answers["few"].measured
    assert measured.decision.cause == "few prompts" and measured.decision.best is None
    assert "otb train --config" in " ".join(measured.lines)
