"""What pages show is what commands print as JSON, to the last digit."""

import json

import pytest

from otb_analysis.commands.cli import main
from otb_analysis.figures.styles import interval_cell
from otb_analysis.report.records import jsonable
from otb_analysis.statistics import Interval
from tests.app.test_pages import PAGES, open_page, studies_root, texts
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
    return jsonable(values.tolist())


__all__ = ["odd", "studies_root"]
"""Fixtures of other tests."""

RUN = "chain-otb-s0"


def test_diagnose_of_a_folder_lists_what_triage_lists(store_root, printed, monkeypatch):
    app = open_page(store_root, "triage", monkeypatch)
    shown, found = app.dataframe[0].value, printed("diagnose", str(store_root))
    assert len(shown) == 5 and shown["run"].tolist() == column(found["runs"], "run")
    names = {"what happened": "what_happened", "reward fell": "reward_fell", "detector spoke": "first_warning"}
    names |= {"status": "status", "estimator": "estimator", "steps": "steps", "reward": "reward_thinned"}
    names |= {"first": "reward_first", "last": "reward_last", "held-out": "heldout"}
    for title, name in names.items():
        assert column(found["runs"], name) == listed(shown[title]), name
    assert [state.split(maxsplit=1)[1] for state in shown["state"]] == column(found["runs"], "state")
    assert all(0 <= row["age_seconds"] < 3600 for row in found["runs"] if row["state"] != "broken")
    assert found["verdict"] in texts(app)


ALL = ["none", "group_mean", "grpo", "rloo", "sequence_optimal", "sequence_optimal_loo", "otb", "otb_loo", "value"]


def test_compare_has_the_sentences_the_forest_the_noise_scale_and_the_planner_of_the_page_estimators(
    store_root, printed, monkeypatch
):
    app = open_page(store_root, "estimators", monkeypatch, run=[RUN])
    app.session_state["numbers"] = True  # drawn once it is asked for
    app.segmented_control(key="energy").set_value("both").run()
    next(box for box in app.multiselect if box.label == "Estimators").set_value(ALL).run()
    found, said = printed("compare", RUN), texts(app).replace("**", "")
    (run,), (design,) = found["runs"], found["estimators"]
    assert (
        "  \n".join(run["conclusion"]) in said
        and run["conclusion"][: len(design["conclusion"])] == design["conclusion"]
    )
    assert run["planner"]["note"] in said and design["words"] in said
    scale = design["noise_scale"]
    assert f"signal: rloo {interval_cell(Interval(**scale))}" in said
    shown = next(frame.value for frame in app.dataframe if "noise scale" in frame.value)
    assert column(design["rows"], "estimator") == shown["estimator"].tolist() and len(shown) == 11
    together = f"all {design['looked_at']} together"
    for title, name in {"SF ÷ rloo": "sf_ratio", "efficiency ÷ rloo": "efficiency_ratio", together: "together"}.items():
        ends = [(row[name], row[f"{name}_low"], row[f"{name}_high"]) for row in design["rows"]]
        ratios = [interval_cell(Interval(*one, 0, ""), ".2f") for one in ends]
        if title == together:  # where an end reads 1.00 and yet leaves out 1, a third digit says so
            precise = [interval_cell(Interval(*one, 0, ""), ".3f") for one in ends]
            both = zip(design["rows"], ratios, precise, strict=True)
            ratios = [long if row["told"] and "1.00" in short else short for row, short, long in both]
        assert [cell.removeprefix("eff. ").removesuffix("*") for cell in shown[title]] == ratios
    assert [bool(row["told"]) for row in design["rows"]] == [cell.endswith("*") for cell in shown[together]]


@pytest.fixture(scope="module")
def token_root(tmp_path_factory):
    """A run with reference answers, turns and exact norms."""
    return write_token_run(tmp_path_factory.mktemp("runs"), "first").parent


def test_tokens_has_every_token_of_the_page_with_the_formula_of_the_chosen_estimator(token_root, printed, monkeypatch):
    query = {"run": "first", "step": "0", "prompt": "0", "token": "2.1", "estimator": "otb_turn (exact)"}
    query |= {"against": "rloo", "color": "advantage − another's"}
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
    assert (box(app, "Step").value, box(app, "Prompt").value) == (found["step"], found["prompt"])
    assert len({row["rollout"] for row in found["tokens"]}) == len(found["rollouts"]) == 4


def test_study_has_the_verdict_and_the_tables_of_the_page_studies(studies_root, capsys, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch, study="03_squares")
    monkeypatch.chdir(studies_root)
    assert main(["study", "squares", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert column(found["tables"]["squares"], "square") == app.dataframe[0].value["square"].tolist()
    assert column(found["tables"]["squares"], "square_low") == [1, 3]
    assert found["verdict"] == "They sum to 14 (13–15) :red[x] $y$." and found["cost"] in texts(app)
    assert main(["study", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(app.table[0].value)
    assert main(["study", "04_broken", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "squares.csv cannot be read" in found["tables"]["squares"]["not_read"] and found["tables"]["cost"]


@pytest.mark.parametrize("sides", [{}, {"a": "group_mean", "b": "otb · exact"}])
def test_compare_of_two_estimators_of_a_run_is_that_of_the_page(sides, store_root, printed, monkeypatch):
    app = open_page(store_root, "compare", monkeypatch, run=[RUN], compare="Estimators of one run", **sides)
    found = printed("compare", RUN, *(word for side, name in sides.items() for word in (f"--{side}", name)))["pair"]
    assert (found["a"], found["b"]) == (box(app, "A").value, box(app, "B").value)
    assert found["verdict"] in texts(app)
    (noise,) = found["gradient_noise"]
    ratio = interval_cell(Interval(noise["variance"], noise["variance_low"], noise["variance_high"], 0, ""))
    cells = [str(cell).replace("\\", "") for cell in app.table[0].value.iloc[0]]
    assert ratio in [cell.removesuffix(", not distinguishable") for cell in cells]


def test_compare_of_two_runs_is_that_of_the_page(store_root, printed, monkeypatch):
    runs = ["chain-group_mean-s0", RUN]
    app = open_page(store_root, "compare", monkeypatch, run=runs, compare="Two runs", a=runs[0], b=runs[1])
    found, said = printed("compare", *runs, "--curves"), texts(app)
    assert found["pair"]["verdict"] in said and all(note in said for note in found["pair"]["notes"])
    assert len(found["pair_curves"]) == 41 * 4 + 5 and {row["run"] for row in found["learning"]} == set(runs)
    groups = printed("compare", *runs, "failed-rloo", "--curves", "--by", "seed")["learning"]
    assert set(column(groups, "run")) == {"seed = 0 (2 runs)", "seed = 1 (1 run)"}


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_a_run_of_nan_and_infinity(page, odd, monkeypatch):
    chosen = {"part": "Proxy"} if page == "estimators" else {"token": "0.1"}
    app = open_page(odd, page, monkeypatch, **chosen)
    assert not app.exception
