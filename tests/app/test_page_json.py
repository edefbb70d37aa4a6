"""Every page's numbers as JSON: what a page shows is what its command prints, to the last digit."""

import base64
import json

import numpy as np
import pytest

from otb_analysis.commands.cli import main
from otb_analysis.figures.numbers import bracketed, number
from otb_analysis.report.record import written
from tests.app.test_pages import PAGES, open_page, run_query, studies_root, texts
from tests.app.test_tokens_page import box, payload
from tests.app.token_runs import write_token_run
from tests.commands.test_query import odd


@pytest.fixture
def printed(store_root, capsys):
    """Run a command on the synthetic store and return its JSON, read by a parser that takes no NaN."""

    def run(*words: str, root: object = store_root) -> dict:
        capsys.readouterr()
        assert main([*words, "--root", str(root), "--json"]) == 0
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    return run


def column(rows, name):
    return [row[name] for row in rows]


def listed(values):
    """A column of a page's table as JSON has it: None for what is missing."""
    return written(values.tolist())


def values(drawn):
    """The numbers of a curve as Plotly sends them to a browser."""
    return np.frombuffer(base64.b64decode(drawn["bdata"]), drawn["dtype"]).tolist()


__all__ = ["odd", "studies_root"]
"""Fixtures of other tests."""

SQL = "SELECT finish_reason, count(*) AS n, avg(reward) AS reward FROM rollouts GROUP BY ALL ORDER BY ALL"


def test_query_answers_what_the_sql_box_and_the_page_rollouts_show(store_root, printed, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run=["chain-otb-s0"])
    app.text_area(key="sql").set_value(SQL).run()
    run_query(app)
    answer = printed("query", "chain-otb-s0", SQL)
    shown = app.dataframe[1].value
    assert answer["columns"] == list(shown) and answer["n"] == len(shown) == 2 and answer["cut"] is False
    assert all(column(answer["rows"], name) == listed(shown[name]) for name in shown)
    page = printed("query", "chain-otb-s0")
    assert f"{page['n_rollouts']:,} rollouts." in texts(app)
    rollouts = app.dataframe[0].value
    assert column(page["rollouts"], "reward") == listed(rollouts["reward"]) and len(rollouts) == 500
    assert sum(column(page["rewards_by_step"], "n")) == page["n_rollouts"]
    columns = next(frame.value for frame in app.dataframe if "meaning" in frame.value)
    assert column(page["columns"]["rollouts"], "meaning") == columns["meaning"].tolist()


def test_diagnose_of_a_folder_lists_what_triage_lists(store_root, printed, monkeypatch):
    app = open_page(store_root, "triage", monkeypatch)
    shown, found = app.dataframe[0].value, printed("diagnose", str(store_root))
    assert len(shown) == 5 and shown["run"].tolist() == column(found["runs"], "run")
    names = {"what happened": "what_happened", "first warning": "first_warning", "reward": "reward_thinned"}
    names |= {"status": "status", "estimator": "estimator", "steps": "steps"}
    names |= {"first": "reward_first", "last": "reward_last", "held-out": "heldout"}
    for title, name in names.items():
        assert column(found["runs"], name) == listed(shown[title]), name
    assert [state.split(maxsplit=1)[1] for state in shown["state"]] == column(found["runs"], "state")
    assert all(0 <= row["age_seconds"] < 3600 for row in found["runs"] if row["state"] != "broken")
    assert found["verdict"] in texts(app)


