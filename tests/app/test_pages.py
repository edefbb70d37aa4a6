import importlib
import json
import pkgutil
import re
import shutil
import sys
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from otb_analysis import figures
from otb_analysis.answers import RunAnswers
from otb_analysis.answers.pairs import estimator_pair
from otb_analysis.commands.cli import main
from otb_analysis.diagnostics import DETECTORS
from otb_analysis.store import RunStore, RunWriter, StepTables
from otb_analysis.store.measured import exact_groups
from tests.app.token_runs import write_token_run

APP = Path(__file__).parents[2] / "app" / "streamlit_app.py"
PAGES = ("triage", "run", "rollouts", "tokens", "estimators", "compare")


def open_page(root: Path, page: str, monkeypatch: pytest.MonkeyPatch, **query: str | list[str]) -> AppTest:
    """A page as its address opens it."""
    # AppTest leaves the page behind as `__main__`, which a later test's spawned process would run.
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OTB_RUNS", str(root))
    app = AppTest.from_file(APP, default_timeout=60)
    for name, value in query.items():
        app.query_params[name] = value
    app.session_state["_arrived"] = False  # or a running run would open
    return (app if page == "triage" else app.switch_page(f"views/{page}.py")).run()


def open_part(root: Path, part: str, monkeypatch: pytest.MonkeyPatch, **query: str) -> AppTest:
    """The page Estimators with one of its two parts, as its address asks for."""
    return open_page(root, "estimators", monkeypatch, part=part, **query)


def texts(app: AppTest) -> str:
    """Everything a page says, with the escapes of Markdown taken out."""
    shown = [*app.info, *app.warning, *app.caption, *app.markdown, *app.error]
    return " ".join(element.value for element in shown).replace("\\", "")


def raws(app: AppTest) -> list[str]:
    """The texts that a page shows as they are."""
    bodies = [element.proto.body for element in app.get("html")]
    return [unescape(found[1]) for body in bodies if (found := re.search(r'<pre class="raw">\n(.*)</pre>', body, re.S))]


@pytest.mark.parametrize("page", PAGES)
def test_page_of_a_whole_store_shows_no_warning_and_no_traceback(page, store_root, monkeypatch):
    app = open_page(store_root, page, monkeypatch)
    assert not app.exception
    assert not app.warning
    assert app.title[0].value == page.capitalize()
    assert len(app.get("plotly_chart")) >= 1


@pytest.mark.parametrize("page", PAGES)
def test_missing_root_gets_a_sentence_with_a_remedy(page, tmp_path, monkeypatch):
    app = open_page(tmp_path / "nowhere", page, monkeypatch)
    assert not app.exception
    assert "This folder does not exist" in texts(app)
    assert "make demo" in texts(app)


@pytest.mark.parametrize("page", PAGES)
def test_empty_root_gets_a_sentence_with_a_remedy(page, tmp_path, monkeypatch):
    app = open_page(tmp_path, page, monkeypatch)
    assert not app.exception
    assert "There are no runs in this folder" in texts(app)


