"""The address of every page holds all that was chosen there, defaults too: opened again it shows the same."""

import pytest
from streamlit.testing.v1 import AppTest

from otb_analysis.store.asked import asked_sql
from tests.app.test_pages import BOTH, open_page, texts
from tests.app.token_runs import write_token_run

KINDS = ("selectbox", "multiselect", "slider", "select_slider", "toggle", "text_input", "text_area", "number_input",
         "button_group")  # fmt: skip
SAVING = ("format-", "width-", "live")  # how a figure is saved is no part of the view

CHANGES = {
    "triage": ({"run": BOTH}, {"smooth": 25, "by": "estimator.name"}),
    "run": ({"run": BOTH, "step": "20"}, {"focus-": "chain-group_mean-s0", "bar": 10, "log": True, "all": True,
                                          "level": "rollout", "advise": True}),
    "rollouts": ({"run": "chain-otb-s0"}, {
        "text": "1", "steps": (3, 20), "reward_range": (0.0, 0.5), "lengths": (4, 12), "finish": ["stop"],
        "groups": "different rewards", "sql": "SELECT step FROM steps LIMIT 3", "glossary": "tokens"}),
    "tokens": ({"run": "chain-otb-s0"}, {"step-chain-otb-s0": 10, "color-": "entropy", "order": "reward",
                                         "scale": "linear", "two": True}),
    "estimators": ({"run": "chain-otb-s0"}, {"part": "comparison", "energy": "exact", "at": "20",
                                             "pool-chain-otb-s0": 3,
                                             "shown-chain-otb-s0-exact": ["rloo", "otb"]}),
    "compare": ({"run": BOTH, "compare": "runs"}, {"a-runs": "chain-otb-s0", "b-runs": "chain-group_mean-s0"}),
}  # fmt: skip


def shown(app: AppTest) -> dict[str, object]:
    """The value of every box, switch and slider of a page, and all that it says."""
    found = {box.key: box.value for kind in KINDS for box in app.get(kind) if not str(box.key).startswith(SAVING)}
    tables = [table.value.drop(columns="age", errors="ignore") for table in app.dataframe]
    return found | {"texts": texts(app), "tables": [table.to_csv() for table in tables]}


def again(app: AppTest, root, page: str, monkeypatch) -> AppTest:
    """Open a page by the address of another session."""
    opened = open_page(root, page, monkeypatch, **app.query_params)
    assert not opened.exception
    return opened.run()  # what a browser does with a page that was just opened


def change(app: AppTest, key: str, value: object) -> None:
    """Change a box as a user does."""
    next(box for kind in KINDS for box in app.get(kind) if box.key == key).set_value(value).run()
    assert not app.exception


@pytest.mark.parametrize("page", CHANGES)
def test_an_address_opens_the_same_view_again(page, store_root, monkeypatch):
    start, changes = CHANGES[page]
    app = open_page(store_root, page, monkeypatch, **start)
    for key, value in changes.items():
        change(app, key, value)
    first = shown(app)
    assert {key: first[key] for key in changes} == changes
    assert shown(again(app, store_root, page, monkeypatch)) == first


@pytest.mark.parametrize("page", CHANGES)
def test_defaults_stand_in_the_address_too(page, store_root, monkeypatch):
    start, changes = CHANGES[page]
    app = open_page(store_root, page, monkeypatch, **start)
    names = {key.split("-")[0] for key in changes} - {"bar"}  # which is the step
    assert names <= set(app.query_params)
    assert shown(again(app, store_root, page, monkeypatch)) == shown(app)


def test_an_answer_to_a_query_is_in_the_address_and_goes_with_its_query(store_root, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0")
    change(app, "sql", "SELECT max(step) AS last FROM steps")
    next(button for button in app.button if button.label == "Run").click().run()
    for opened in (app.run(), again(app, store_root, "rollouts", monkeypatch)):
        assert opened.dataframe[1].value["last"].tolist() == [40]
    change(app, "sql", "SELECT 1")
    assert len(app.dataframe) == 2 and "answered" not in app.query_params


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


def test_a_setting_is_there_again_when_its_page_is_opened_again(store_root, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0")
    change(app, "steps", (3, 20))
    app.switch_page("views/run.py").run()
    app.query_params.pop("steps")  # as in a browser
    app.switch_page("views/rollouts.py").run()
    assert app.slider(key="steps").value == (3, 20)


def test_an_address_that_is_no_value_is_the_default(store_root, monkeypatch):
    wrong = {"steps": "nan..x", "reward_range": "1", "lengths": "9..2", "groups": "none", "glossary": "files"}
    app = open_page(store_root, "rollouts", monkeypatch, run="chain-otb-s0", **wrong)
    assert not app.exception
    assert app.slider(key="steps").value == (0, 40) and app.slider(key="reward_range").value == (0.0, 1.0)
    assert app.slider(key="lengths").value == (2, 9)


def test_a_window_of_one_run_is_not_that_of_another(store_root, monkeypatch):
    app = open_page(store_root, "estimators", monkeypatch, run=BOTH, focus="chain-otb-s0")
    first = app.slider(key="pool-chain-otb-s0").value
    change(app, "pool-chain-otb-s0", 9)
    change(app, "focus-", "chain-group_mean-s0")
    assert app.slider(key="pool-chain-group_mean-s0").value == first


def test_all_of_a_run_that_grows_stays_all_of_it(tmp_path, monkeypatch):
    write_token_run(tmp_path, "grows", steps=3)
    app = open_page(tmp_path, "rollouts", monkeypatch, run="grows")
    assert "".join(app.query_params["steps"]) == "all"
    write_token_run(tmp_path / "longer", "grows", steps=5)
    assert again(app, tmp_path / "longer", "rollouts", monkeypatch).slider(key="steps").value == (0, 4)