def test_diagnose_of_a_run_has_the_alarms_events_and_attribution_of_the_page_run(store_root, printed, monkeypatch):
    run = "chain-group_mean-s0"
    app = open_page(store_root, "run", monkeypatch, run=[run], step="20")
    (found,) = printed("diagnose", run, "--step", "20", "--curves")
    tables = [table.value for table in app.table]
    reasons = [reason for table in tables if "why" in table for reason in table["why"]]
    assert [reason.replace("\\", "") for reason in reasons] == column(found["detectors"], "why")
    fired = sum(detector["first_watch"] is not None for detector in found["detectors"])
    assert (
        fired
        and [None if shown == "–" else int(shown) for shown in tables[0]["first watch"]]
        == column(found["detectors"], "first_watch")[:fired]
    )
    figure = json.loads(app.get("plotly_chart")[0].proto.spec)
    lanes = [trace for trace in figure["data"] if trace["yaxis"] == "y"]
    drawn = sorted((step, text) for lane in lanes for step, text in zip(lane["x"], lane["text"], strict=True))
    assert drawn == sorted((event["step"], event["text"]) for event in found["events"]) and len(drawn) > 3
    reward = next(panel for panel in found["panels"] if panel["column"] == "reward_mean")
    curve = next(trace for trace in figure["data"] if trace.get("name") == "Reward")
    assert reward["step"] == list(range(41)) and reward["value"] == pytest.approx(values(curve["y"]), abs=1e-12)
    shares = found["attribution"]
    assert shares["says"] in texts(app)
    held = next(frame.value for frame in app.dataframe if "share" in frame.value)
    for name in ("prompt", "rollout", "t", "token", "share", "signal", "noise", "reward", "text"):
        assert column(shares["tokens"], name) == listed(held[name]), name
    assert len(shares["tokens"]) == 50 and shares["holders"]["token"] == len(shares["held_by_n_tokens"])
    counts = next(frame.value for frame in app.dataframe if "groups of one" in frame.value)
    assert {name: count for name, count in counts.iloc[0].items() if name != "run"} == found["degenerate"]


def test_diagnose_of_a_step_that_was_not_attributed_says_what_the_page_says(store_root, printed, monkeypatch):
    app = open_page(store_root, "run", monkeypatch, run=["chain-otb-s0"], step="7")
    (found,) = printed("diagnose", "chain-otb-s0", "--step", "7")
    assert found["attribution"]["missing"] in texts(app) and found["attribution"]["nearest"] in (0, 10)


def test_the_step_the_page_run_opens_with_is_in_the_json(store_root, printed, monkeypatch):
    app = open_page(store_root, "run", monkeypatch, run=["chain-group_mean-s0"])
    (found,) = printed("diagnose", "chain-group_mean-s0")
    assert app.query_params["step"] == str(found["look_first_at"])