def test_root_that_is_a_file_gets_a_sentence(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    app = open_page(file, "triage", monkeypatch)
    assert not app.exception
    assert str(file) in texts(app)


def test_triage_says_why_a_run_is_broken_or_failed(store_root, monkeypatch):
    said = texts(open_page(store_root, "triage", monkeypatch))
    assert "run.json cannot be read" in said
    assert "the loss is NaN at step 12" in said


def test_triage_puts_the_worst_run_first_and_says_in_one_sentence_what_happened(store_root, tmp_path, monkeypatch):
    for name in ("chain-otb-s0", "broken"):
        shutil.copytree(store_root / name, tmp_path / name)
    writer = RunWriter.create(tmp_path, "dead", {"estimator": {"name": "rloo"}})
    for step in range(30):
        writer.write_step(step, StepTables(steps={"reward_mean": 0.75 * (step < 20), "grad_norm": float(step < 22)}))
    writer.finish()
    app = open_page(tmp_path, "triage", monkeypatch)
    table = app.dataframe[0].value
    assert table["run"].tolist() == ["dead", "chain-otb-s0", "broken"]
    assert [state.split()[-1] for state in table["state"]] == ["collapsed", "calm", "broken"]
    assert (
        "dead: reward 0.750 → 0, halfway down at step 20; no gradient since step 22; a detector first spoke at step 21"
        in texts(app)
    )
    app.session_state["focus"] = "dead"
    assert "what it tells began earlier" in texts(app.switch_page("views/run.py").run())


def test_of_a_collapsed_run_what_is_worth_reading_is_of_before_the_fall(store_root, monkeypatch):
    app = open_page(store_root, "run", monkeypatch, run=["chain-group_mean-s0"])
    # It fell at step 34, and every tenth step is attributed.
    assert "Of step 30, the last attributed step before the reward fell at step 34" in texts(app)
    app.button(key="read-0").click().run()
    assert not app.exception and app.title[0].value == "Tokens" and app.selectbox(key="step").value == 30


def test_all_running_runs_are_chosen_and_one_that_begins_is_chosen_too(tmp_path, monkeypatch):
    for name in ("a", "b", "c", "d", "e", "f"):
        writer = RunWriter.create(tmp_path, name, {})
        writer.write_step(0, StepTables(steps={"reward_mean": 0.5}))
        if name == "f":
            writer.finish()
    app = open_page(tmp_path, "triage", monkeypatch)
    assert sorted(app.multiselect[0].value) == ["a", "b", "c", "d", "e"]
    app.multiselect[0].set_value(["b"]).run()
    app.switch_page("views/run.py").run()
    assert app.multiselect[0].value == ["b"] and "**b**" in texts(app)
    RunWriter.create(tmp_path, "g", {}).write_step(0, StepTables(steps={"reward_mean": 0.5}))
    app.run()
    assert sorted(app.multiselect[0].value) == ["b", "g"] and "**b**" in texts(app)
    app.multiselect[0].set_value(["b"]).run()
    assert app.run().multiselect[0].value == ["b"]


def test_a_click_on_a_run_opens_its_page(store_root, monkeypatch):
    app = open_page(store_root, "triage", monkeypatch)
    run = app.dataframe[0].value["run"].iloc[0]
    app.session_state["run"], app.session_state["_page"] = [run], ("run", {})  # what a click leaves
    app.run()
    assert not app.exception
    assert app.title[0].value == "Run" and app.multiselect[0].value == [run]


def test_a_click_on_a_run_without_steps_opens_no_other_run_and_says_why(tmp_path, monkeypatch):
    for name in ("good", "failed", "young"):
        writer = RunWriter.create(tmp_path, name, {})
        if name == "good":
            writer.write_step(0, StepTables(steps={"reward_mean": 0.5}))
        if name != "young":
            writer.finish(*([] if name == "good" else ["failed", "the task has no prompts."]))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    app = open_page(tmp_path, "triage", monkeypatch)
    sentences = {
        "failed": "failed cannot be opened: it has no complete step; the task has no prompts.",
        "young": "young cannot be opened: it has no complete step yet.",
        "broken": "broken cannot be opened: ",
    }
    for name, sentence in sentences.items():
        app.session_state["_refused"] = name
        app.run()
        assert not app.exception and app.title[0].value == "Triage"
        assert sentence in texts(app)
    assert "cannot be opened" not in texts(app.run())


def test_a_long_run_that_no_detector_can_judge_is_not_called_too_short(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "silent", {})
    for step in range(60):
        writer.write_step(step, StepTables(steps={"loss": 0.5}))
    writer.finish()
    said = texts(open_page(tmp_path, "run", monkeypatch))
    assert "no detector could judge this run." in said and "too few steps" not in said


def test_triage_lists_only_settings_that_differ(store_root, monkeypatch):
    app = open_page(store_root, "triage", monkeypatch)
    table = app.dataframe[0].value
    assert "config.seed" in table and not {"task", "config.estimator.name"} & set(
        table
    )  # the estimator has its own column


def test_many_runs_are_grouped_by_estimator_however_many_there_are(tmp_path, monkeypatch):
    names = [f"e{place}-s{seed}" for place in range(7) for seed in range(2)]
    for name in names:
        config = {"estimator": {"name": name[:2]}, "task": name[1], "optimize": {"steps": int(name[1]) % 2}}
        writer = RunWriter.create(tmp_path, name, config | {"seed": int(name[-1])})
        writer.write_step(0, StepTables(steps={"reward_mean": 0.5}))
        writer.finish()
    app = open_page(tmp_path, "triage", monkeypatch, run=names)
    assert app.selectbox(key="by").value == "estimator.name" and not app.exception
    app = open_page(tmp_path, "triage", monkeypatch, run=names[:6])
    assert app.selectbox(key="by").value == "each run alone"


def test_triage_says_how_many_settings_an_older_run_does_not_have(tmp_path, monkeypatch):
    for name, config in (("older", {"seed": 0}), ("newer", {"seed": 1, "objective": {"epochs": 1, "staleness": 0}})):
        RunWriter.create(tmp_path, name, config).write_step(0, StepTables(steps={"reward_mean": 0.5}))
    app = open_page(tmp_path, "triage", monkeypatch)
    listed_columns = app.dataframe[0].value
    assert "config.seed" in listed_columns and "config.objective.epochs" not in listed_columns
    assert ": 2 settings." in texts(app)


def test_what_is_typed_to_find_runs_chooses_them_and_triage_lists_no_others(store_root, monkeypatch):
    app = open_page(store_root, "triage", monkeypatch, find="chain estimator=otb")
    assert app.multiselect(key="run").value == ["chain-otb-s0"]
    assert app.dataframe[0].value["run"].tolist() == ["chain-otb-s0"]
    app.text_input(key="find").set_value("heldout_reward>0.1 chain").run()
    assert sorted(app.multiselect(key="run").value) == BOTH
    app.multiselect(key="run").set_value(["failed-rloo"]).run()
    assert app.multiselect(key="run").value == ["failed-rloo"] and len(app.dataframe[0].value) == 2
    app.text_input(key="find").set_value("nowhere").run()
    assert not app.exception and app.multiselect(key="run").value == [] and "No run fits what" in texts(app)
    app.text_input(key="find").set_value("nosuch=1").run()
    assert not app.exception and "no run has the setting or result 'nosuch'" in texts(app)
    assert app.multiselect(key="run").value == []  # what cannot be asked chooses none anew


def test_an_emptied_search_chooses_the_usual_runs_and_a_setting_may_be_called_as_a_column(tmp_path, monkeypatch):
    for i in range(8):
        writer = RunWriter.create(tmp_path, f"r{i}", {"steps": 10 + i, "seed": i})
        writer.write_step(0, StepTables(steps={"reward_mean": 0.5}))
        writer.finish()
    app = open_page(tmp_path, "triage", monkeypatch)
    usual = app.multiselect(key="run").value
    assert not app.exception and 1 < len(usual) < 8 and "config.steps" in app.dataframe[0].value
    assert app.text_input(key="find").set_value("seed=0").run().multiselect(key="run").value == ["r0"]
    assert app.text_input(key="find").set_value("").run().multiselect(key="run").value == usual


def test_the_reference_is_chosen_first_on_triage_and_a_on_compare(store_root, monkeypatch):
    asked = {"run": BOTH, "compare": "Two runs"}
    for pinned in ("chain-otb-s0", "failed-rloo"):
        app = open_page(store_root, "compare", monkeypatch, reference=pinned, **asked)
        assert app.selectbox(key="a").value == pinned
    for pinned in (*BOTH, *BOTH):
        app.selectbox(key="reference").set_value(pinned).run()
        assert app.selectbox(key="a").value == pinned != app.selectbox(key="b").value
    app.selectbox(key="reference").set_value("").run()
    assert app.selectbox(key="a").value != app.selectbox(key="b").value
    app.selectbox(key="reference").set_value("chain-otb-s0").run()
    app.switch_page("views/triage.py").run()
    assert app.dataframe[0].value["run"].iloc[0] == "chain-otb-s0"


def test_a_run_has_one_colour_on_every_page_and_in_every_selection(store_root, monkeypatch):
    def lines(page, **asked):
        app = open_page(store_root, page, monkeypatch, **asked)
        traces = [trace for chart in app.get("plotly_chart") for trace in json.loads(chart.proto.spec)["data"]]
        return {trace.get("name"): trace["line"]["color"] for trace in traces if trace.get("name") and "line" in trace}

    alone, both = lines("triage", run="chain-otb-s0"), lines("triage", run=BOTH)
    pair = lines("compare", run=BOTH, compare="Two runs")
    own = both["chain-otb-s0"]
    assert own == alone["chain-otb-s0"] == pair["B: chain-otb-s0"] == lines("run", run="chain-otb-s0")["Reward"]
    assert both["chain-group_mean-s0"] == pair["A: chain-group_mean-s0"] != own


@pytest.mark.parametrize("page", PAGES)
def test_half_written_run_shows_its_complete_steps(page, store_root, monkeypatch):
    app = open_page(store_root, page, monkeypatch, run="running-otb_loo")
    assert not app.exception
    assert not app.warning


@pytest.mark.parametrize("page", ["triage", "run"])
def test_broken_catalogue_gets_a_sentence_that_names_the_file(page, store_root, monkeypatch, tmp_path):
    shutil.copytree(store_root / "failed-rloo", tmp_path / "damaged")
    part = tmp_path / "damaged" / "run.sqlite"
    part.write_bytes(part.read_bytes()[:5000])
    app = open_page(tmp_path, page, monkeypatch)
    assert not app.exception
    assert part.name in texts(app)


def test_broken_token_part_spoils_only_its_page(store_root, monkeypatch, tmp_path):
    shutil.copytree(store_root / "failed-rloo", tmp_path / "damaged")
    part = tmp_path / "damaged" / "tokens" / "part-00000010-r0.parquet"
    part.write_bytes(b"nothing")
    assert not open_page(tmp_path, "triage", monkeypatch).warning
    collapse = open_page(tmp_path, "run", monkeypatch, step="10")
    assert part.name in texts(collapse) and "Rollouts that teach nothing" in [one.label for one in collapse.expander]
    app = open_page(tmp_path, "tokens", monkeypatch)
    assert not app.exception
    assert part.name in texts(app)


def test_variance_below_sixteen_prompts_shows_points_and_says_so(store_root, monkeypatch):
    app = open_page(store_root, "estimators", monkeypatch, run="failed-rloo")
    assert "bands are its 95 % intervals clustered by prompt, where it has 16 prompts" in texts(app)
    assert "points without intervals" in texts(app)


def test_too_few_prompts_to_recommend_a_baseline_are_said_first(store_root, monkeypatch):
    said = texts(open_page(store_root, "estimators", monkeypatch, run="failed-rloo"))
    assert "**Nothing can be told apart yet: 8 prompts were measured, and a recommendation takes 16.**" in said


def test_a_command_that_a_sentence_ends_in_stands_below_it_to_be_copied(store_root, tmp_path, monkeypatch):
    for name in ("chain-otb-s0", "failed-rloo"):
        shutil.copytree(store_root / name, tmp_path / name)
    app = open_page(tmp_path, "estimators", monkeypatch, focus="failed-rloo", run=["chain-otb-s0", "failed-rloo"])
    commands = [block.value for block in app.code if block.value.startswith("otb ")]
    assert commands[0].startswith("otb train --config ") and ";" not in commands[0]
    assert f"otb compare chain-otb-s0 failed-rloo --root {tmp_path}" in commands
    assert "otb train" not in texts(app) and "otb compare" not in texts(app)
    kinds = [one.type for one in app.main]
    assert kinds.index("plotly_chart") < kinds.index("code")  # the figure is seen without scrolling
    advised = open_page(tmp_path, "run", monkeypatch, run="failed-rloo", advise="true")
    assert commands[0] in [block.value for block in advised.code]


def test_variance_with_sixteen_prompts_shows_clustered_intervals(store_root, monkeypatch):
    app = open_page(store_root, "estimators", monkeypatch, run="chain-otb-s0")
    assert "95 % intervals clustered by prompt" in texts(app)


BOTH = ["chain-group_mean-s0", "chain-otb-s0"]
SCRIPTS = (
    ("triage", {"run": BOTH}, ["learning"]),
    ("triage", {"run": BOTH, "by": "estimator.name"}, ["learning"]),
    ("run", {"run": "chain-otb-s0", "step": "20"}, ["attribution", "timeline"]),
    ("run", {"run": "chain-otb-s0", "step": "21"}, ["attribution", "timeline"]),
    ("rollouts", {"run": "chain-otb-s0", "text": "1"}, ["rewards"]),
    ("tokens", {"run": "chain-otb-s0"}, ["tokens"]),
    ("estimators", {"run": "chain-otb-s0"}, ["comparison", "over-training"]),
    ("estimators", {"run": "chain-otb-s0", "part": "Proxy"}, ["fidelity", "fidelity-steps"]),
    ("compare", {"run": BOTH, "compare": "Two runs"}, ["pair"]),
    ("compare", {"run": "chain-otb-s0", "compare": "Estimators of one run"}, ["pair"]),
)


@pytest.mark.parametrize(("name", "asked", "figures"), SCRIPTS)
def test_every_figure_comes_with_the_python_that_draws_it(name, asked, figures, store_root, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    app = open_page(store_root, name, monkeypatch, **asked)
    assert drawn_by_scripts(app, tmp_path) == figures
    assert not [block.value for block in app.code if str(store_root) in block.value]  # paths from where one stands


def test_lines_of_the_documents_draw_the_figures_that_they_name(store_root):
    names = {"answers": RunAnswers(RunStore(store_root / "chain-otb-s0"))}
    names |= {"estimator_pair": estimator_pair, "exact_groups": exact_groups}
    for module in pkgutil.iter_modules(figures.__path__, f"{figures.__name__}."):
        names |= vars(importlib.import_module(module.name))
    page = (APP.parents[1] / "docs" / "python.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| [^|]+ \| `(plot_.*)` \|$", page, re.M)
    assert len(lines) == 7 and [line for line in lines if not eval(line, dict(names)).data] == [
        "plot_planner(answers.planner)"
    ]


def test_so_does_the_planner_of_a_run_with_smaller_groups(tmp_path, checkpoint, half_task, monkeypatch):
    asked = "train --run planned --task half --sample.prompts 4 --sample.group-size 4 --sample.max-new-tokens 6"
    asked += " --optimize.steps 3 --measure.exact.every 1 --measure.exact.prompts 0 --evaluate.prompts 8"
    assert main([*asked.split(), "--model", str(checkpoint), "--root", str(tmp_path / "runs")]) == 0
    monkeypatch.chdir(tmp_path)
    app = open_page(tmp_path / "runs", "estimators", monkeypatch)
    assert drawn_by_scripts(app, tmp_path) == ["comparison", "over-training", "planner"]


def drawn_by_scripts(app: AppTest, folder: Path) -> list[str]:
    """Run the Python of every figure of a page that was opened in a folder, and return what it drew there."""
    scripts = [block.value for block in app.code if "write_html" in block.value]
    assert len(scripts) == len(app.get("plotly_chart"))
    for script in scripts:
        exec(compile(script, "script", "exec"), {})
    drawn = sorted(folder.glob("*.html"))
    assert all("plotly" in path.read_text(encoding="utf-8").lower() for path in drawn)
    return sorted(path.stem for path in drawn)


def test_pages_with_figures_load_plotly_ahead_from_where_streamlit_keeps_it(store_root, monkeypatch):
    def loaded(page):
        bodies = [html.proto.body for html in open_page(store_root, page, monkeypatch).get("html")]
        return re.findall(r"import\('\./(static/js/PlotlyChart\.[^']+\.js)'\)", "".join(bodies))

    (script,) = loaded("triage")
    assert (Path(st.__file__).parent / "static" / script).is_file() and not loaded("studies")


def test_an_address_that_asks_for_what_is_not_here_opens_the_default(store_root, monkeypatch):
    app = open_page(store_root, "tokens", monkeypatch, run="chain-otb-s0", step="999", prompt="99", color="nosuch")
    default = open_page(store_root, "tokens", monkeypatch, run="chain-otb-s0")
    for key in ("step", "prompt", "color"):
        assert app.selectbox(key=key).value == default.selectbox(key=key).value
    app = open_page(store_root, "run", monkeypatch, run=["nosuchrun", "chain-otb-s0"])
    assert "nosuchrun cannot be opened" in app.run().warning[0].value.replace("\\", "")
    assert "".join(app.query_params["run"]) == "chain-otb-s0"


def test_the_command_that_compares_all_chosen_runs_names_their_folder(store_root, tmp_path, monkeypatch):
    command = f"otb compare {' '.join(BOTH)}"
    app = open_part(store_root, "Comparison", monkeypatch, run=BOTH)
    assert f"{command} --root {store_root}" in [block.value for block in app.code]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(store_root)
    app = open_part(Path("runs"), "Comparison", monkeypatch, run=BOTH)
    assert command in [block.value for block in app.code]


def test_a_figure_is_saved_as_chosen(store_root, monkeypatch):
    app = open_page(store_root, "estimators", monkeypatch, run="chain-otb-s0")
    app.selectbox(key="width-comparison").set_value("one column (3.25 in)").run()
    for kind, pixels in (("svg", 312), ("png", 975)):
        app.button_group(key="format-comparison").set_value(kind).run()
        (chart,) = [json.loads(c.proto.config) for c in app.get("plotly_chart") if "otb-comparison" in c.proto.config]
        options = chart["toImageButtonOptions"]
        assert options["format"] == kind and options["width"] == 384
        assert options["scale"] * options["width"] == pytest.approx(pixels)


def test_a_figure_of_paper_width_has_dark_ink_on_white_on_a_dark_page_too(store_root, monkeypatch):
    app = open_page(store_root, "estimators", monkeypatch, run="chain-otb-s0")
    app.context["theme"] = "dark"
    inks = []
    for width in ("as shown", "one column (3.25 in)"):
        app.selectbox(key="width-comparison").set_value(width).run()
        layout = json.loads(app.get("plotly_chart")[0].proto.spec)["layout"]
        inks.append((layout["font"]["color"], layout.get("paper_bgcolor")))
    assert inks == [("#E6EAEE", None), ("#1B2229", "#FFFFFF")]


def test_proxy_says_first_what_it_costs_and_a_click_opens_the_token(store_root, monkeypatch):
    app = open_part(store_root, "Proxy", monkeypatch, run="chain-otb-s0")
    assert app.metric[0].label == "OTB's gain lost by the proxy"
    app.session_state["_page"] = ("tokens", {})
    assert app.run().title[0].value == "Tokens"


def test_comparison_names_the_noise_scale_and_plans_the_budget(store_root, monkeypatch):
    said = texts(open_page(store_root, "estimators", monkeypatch, run="chain-otb-s0"))
    assert "noise equals signal: rloo " in said and "thick, one look; thin, all 10 together" in said
    assert "Other group sizes cannot be known" in said


def test_run_without_measurements_is_told_how_to_get_them(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "plain", {"estimator": {"name": "rloo"}})
    tokens = {"group": [0], "rollout": [0], "turn": [0], "t": [0], "token": ["a"], "mask": [True], "reward": [1.0]}
    tokens |= {"energy_proxy": [0.4], "measured_by": ["none"]}
    rollouts = {"group": [0], "rollout": [0], "prompt": ["1+1="], "reward": [1.0], "length": [1]}
    writer.write_step(0, StepTables(tokens, rollouts, {"reward_mean": 1.0}))
    writer.finish()
    said = {part: texts(open_part(tmp_path, part, monkeypatch)) for part in ("Comparison", "Proxy")}
    assert "--measure.gradients.every" in said["Comparison"].replace("`", "")
    assert "schedule exact measurements" in said["Proxy"]
    assert not open_page(tmp_path, "tokens", monkeypatch).exception


PARTIAL = {
    "no_tokens_nor_rollouts": StepTables(steps={"reward_mean": 1.0}),
    "no_tokens": StepTables(rollouts={"group": [0], "rollout": [0], "prompt": ["1="], "reward": [0.0]}),
    "no_rollouts": StepTables(tokens={"group": [0], "rollout": [0], "turn": [0], "t": [0], "mask": [True]}),
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kind", PARTIAL)
def test_run_that_stored_only_some_tables_gets_a_sentence(kind, page, tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "plain", {"estimator": {"name": "rloo"}})
    writer.write_step(0, PARTIAL[kind])
    writer.finish()
    app = open_page(tmp_path, page, monkeypatch)
    assert not app.exception
    assert page != "tokens" or "no step whose tokens and rollouts are both stored" in texts(app)


def test_run_counts_degenerate_input(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "plain", {"estimator": {"name": "rloo"}})
    for step in range(2):
        counts = {"n_singleton_groups": 2, "n_empty_completions": 0, "n_truncated": 1, "measurement_gaps": step}
        gone = {"n_zero_variance_groups": 3, "n_prompts": 4, "grad_norm": float(step)}
        writer.write_step(step, StepTables(steps=counts | gone))
    writer.finish()
    app = open_page(tmp_path, "run", monkeypatch)
    assert not app.dataframe  # drawn once it is asked for
    app.session_state["nothing"] = True
    table = app.run().dataframe[0].value
    assert table.iloc[0].tolist() == ["plain", 6, 4, 0, 2, 1, 1]


def test_url_chooses_run_step_and_colour(store_root, monkeypatch):
    query = {"run": "chain-otb-s0", "step": "20", "prompt": "3", "color": "entropy"}
    app = open_page(store_root, "tokens", monkeypatch, **query)
    boxes = [box.value for box in app.selectbox if box.key != "reference" and not str(box.key).startswith("width-")]
    assert boxes == [20, 3, "entropy", "otb (proxy)", "rollout", "auto"]


def test_tokens_are_coloured_by_the_exact_norm_under_its_plain_name(store_root, monkeypatch):
    app = open_page(store_root, "tokens", monkeypatch, run="chain-otb-s0")
    box = app.selectbox(key="color")
    assert (box.value, box.options[box.index]) == ("grad_norm_sq", "Exact ‖∇log π‖²")
    assert "entropy" in box.options and "grad_norm_sq" not in box.options


def test_unknown_run_in_the_url_is_ignored(store_root, monkeypatch):
    app = open_page(store_root, "triage", monkeypatch, run="../../etc")
    assert not app.exception
    assert "etc" not in app.multiselect[0].value


def test_choosing_no_run_asks_for_one(store_root, monkeypatch):
    app = open_page(store_root, "run", monkeypatch)
    app.multiselect[0].set_value([]).run()
    assert not app.exception
    assert "Choose at least one in the sidebar" in texts(app)


def test_run_lists_alarms_with_reasons_and_first_firings(store_root, monkeypatch):
    app = open_page(store_root, "run", monkeypatch, run=["chain-group_mean-s0"])
    assert not app.table  # it waits until it is asked for
    app.session_state["trust"] = True
    (table,) = (table.value for table in app.run().table)
    lines = [line.value for line in app.markdown if line.value.startswith(("△", "▲"))]
    fired = table.iloc[: len(lines)]
    assert all(title in line for title, line in zip(fired["detector"].str.replace("\\", ""), lines, strict=True))
    surge = fired[fired["detector"] == "Gradient\\-norm surge"].iloc[0]
    assert (surge["level"], surge["first alarm"]) == ("△ watch", "–") and 25 < int(surge["first watch"]) <= 40
    assert "times the usual" in surge["why"]
    assert set(table.iloc[len(lines) :]["level"]) <= {"· no alarm", "○ not measured"} and len(table) == len(DETECTORS)
    firsts = fired["first watch"].astype(int)
    assert firsts.is_monotonic_increasing
    assert (surge["false alarms"], surge["study 05"]) == ("1.4 %", "5 of 93 before, 7 at all")
    assert f"It fires in {fired['false alarms'].iloc[0]} of simulated healthy runs." in texts(app)
    assert "the best detector" not in texts(app)
    app.button(key="fired-gradient_surge").click().run()
    assert app.select_slider(key="step").value == int(surge["first watch"])


def test_a_calm_run_says_how_far_silence_goes_and_what_is_configured_is_a_fact(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "calm", {"objective": {"staleness": 8}})
    for step in range(40):
        writer.write_step(step, StepTables(steps={"reward_mean": 0.5, "grad_norm": 1.0, "certificate_prob_z": 9.0}))
    app = open_page(tmp_path, "run", monkeypatch)
    assert "off-policy as configured (staleness 8)" in texts(app) and "nothing fired" in texts(app)
    assert "Of 93 runs of study 05 that collapsed, the best detector called 29 in time, 53 late." in texts(app)


def test_a_click_on_a_holder_of_the_gradient_opens_its_token(store_root, monkeypatch):
    app = open_page(store_root, "run", monkeypatch, run=["chain-otb-s0"], step="20", level="token")
    blamed = next(frame.value for frame in app.dataframe if "signal" in frame.value)
    row = blamed.iloc[0]
    assert row["share"] == pytest.approx(row["signal"] + row["noise"])
    opened = open_page(
        store_root, "tokens", monkeypatch, run=["chain-otb-s0"], step="20", prompt=str(row["prompt"]),
        color="attribution", token=f"{row['rollout']}.{row['t']}",
    )  # fmt: skip
    assert not opened.exception
    assert f"token {row['t']} of rollout {row['rollout']}" in texts(opened)


def test_a_step_without_attribution_says_what_measures_it_and_which_step_has_it(store_root, monkeypatch):
    app = open_page(store_root, "run", monkeypatch, run=["chain-otb-s0"], step="21")
    assert "Step 21 has no attribution; the last step before it that has is 20." in texts(app)
    assert "--measure.attribution.every 1" in texts(app)
    next(button for button in app.button if button.label == "Go to step 20").click().run()
    assert "Who holds the gradient of step 20" in [heading.value for heading in app.subheader]


EXAMPLES = APP.parents[1] / "docs" / "examples"


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="installed without its repository")
@pytest.mark.parametrize(
    ("name", "heading", "by"), [("long", 2, "by exact norms. "), ("smollm2", 19, "6 of 12 prompts. ")]
)
def test_a_run_that_attributed_nothing_says_which_tokens_are_large_and_tokens_opens_there(
    name, heading, by, monkeypatch
):
    app = open_page(EXAMPLES / name / "runs", "run", monkeypatch)
    said = texts(app)
    assert f"Which tokens are large at step {heading}" in [one.value for one in app.subheader]
    assert by in said and "not its share of the summed gradient" in said
    assert "No step of this run says which tokens held its gradient." in said
    largest = next(one.value for one in app.dataframe if "size" in one.value).iloc[0]
    opened = open_page(EXAMPLES / name / "runs", "tokens", monkeypatch)
    assert opened.selectbox(key="step").value == heading and opened.selectbox(key="prompt").value == largest["prompt"]
    assert not app.exception and not opened.exception


def test_where_the_gradient_is_0_no_token_is_large(tmp_path, monkeypatch):
    write_token_run(tmp_path, "words", steps=6, dies=4)
    app = open_page(tmp_path, "run", monkeypatch, step="5")
    assert "Who holds the gradient of step 5" in [one.value for one in app.subheader]
    assert "The gradient of step 5 is 0" in texts(app) and not any("size" in one.value for one in app.dataframe)
    app.button(key="nearest").click().run()  # the last step with exact norms and a gradient
    assert "Which tokens are large at step 2" in [one.value for one in app.subheader]
    assert "Which tokens are large at step 3" in [
        one.value for one in open_page(tmp_path, "run", monkeypatch, step="3").subheader
    ]


def test_a_short_run_says_how_many_steps_a_detector_needs(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "bare", {})
    for step in range(3):
        writer.write_step(step, StepTables(steps={"reward_mean": 0.5, "grad_norm": 1.0}))
    app = open_page(tmp_path, "run", monkeypatch)
    app.session_state["trust"] = True
    assert not app.run().exception
    assert "recorded at 3 steps, 25 are needed" in " ".join(app.table[0].value["why"]).replace("\\", "")


def test_a_selection_is_carried_from_page_to_page(store_root, monkeypatch):
    query = {"step": "20", "prompt": "3", "token": "25.1"}
    app = open_page(store_root, "tokens", monkeypatch, run=["chain-otb-s0"], **query)
    for page in ("run", "rollouts", "tokens"):
        app.switch_page(f"views/{page}.py").run()
        assert page == "rollouts" or app.query_params["step"] == "20"
    assert {name: app.query_params[name] for name in query} == query


def read(app) -> dict:
    """What the reader of a page shows."""
    return json.loads(app.get("bidi_component")[0].proto.json)


def listed(app) -> pd.DataFrame:
    """The rollouts that a page lists."""
    shown = read(app)
    table = pd.DataFrame([row["cells"] for row in shown["rows"]], columns=shown["columns"])
    return table.astype({name: int for name in ("step", "prompt", "rollout")})


def test_rollouts_are_filtered_counted_and_searched(store_root, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run=["chain-otb-s0"], text="12+7=", finish="length")
    table = listed(app)
    assert set(table["finish"]) == {"length"} and set(table["prompt"]) == {0}
    assert f"{len(table)} rollouts." in texts(app)
    app.text_input(key="text").set_value("nowhere").run()
    assert "No rollout is like that" in texts(app)


def test_rewards_that_are_nan_and_answers_that_are_empty_are_said(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "odd", {})
    rollouts = {
        "group": [0, 0, 1, 1], "rollout": [0, 1, 2, 3], "reward": [0.0, 1.0, float("nan"), 1.0], "length": [0, 0, 2, 2],
        "prompt": ["p"] * 4, "completion": ["", "", "ab", "ab"],
    }  # fmt: skip
    tokens = {"group": [1] * 4, "rollout": [2, 2, 3, 3], "t": [0, 1, 0, 1], "turn": [0] * 4, "logprob": [-0.1] * 4}
    tokens |= {"mask": [True] * 4, "token_id": [5] * 4}
    for step in range(30):
        norm = float("nan") if step == 20 else 1.0
        writer.write_step(step, StepTables(tokens, rollouts, {"reward_mean": 0.5, "grad_norm": norm}))
    writer.finish()
    app = open_page(tmp_path, "rollouts", monkeypatch)
    assert not app.exception and len(listed(app)) == 120
    assert "30 rollouts have a reward that is NaN or infinite" in texts(app)
    app = open_page(tmp_path, "tokens", monkeypatch, prompt="0")
    assert not app.exception and not app.warning
    assert "All answers to this prompt at this step are empty" in texts(app)
    app = open_page(tmp_path, "run", monkeypatch)
    assert not app.exception and "NaN or infinite at step 20: grad_norm" in texts(app)
    assert "Who holds the gradient of step 20" in [heading.value for heading in app.subheader]


def run_query(app: AppTest) -> None:
    next(button for button in app.button if button.label == "Run").click().run()


def test_a_query_answers_or_says_what_is_wrong(store_root, monkeypatch):
    app = open_page(store_root, "rollouts", monkeypatch, run=["chain-otb-s0"])
    app.text_area(key="sql").set_value("SELECT count(*) AS n FROM steps").run()
    run_query(app)
    assert app.dataframe[0].value["n"].tolist() == [41]
    app.text_area(key="sql").set_value("DROP TABLE steps").run()
    run_query(app)
    assert not app.exception and len(app.warning) == 1


STUDY_PAGE = """\
# 03 · Squares

**Question.** How *large* are they, <b>really</b>?

**Verdict.** They sum to 14 (13–15) :red[x] $y$.

![squares](results/squares.svg)

How to read it: [elsewhere](../nowhere.md).

## How it was made

```
otb study 03_squares
```

1.5 min in 3 cells, each on a machine. Tables: [cost.csv](results/cost.csv).
"""


@pytest.fixture
def studies_root(tmp_path, monkeypatch):
    """Three studies: one whole, one with a broken table, one that was not run; no runs at all."""
    for name in ("03_squares", "04_broken", "05_later"):
        (tmp_path / "studies" / name / "results").mkdir(parents=True)
        (tmp_path / "studies" / name / "study.py").write_text("raise RuntimeError")
    for name in ("03_squares", "04_broken"):
        folder = tmp_path / "studies" / name
        (folder / "README.md").write_text(STUDY_PAGE.replace("03", name[:2]).replace("squares`", name))
        (folder / "results" / "squares.csv").write_text("n,square,square_low,square_high\n1,1.5,1,2\n2,4.25,3,5\n")
        (folder / "results" / "cost.csv").write_text("cell,minutes\na,1.5\n")
    (tmp_path / "studies" / "04_broken" / "results" / "squares.csv").write_text("a\n1,2\n")
    monkeypatch.setenv("OTB_STUDIES", str(tmp_path / "studies"))
    return tmp_path


def test_studies_are_shown_where_there_are_no_runs(studies_root, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch)
    assert not app.exception and not app.warning
    assert app.title[0].value == "Studies"
    listed = app.table[0].value
    assert listed["state and cost"].tolist() == ["measured, 1.5 min", "measured, 1.5 min", "not run yet"]


def test_study_shows_its_numbers_with_intervals_and_its_text_as_text(studies_root, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch, study="03_squares")
    numbers = app.dataframe[0].value
    assert numbers["square"].tolist() == [1.5, 4.25] and numbers["square, interval"].tolist()[0] == "1.00 to 2.00"
    verdict = next(m.value for m in app.markdown if "Verdict" in m.value)
    assert "\\:red" in verdict and "\\$y\\$" in verdict and "14\u00a0(13\u2060–\u206015)" in verdict
    assert "](" not in " ".join(m.value for m in app.markdown)
    assert "otb study 03_squares" in [code.value for code in app.code]


def test_the_chosen_table_of_a_study_is_in_the_address(studies_root, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch, study="03_squares")
    app.button_group(key="table").set_value("cost").run()
    assert app.dataframe[0].value["minutes"].tolist() == [1.5]
    opened = open_page(studies_root, "studies", monkeypatch, study="03_squares", table="cost")
    assert opened.dataframe[0].value["minutes"].tolist() == [1.5]


def test_broken_results_table_is_one_sentence_and_other_studies_are_still_shown(studies_root, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch, study="04_broken")
    assert not app.exception
    assert "squares.csv cannot be read" in app.warning[0].value.replace("\\", "")
    assert len(app.table[0].value) == 3 and app.query_params["study"] == "04_broken"


@pytest.mark.parametrize("text", ["broken", "<p>text</p>", ""])
def test_broken_figure_is_one_sentence_and_the_numbers_are_still_shown(studies_root, monkeypatch, text):
    figure = studies_root / "studies" / "03_squares" / "results" / "squares.svg"
    figure.write_text(text)
    app = open_page(studies_root, "studies", monkeypatch, study="03_squares")
    assert not app.exception
    said = app.warning[0].value.replace("\\", "")
    assert "squares.svg is no picture" in said and said.endswith("run otb study 03_squares --render.")
    assert app.dataframe[0].value["square"].tolist() == [1.5, 4.25]


def test_study_that_was_not_run_says_how(studies_root, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch, study="05_later")
    assert not app.exception
    assert "was not run yet. `otb study 05_later` runs it" in app.info[0].value


def test_studies_page_without_studies_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("OTB_STUDIES", str(tmp_path / "nowhere"))
    app = open_page(tmp_path, "studies", monkeypatch)
    assert not app.exception
    assert "comes without them: clone the repository" in texts(app) and "--studies" in texts(app)


def test_unknown_study_in_the_url_is_ignored(studies_root, monkeypatch):
    app = open_page(studies_root, "studies", monkeypatch, study="../../etc")
    assert not app.exception and app.query_params["study"] == "03_squares"


@pytest.mark.skipif(not (APP.parents[1] / "studies").is_dir(), reason="installed without its repository")
def test_every_committed_study_opens(store_root, monkeypatch):
    names = sorted(path.parent.name for path in (APP.parents[1] / "studies").glob("*/study.py"))
    monkeypatch.setenv("OTB_STUDIES", str(APP.parents[1] / "studies"))
    app = open_page(store_root, "studies", monkeypatch)
    for name in names:
        app.button_group[0].set_value(name).run()
        assert not app.exception and not app.warning
        assert app.query_params["study"] == name
        kinds = [one.type for one in app.main if one.type in ("image", "dataframe", "table")]
        # The figure stands before the tables, and the verdict before all other text.
        if (APP.parents[1] / "studies" / name / "README.md").is_file():
            assert kinds[0] == "image" and kinds[-1] == "table"
            assert app.markdown[0].value.startswith("**Verdict.** ")


def test_a_running_run_opens_by_itself_and_triage_is_one_step_back(store_root, monkeypatch):
    monkeypatch.setenv("OTB_RUNS", str(store_root))
    app = AppTest.from_file(APP, default_timeout=60).run()
    assert [title.value for title in app.title] == ["Run"] and "running-otb_loo" in texts(app)
    assert [title.value for title in app.switch_page("views/triage.py").run().title] == ["Triage"]
