"""Every page on runs that are large, and on runs with a broken file in any table: its content or a sentence."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic_run import Shape, synthetic_step, write_synthetic_run
from otb_analysis.figures import attribution
from otb_analysis.store import RunWriter
from tests.app.conftest import write_step
from tests.app.test_pages import PAGES, open_page, raws, texts

LONG = Shape(steps=600, measured=20, tokens=9_600, prompts=4, group_size=4, estimators=12)
SHORT = Shape(steps=16, measured=1, tokens=500, prompts=4, group_size=2, estimators=4)
ANSWERS = Shape(steps=1, measured=1, tokens=32_000, prompts=2, group_size=8, estimators=8)
NAMES = ["long", *(f"short-{seed:02}" for seed in range(23))]
MEGABYTE = 1_000_000

pytestmark = [pytest.mark.slow, pytest.mark.heavy]


@pytest.fixture(scope="module")
def huge_root(tmp_path_factory) -> Path:
    """A run of 600 steps, 23 short ones, and one of answers of 2,000 tokens, one token of which has a megabyte."""
    root = tmp_path_factory.mktemp("huge")
    write_synthetic_run(root, "long", LONG)
    for seed, name in enumerate(NAMES[1:]):
        write_synthetic_run(root, name, SHORT, seed)
    writer = RunWriter.create(root, "answers", {"estimator": {"name": "rloo"}})
    tables = synthetic_step(np.random.default_rng(0), 0, ANSWERS, ANSWERS.tokens, measured=True)
    assert tables.tokens is not None
    tables.tokens["token"][0] = "x" * MEGABYTE
    writer.write_step(0, tables)
    writer.finish()
    return root


SAID = {
    "triage": (NAMES, "long: a detector first spoke at step"),
    "run": ("long", "complete · 600 steps"),
    "rollouts": ("long", "9,600 rollouts. The first 500 are listed"),
    "tokens": ("long", "Click a cell to choose its token."),
    "estimators": ("long", "80 prompts of 20 measured steps"),
    "compare": (NAMES[:2], "Training reward: B − A is"),
}
"""What is asked for, and words that only the content has."""


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_a_run_of_600_steps_among_24_others(page, huge_root, monkeypatch):
    runs, words = SAID[page]
    app = open_page(huge_root, page, monkeypatch, run=runs)
    assert not app.exception and not app.warning
    assert words in texts(app) and len(app.get("plotly_chart")) >= 1


def test_triage_lists_and_draws_all_runs_and_groups_them_by_seed(huge_root, monkeypatch):
    app = open_page(huge_root, "triage", monkeypatch, run=NAMES)
    assert sorted(app.dataframe[0].value["run"]) == sorted([*NAMES, "answers"])
    assert app.dataframe[0].value.set_index("run").loc["long", "steps"] == LONG.steps
    assert app.selectbox(key="by").value == "sample.group_size" and not drawn(
        app
    )  # two lines, with names at their ends
    app.selectbox(key="by").set_value("each run alone").run()
    assert {trace["name"] for trace in drawn(app)} == set(NAMES)
    app.selectbox(key="by").set_value("seed").run()
    assert not app.exception and len({trace["name"] for trace in drawn(app)}) == 23  # two of them have seed 0


def drawn(app) -> list[dict]:
    """The curves of a page's first figure that have a name in its legend."""
    return [trace for trace in json.loads(app.get("plotly_chart")[0].proto.spec)["data"] if trace.get("showlegend")]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_answers_of_2000_tokens_with_a_megabyte_in_one(page, huge_root, monkeypatch):
    app = open_page(huge_root, page, monkeypatch, run="answers")
    assert not app.exception and not app.warning
    said = [*raws(app), *(one.value for shown in (app.code, app.markdown) for one in shown)]
    assert max(map(len, said)) < 25_000


def test_all_their_tokens_are_shown_and_the_megabyte_is_cut(huge_root, monkeypatch):
    app = open_page(huge_root, "tokens", monkeypatch, run="answers", prompt="0", token="0.0")
    rows = json.loads(app.get("bidi_component")[0].proto.json)["panes"][0]["rows"]
    shown = [text for row in rows for text in row["texts"]]
    assert len(rows) == 8 and len(shown) > 10_000
    assert rows[0]["texts"][0].endswith("… (1,000,000 characters)") and max(map(len, shown)) < 300
    assert "token 0 of rollout 0" in texts(app)


