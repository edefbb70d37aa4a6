"""The address of a page says what is shown where that is no default; the session keeps it while others are open."""

import shutil

import pytest
from streamlit.testing.v1 import AppTest

from otb_analysis.store.asked import asked_sql
from tests.app.test_pages import BOTH, open_page
from tests.app.token_runs import write_token_run

KINDS = ("selectbox", "multiselect", "slider", "select_slider", "toggle", "text_input", "text_area", "number_input",
         "button_group")  # fmt: skip

VIEWS = {
    "triage": ({"run": BOTH, "smooth": "25", "by": "estimator.name"}, {"smooth": 25, "by": "estimator.name"}),
    "run": ({"run": BOTH, "step": "10", "focus": "chain-group_mean-s0", "log": "true", "level": "rollouts"},
            {"step": 10, "focus": "chain-group_mean-s0", "log": True, "level": "rollout"}),
    "rollouts": ({"run": "chain-otb-s0", "text": "1", "steps": ["3", "20"], "reward_range": ["0", "0.5"],
                  "finish": "stop", "groups": "different rewards", "sql": "SELECT 1", "where": "tokens > 4",
                  "sort": "longest first", "columns": "turns", "rendered": "true", "rollout": "5.3"},
                 {"text": "1", "steps": (3, 20), "reward_range": (0.0, 0.5), "finish": ["stop"],
                  "groups": "different rewards", "sql": "SELECT 1", "where": "tokens > 4", "sort": "longest first",
                  "columns": ["turns"], "rendered": True}),
    "tokens": ({"run": "chain-otb-s0", "step": "10", "prompt": "3", "color": "entropy", "order": "by reward",
                "scale": "linear", "two": "true"},
               {"step": 10, "prompt": 3, "color": "entropy", "order": "reward", "scale": "linear", "two": True}),
    "estimators": ({"run": "chain-otb-s0", "energy": "exact norms", "at": "20", "over-chain-otb-s0": ["otb", "value"],
                    "shown-chain-otb-s0": ["rloo", "otb"]},
                   {"energy": "exact", "at": "20", "over-chain-otb-s0": ["otb", "value"],
                    "shown-chain-otb-s0": ["rloo", "otb"]}),
    "compare": ({"run": BOTH, "a": "chain-otb-s0", "b": "chain-group_mean-s0"},
                {"a": "chain-otb-s0", "b": "chain-group_mean-s0"}),
}  # fmt: skip


def boxes(app: AppTest) -> dict[str, object]:
    """The value of every box, switch and slider of a page."""
    return {box.key: box.value for kind in KINDS for box in app.get(kind)}


def change(app: AppTest, key: str, value: object) -> None:
    """Change a box as a user does."""
    next(box for kind in KINDS for box in app.get(kind) if box.key == key).set_value(value).run()
    assert not app.exception


@pytest.mark.parametrize("page", VIEWS)
def test_an_address_opens_its_view_and_keeps_it_in_the_session(page, store_root, monkeypatch):
    query, expected = VIEWS[page]
    app = open_page(store_root, page, monkeypatch, **query)
    for _ in range(2):  # what a browser does with a page that was just opened
        assert {key: boxes(app)[key] for key in expected} == expected
        assert {name: one for name, one in app.query_params.items() if name in query} == query
        app.run()
    app.switch_page("views/studies.py").run()
    again = boxes(app.switch_page(f"views/{page}.py").run())
    assert {key: again[key] for key in expected} == expected


def test_defaults_leave_the_address(store_root, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0", text="", steps=["0", "40"], groups="all")
    assert set(app.query_params) == {"run"}


@pytest.mark.parametrize("query", ["SELECT 1 AS one", "SELECT 1; SELECT 2"])
def test_a_query_is_asked_once_however_often_its_page_is_drawn(query, store_root, monkeypatch):
    asked = list[str]()

    def count(run_dir, query):
        asked.append(query)
        return asked_sql(run_dir, query)

    monkeypatch.setattr("otb_analysis.store.asked.asked_sql", count)
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0")
    change(app, "sql", query)
    for clicks in (1, 2):
        next(button for button in app.button if button.label == "Run").click().run()
        shown = [len(app.dataframe), len(app.warning)]
        app.run()
        assert asked == [query] * clicks and [len(app.dataframe), len(app.warning)] == shown


def test_an_address_that_is_no_value_is_the_default(store_root, monkeypatch):
    wrong = {
        "steps": ["nan", "x"],
        "reward_range": "1",
        "sort": "by luck",
        "columns": "x",
        "groups": "none",
        "glossary": "files",
        "rollout": "².³",
    }
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0", **wrong)
    assert not app.exception
    assert app.slider(key="steps").value == (0, 40) and app.slider(key="reward_range").value == (0.0, 1.0)
    assert (
        app.selectbox(key="sort").value.startswith("prompts whose answers disagree")
        and app.selectbox(key="groups").value == "all"
    )


def test_what_is_drawn_over_training_of_one_run_is_not_that_of_another(store_root, monkeypatch):
    app = open_page(store_root, "estimators", monkeypatch, run=BOTH, focus="chain-otb-s0")
    assert app.multiselect(key="over-chain-otb-s0").value[0] == "otb"  # what trained
    change(app, "over-chain-otb-s0", ["value"])
    change(app, "focus", "chain-group_mean-s0")
    assert app.multiselect(key="over-chain-group_mean-s0").value == ["group_mean", "otb", "otb_loo"]


def test_a_step_that_was_chosen_of_one_run_is_not_kept_for_another(store_root, monkeypatch):
    for page in ("run", "tokens"):
        fresh = open_page(store_root, page, monkeypatch, run=BOTH, focus="chain-group_mean-s0")
        app = open_page(store_root, page, monkeypatch, run=BOTH, focus="chain-otb-s0")
        change(app, "step", 10)
        assert boxes(app)["step"] == 10 != boxes(fresh)["step"]
        change(app, "focus", "chain-group_mean-s0")
        assert boxes(app)["step"] == boxes(fresh)["step"]


def test_a_run_is_opened_beside_the_others(store_root, monkeypatch):
    fresh = open_page(store_root, "triage", monkeypatch, run=BOTH)
    label = next(one.label for one in fresh.button if one.label.startswith("Open"))
    worst = label.removeprefix("Open ").replace("\\", "")
    other = next(name for name in BOTH if name != worst)
    app = open_page(store_root, "triage", monkeypatch, run=other)
    next(one for one in app.button if one.label == label).click().run()
    assert not app.exception and app.title[0].value == "Run"
    assert boxes(app)["focus"] == worst and set(boxes(app)["run"]) == {worst, other}


def test_all_of_a_run_that_grows_stays_all_of_it(tmp_path, monkeypatch):
    write_token_run(tmp_path, "grows", steps=3)
    app = open_page(tmp_path, "rollouts", monkeypatch, run="grows")
    assert app.slider(key="steps").value == (0, 2)
    shutil.rmtree(tmp_path / "grows")
    write_token_run(tmp_path, "grows", steps=5)
    for _ in range(2):
        assert app.run().slider(key="steps").value == (0, 4)


def test_an_address_that_names_a_column_of_tokens_opens_it_and_names_it_in_words(store_root, monkeypatch):
    app = open_page(store_root, "tokens", monkeypatch, run="chain-otb-s0", step="10", color="hidden_norm_sq")
    assert app.selectbox(key="color").value == "hidden_norm_sq"
    assert app.query_params["color"] == "‖hidden state‖²"
    change(app, "color", "entropy")
    assert app.selectbox(key="color").value == "entropy"