ALL = ["none", "group_mean", "grpo", "rloo", "sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "value"]


def test_compare_has_the_forest_the_noise_scale_the_planner_and_the_course_of_the_page_estimators(
    store_root, printed, monkeypatch
):
    run = "chain-otb-s0"
    app = open_page(store_root, "estimators", monkeypatch, run=[run])
    app.segmented_control(key="energy").set_value("both").run()
    next(box for box in app.multiselect if box.label == "Estimators").set_value(ALL).run()
    (found,) = printed("compare", run)["by_run"]
    said = texts(app)
    assert all(sentence in said for sentence in [*found["conclusion"], found["planner"]["note"]])
    assert found["order"] in said and found["estimand"] in said
    scale = found["noise_scale"]
    assert f"rloo: {bracketed(scale['estimate'], scale['low'], scale['high'], '.0f')} prompts." in said
    shown = next(frame.value for frame in app.dataframe if "noise scale" in frame.value)
    assert column(found["estimators"], "estimator") == shown["estimator"].tolist() and len(shown) == 11
    for title, name in (("efficiency", "efficiency_ratio"), ("SF", "sf_ratio"), ("variance", "variance_ratio")):
        ratios = [bracketed(row[name], row[f"{name}_low"], row[f"{name}_high"]) for row in found["estimators"]]
        assert ratios == shown[f"{title} ÷ rloo"].tolist()
    course = found["over_training"]
    assert course["pooled_steps"] == next(slider for slider in app.slider if "pooled" in slider.label).value
    figure = json.loads(app.get("plotly_chart")[-1].proto.spec)
    (rloo,) = [t for t in figure["data"] if t["name"] == "rloo" and t["xaxis"] == "x" and t.get("showlegend", True)]
    mine = [row["efficiency"] for row in course["rows"] if row["estimator"] == "rloo"]
    assert [x for x in mine if x is not None] == pytest.approx([x for x in values(rloo["y"]) if x == x], rel=1e-5)


def test_compare_has_what_the_proxy_costs_and_how_it_agrees(store_root, printed, monkeypatch):
    run = "chain-otb-s0"
    app = open_page(store_root, "estimators", monkeypatch, run=[run], part="proxy")
    token, realized = printed("compare", run)["proxy"]
    assert (token["of"], realized["of"]) == ("token energy w_t", "realized energy W_t")
    assert f"{app.metric[0].value} ({app.metric[0].delta})" == token["gain_lost_words"]
    for metric, name in zip(app.metric[1:], ("pearson", "log_pearson", "spearman"), strict=True):
        assert metric.value == number(token["within"][name])
        assert metric.delta == f"{number(token['pooled'][name])} pooled"
    said = texts(app)
    assert f"exact ∝ proxy^{token['line']['slope']:.2f}" in said
    assert f"{token['compared']:,} tokens compared, from all {token['exact']:,}" in said
    assert len(token["furthest"]) == 200 and column(token["by_step"], "step") == ["all", "0", "10", "20", "30", "40"]


@pytest.fixture(scope="module")
def token_root(tmp_path_factory):
    """A run with reference answers, turns and exact norms."""
    return write_token_run(tmp_path_factory.mktemp("runs"), "first").parent


def test_tokens_has_every_token_of_the_page_with_the_formula_of_the_chosen_estimator(token_root, printed, monkeypatch):
    query = {"run": "first", "step": "0", "prompt": "0", "token": "2.1", "estimator": "otb_turn (exact)"}
    query |= {"against": "rloo", "color": "advantage_difference"}
    app = open_page(token_root, "tokens", monkeypatch, **query)
    words = ["first", "--step", "0", "--prompt", "0", "--rollout", "2", "--t", "1", "--estimator", "otb_turn (exact)"]
    found = printed("tokens", *words, "--against", "rloo", root=token_root)
    panel = [dict(table.value.to_numpy().tolist()) for table in app.table if table.value.shape[1] == 2]
    shown = {plain.replace("\\", ""): text.replace("\\", "") for table in panel for plain, text in table.items()}
    lines = found["token"]["numbers"] | found["token"]["formula"]["lines"]
    assert shown == lines and {"formula", "with numbers", "advantage", "probability"} <= set(lines)
    terms, drawn = found["token"]["formula"]["terms"], app.dataframe[0].value
    assert all(column(terms, name) == pytest.approx(drawn[name].tolist()) for name in ("weight", "return", "w", "W"))
    row = payload(app)["panes"][0]["rows"][2]
    for name in ("logprob", "grad_norm_sq", "baseline", "advantage", "advantage_difference", "policy_minus_sampler"):
        pairs = zip(column(found["tokens"], name), row["values"][name], strict=True)
        assert all(a is b is None or float(b) == pytest.approx(a, rel=5e-3, abs=1e-6) for a, b in pairs), name
    assert found["head"]["answer"] == "19" and found["rollouts"][0]["ends_with"] == "48, not 19"
    assert found["estimators"] == box(app, "Estimator").options


def test_tokens_without_choices_opens_what_the_page_opens(token_root, printed, monkeypatch):
    app, found = open_page(token_root, "tokens", monkeypatch, run="first"), printed("tokens", "first", root=token_root)
    assert (app.query_params["step"], app.query_params["prompt"]) == (str(found["step"]), str(found["prompt"]))
    assert len({row["rollout"] for row in found["tokens"]}) == len(found["rollouts"]) == 4


def test_study_has_the_verdict_and_the_tables_of_the_page_studies(studies_root, capsys, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch, study="03_squares")
    monkeypatch.chdir(studies_root)
    assert main(["study", "squares", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (found["study"], found["state"], found["command"]) == ("03_squares", "measured", "otb study 03_squares")
    shown = app.dataframe[0].value
    assert column(found["tables"]["squares"], "square") == shown["square"].tolist()
    assert column(found["tables"]["squares"], "square_low") == [1, 3]
    assert found["verdict"] == "They sum to 14 (13–15) :red[x] $y$." and found["cost"] in texts(app)
    assert main(["study", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [f"{row['state']}, {row['cost'].split(' in')[0]}".strip(", ") for row in rows] == app.table[0].value[
        "state and cost"
    ].tolist()
    assert main(["study", "04_broken", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "squares.csv cannot be read" in found["tables"]["squares"]["not_read"] and found["tables"]["cost"]


def test_compare_of_two_estimators_of_a_run_is_that_of_the_page(store_root, printed, monkeypatch):
    run = "chain-otb-s0"
    for sides in ({}, {"a": "group_mean", "b": "otb · exact"}):
        app = open_page(store_root, "compare", monkeypatch, run=[run], compare="estimators", **sides)
        words = [word for side, name in sides.items() for word in (f"--{side}", name)]
        found = printed("compare", run, *words)["by_run"][0]["pair"]
        assert (found["a"], found["b"]) == (app.query_params["a"], app.query_params["b"])
        assert found["verdict"] in texts(app)
        (noise,) = found["gradient_noise"]
        assert noise["what"] in app.table[0].value.iloc[0].tolist()[0].replace("\\", "")
        ratio = bracketed(noise["variance"], noise["variance_low"], noise["variance_high"])
        assert ratio in [str(cell).replace("\\", "") for cell in app.table[0].value.iloc[0]]
        assert {row["quantity"] for row in found["blocks"]} == {row["quantity"] for row in found["quantities"]}


def test_compare_has_the_learning_curves_and_differences_of_triage_and_the_pair_of_compare(
    store_root, printed, monkeypatch
):
    runs = ["chain-group_mean-s0", "chain-otb-s0"]
    app, found = open_page(store_root, "triage", monkeypatch, run=runs), printed("compare", *runs, "--curves")
    assert column(found["settings"], "setting") == app.dataframe[1].value["setting"].tolist() == ["estimator.name"]
    figure = json.loads(app.get("plotly_chart")[0].proto.spec)
    for run in runs:
        smooth = [row["smooth"] for row in found["learning"] if (row["run"], row["quantity"]) == (run, "reward_mean")]
        drawn = [t for t in figure["data"] if t.get("name", "").startswith(run) and t["xaxis"] == "x"]
        assert any(values(t["y"]) == pytest.approx(smooth, rel=1e-5) for t in drawn if "bdata" in t["y"])
    app = open_page(store_root, "compare", monkeypatch, run=runs, compare="runs", a=runs[0], b=runs[1])
    said = texts(app)
    assert found["pair"]["verdict"] in said and all(note in said for note in found["pair"]["notes"])
    assert len(found["pair_curves"]) == 41 * 4 + 5 and found["pair"]["intervals"] in said


def test_compare_groups_the_learning_curves_as_triage_does(store_root, printed, monkeypatch):
    runs = ["chain-group_mean-s0", "chain-otb-s0", "failed-rloo"]
    app = open_page(store_root, "triage", monkeypatch, run=runs, by="seed")
    found = printed("compare", *runs, "--curves", "--by", "seed")["learning"]
    drawn = [t for t in json.loads(app.get("plotly_chart")[0].proto.spec)["data"] if t.get("xaxis") == "x"]
    names = set(column(found, "run"))
    assert names == {"seed = 0 (2 runs)", "seed = 1 (1 run)"}
    for name in names:
        mean = [row["value"] for row in found if (row["run"], row["quantity"]) == (name, "reward_mean")]
        curves = [values(t["y"]) for t in drawn if t.get("name") == name and "bdata" in t["y"]]
        assert any(curve == pytest.approx(mean, rel=1e-5) for curve in curves), name


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_a_run_of_nan_and_infinity(page, odd, monkeypatch):
    chosen = {"part": "proxy"} if page == "estimators" else {"token": "0.1"}
    app = open_page(odd, page, monkeypatch, **chosen)
    assert not app.exception