def test_run_makes_texts_of_the_tokens_that_it_lists_and_of_no_others(huge_root, monkeypatch):
    made = list[str]()
    monkeypatch.setattr(attribution, "visible", lambda text: made.append(text) or text)
    app = open_page(huge_root, "run", monkeypatch, run="answers")
    (listed,) = (one.value for one in app.dataframe if "t" in one.value)
    assert not app.exception and len(made) == len(listed) == 50
    assert "The 50 of 32,000 tokens with the largest size." in texts(app)


def test_the_proxy_is_compared_on_all_of_them(huge_root, monkeypatch):
    said = texts(open_page(huge_root, "estimators", monkeypatch, run="answers", part="Proxy"))
    assert "32,000 tokens compared, from all 32,000 with an exact norm." in said


SMALL = ("steps", "rollouts", "gradients")
BROKEN = {
    "tokens": {"run", "rollouts", "tokens", "proxy"},  # a step's attribution lies in its tokens
    "rollouts": {"run", "rollouts", "tokens", "estimators"},
    "steps": {"triage"},  # without its steps a run is not one that can be opened
    "gradients": {"estimators", "proxy", "compare"},
    "grams": set(),  # what comparisons need of them is a row of the catalogue
}
"""Table → pages that cannot show all of their content without it, and say which file is broken."""


@pytest.fixture(scope="module")
def good_run(tmp_path_factory) -> Path:
    """A run of eleven steps, of which the first and the last were measured."""
    writer = RunWriter.create(tmp_path_factory.mktemp("good"), "run", {"seed": 1, "estimator": {"name": "rloo"}})
    for step in range(11):
        write_step(writer, step, 7)
    writer.finish()
    return writer.path


def opened(root: Path, name: str, monkeypatch, run):
    """A page, or the second part of Estimators, at the step that is broken."""
    part = {"part": "Proxy"} if name == "proxy" else {}
    asked = {"compare": "Two runs", "step": "10", "level": "prompts", "advise": "true", "run": run} | part
    if name == "triage":
        del asked["step"]
    return open_page(root, "estimators" if part else name, monkeypatch, **asked)


@pytest.mark.parametrize("table", BROKEN)
def test_a_broken_part_spoils_only_the_pages_that_need_it_and_no_other_run(table, good_run, tmp_path, monkeypatch):
    for name in ("whole", "damaged"):
        shutil.copytree(good_run, tmp_path / name)
    part = tmp_path / "damaged" / ("run.sqlite" if table in SMALL else f"{table}.parquet")
    if table in SMALL:
        with closing(sqlite3.connect(part)) as db:
            db.execute(f"DELETE FROM {table} WHERE step = 10")
            db.commit()
        part.with_name(f"{table}.parquet").unlink()  # a copy that would do in their place
    else:
        part.write_bytes(part.read_bytes()[:-200])
    needs = BROKEN[table] | ({"run"} if table == "gradients" else set())  # its advice
    for page in (*PAGES, "proxy"):
        app = opened(tmp_path, page, monkeypatch, ["damaged", "whole"] if page == "compare" else "damaged")
        assert not app.exception, page
        assert (part.name in texts(app)) == (page in needs), page
        alone = table == "steps" and page == "compare" and "Only one run is chosen" in texts(app)
        assert page in needs or alone or len(app.get("plotly_chart")) >= 1, page
        if page in needs:
            other = opened(tmp_path, page, monkeypatch, "whole")
            assert not other.exception and not other.warning and "whole" in other.multiselect(key="run").options, page


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_a_broken_run_json_among_good_runs_is_a_line_of_triage(text, good_run, tmp_path, monkeypatch):
    shutil.copytree(good_run, tmp_path / "whole")
    shutil.copytree(good_run, tmp_path / "damaged")
    (tmp_path / "damaged" / "run.json").write_text(text, "latin-1")
    for page in PAGES:
        app = open_page(tmp_path, page, monkeypatch)
        assert not app.exception and not app.warning, page
        assert app.multiselect(key="run").options == ["whole"], page
        if page == "triage":
            listed = app.dataframe[0].value.set_index("run")["status"].to_dict()
            assert listed == {"whole": "complete", "damaged": "broken"}
            assert "**damaged**: " in texts(app) and "run.json" in texts(app)
