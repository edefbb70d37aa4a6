"""What pages answer to one question each: filters, SQL, glossary and histogram of Rollouts, advice, red rows."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from otb_analysis.answers import RunAnswers
from otb_analysis.figures.token_columns import TITLES
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore, RunWriter, StepTables
from tests.app.test_pages import listed, open_page, read, run_query, texts
from tests.app.token_runs import HEAD, write_odd_run, write_token_run

RUN = "chain-otb-s0"


def stored(root: Path, run: str = RUN) -> pd.DataFrame:
    """All rollouts of a run, with a column that says whether their group's rewards are equal."""
    table = RunStore(root / run).rollouts_df()
    spread = table.groupby(["step", "group"])["reward"].transform("nunique")
    return table.assign(equal=spread == 1)


@pytest.fixture
def rollouts(store_root, monkeypatch):
    """The page Rollouts of a run of 41 steps."""
    return open_page(store_root, "rollouts", monkeypatch, run=RUN)


FILTERS = {
    "steps": ((10, 12), lambda t: t["step"].between(10, 12)),
    "reward_range": ((1.0, 1.0), lambda t: t["reward"] == 1),
    "where": ("tokens <= 5 and reward == 0", lambda t: t["length"].between(0, 5) & (t["reward"] == 0)),
    "finish": (["length"], lambda t: t["finish_reason"] == "length"),
    "groups": ("equal rewards", lambda t: t["equal"]),
    "text": ("<B>Bold", lambda t: t["prompt"].str.contains("<b>bold")),
}
"""Box → what is asked, and which rollouts are like that."""


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_leaves_the_rollouts_that_are_like_that(name, rollouts, store_root):
    asked, like = FILTERS[name]
    table = stored(store_root)
    kept = table[like(table)]
    assert 0 < len(kept) < len(table)
    assert f"{len(table):,} rollouts." in texts(rollouts)
    boxes = [*rollouts.slider, *rollouts.multiselect, *rollouts.selectbox, *rollouts.text_input]
    next(box for box in boxes if box.key == name).set_value(asked).run()
    assert not rollouts.exception and f"{len(kept):,} rollouts." in texts(rollouts)
    shown = listed(rollouts).set_index(["step", "rollout"])
    assert len(shown) == min(500, len(kept))
    assert shown.index.isin(pd.MultiIndex.from_frame(kept[["step", "rollout"]])).all()


def test_a_line_of_the_list_begins_with_what_tells_its_prompt_from_the_others(tmp_path, monkeypatch):
    write_token_run(tmp_path, "words", steps=1)
    app = open_page(tmp_path, "rollouts", monkeypatch, run="words")
    lines = {row["id"]: row["line"] for row in read(app)["rows"]}
    asked = {line[0][1] for line in lines.values()}
    assert len(asked) > 1 and all(line[0][0] == "asked" and line[0][1].endswith(" → ") for line in lines.values())
    app.text_input(key="where").set_value("group == 0").run()
    assert not any(kind == "asked" for row in read(app)["rows"] for kind, _ in row["line"])


def test_filters_hold_together(tmp_path, monkeypatch):
    write_token_run(tmp_path, "words", steps=3)
    app = open_page(tmp_path, "rollouts", monkeypatch, run="words")
    assert "24 rollouts." in texts(app)
    app.text_input(key="where").set_value("turns == 2").run()
    table = stored(tmp_path, "words")
    assert len(listed(app)) == (table["turns"] == 2).sum() == 6 and set(listed(app)["turns"]) == {"2"}
    app.selectbox(key="groups").set_value("different rewards").run()
    assert len(listed(app)) == 3 and set(listed(app)["prompt"]) == {0}
    app.text_input(key="text").set_value("EGGS").run()
    assert [["match", "eggs"] in row["line"] for row in read(app)["rows"]] == [True]


def test_a_text_is_read_with_its_head_folded_its_turns_its_tool_its_ends_and_what_was_searched_for(
    tmp_path, monkeypatch
):
    write_token_run(tmp_path, "words", steps=2)
    app = open_page(tmp_path, "rollouts", monkeypatch, run="words", rollout="1.5", text="dozen")
    # 1.5 asks for another prompt, so the first of the list is read: it is of the newest step where answers disagree.
    assert read(app)["chosen"] == read(app)["rows"][0]["id"] == "1.0"
    app.text_input(key="text").set_value("").run()
    shown = read(app)["shown"]
    assert read(app)["chosen"] == "1.5" and shown["facts"][:4] == ["step 1", "prompt 1", "rollout 5", "reward 1.00"]
    assert shown["facts"][-1] == "reference answer 1" and "form 0.500" in shown["facts"]
    assert shown["prompt"] == [["", "One?"]] and shown["head"] == [["", HEAD]]
    assert [(turn, tool) for turn, tool, _ in shown["passages"]] == [(0, False), (0, True), (1, False)]
    *end, level, t = shown["passages"][-1][2][-1]
    assert end == ["special", "<|im_end|>"] and t == 9 and level >= 0 and shown["of"][:3] == [1, 1, 5]
    assert {level for _, tool, pieces in shown["passages"] for *_, level, _ in pieces if tool} == {-1}
    low, high = (float(end) for end in shown["sizes"][1:])
    assert low < high and shown["sizes"][0] == TITLES["energy_proxy"]
    app.text_input(key="text").set_value("one?").run()
    assert read(app)["shown"]["prompt"] == [["match", "One?"]]
    app.text_input(key="text").set_value("").run()
    app.session_state["rollout"] = "0.0"  # of a step whose tokens all have exact norms
    shown = read(app.run())["shown"]
    assert shown["of"] == [0, 0, 0, "grad_norm_sq"] and shown["sizes"][0] == TITLES["grad_norm_sq"]


def test_what_a_model_wrote_to_deceive_is_shown_as_signs_and_rendered_without_links_or_pictures(tmp_path, monkeypatch):
    answer = "\u202e# Title\n[a](http://x.y) ![b](http://x.y/z.png) <http://x.y> <b>c</b> &#8238; **bold**\n\n[a]: http://x.y"
    rollouts = {"group": [0], "rollout": [0], "prompt": ["\u2066p\x1b"], "completion": [answer], "reward": [1.0],
                "answer": ["\u202e7"], "length": [1]}  # fmt: skip
    writer = RunWriter.create(tmp_path, "hostile", {})
    writer.write_step(0, StepTables(rollouts=rollouts, steps={"reward_mean": 1.0}))
    writer.finish()
    app = open_page(tmp_path, "rollouts", monkeypatch, rendered="true")
    assert not app.exception and not app.warning
    shown = read(app)
    assert not set("\u202e\u2066\x1b") & set(str(shown)) and shown["shown"]["prompt"] == [["", "⟨2066⟩p⟨001B⟩"]]
    (page,) = [html.proto.body for html in app.get("html") if "bold" in html.proto.body]
    assert "<strong>bold</strong>" in page and not re.search(r"<(a|img|b|script)\b", page) and "⟨202E⟩" in page


def test_where_tokens_do_not_tell_the_text_nothing_is_coloured_or_clicked(tmp_path, monkeypatch):
    write_odd_run(tmp_path)
    shown = read(open_page(tmp_path, "rollouts", monkeypatch))["shown"]
    assert shown["sizes"] == [] and {piece[-1] for *_, pieces in shown["passages"] for piece in pieces} == {None}


def test_the_same_prompt_is_listed_over_all_steps_by_a_button(tmp_path, monkeypatch):
    write_token_run(tmp_path, "words", steps=4)
    app = open_page(tmp_path, "rollouts", monkeypatch, run="words", steps=["3", "3"], text="12", sort="longest first")
    next(button for button in app.button if button.label == "This prompt at all steps").click().run()
    table = stored(tmp_path, "words")
    expected = table[table["prompt_id"] == "sum"]
    assert expected["step"].nunique() == 3
    assert listed(app)[["step", "rollout"]].to_numpy().tolist() == expected[["step", "rollout"]].to_numpy().tolist()
    assert app.query_params["where"] == "prompt_id == 'sum'" and app.query_params["sort"] == "oldest steps first"
    assert not {"text", "steps"} & set(app.query_params)


def test_the_rollout_of_an_address_is_read_wherever_the_order_has_it(rollouts, store_root, monkeypatch):
    table, first = stored(store_root), {row["id"] for row in read(rollouts)["rows"]}
    (name,) = [n for n in table["step"].astype(str) + "." + table["rollout"].astype(str) if n not in first][-1:]
    app = open_page(store_root, "rollouts", monkeypatch, run=RUN, rollout=name)
    assert read(app)["chosen"] == name and read(app)["rows"][0]["id"] == name and len(read(app)["rows"]) == 501
    elsewhere = int(name.partition(".")[0]) - 1
    app.slider(key="steps").set_value((0, elsewhere)).run()
    assert read(app)["chosen"] == read(app)["rows"][0]["id"] != name and len(read(app)["rows"]) == 500


def test_what_is_no_condition_is_answered_in_a_sentence_and_the_page_goes_on(rollouts):
    rollouts.text_input(key="where").set_value("reward = 0").run()
    assert not rollouts.exception and "columns are tokens, step" in texts(rollouts)
    assert rollouts.text_area(key="sql") and not [one for one in rollouts.get("bidi_component") if one.key == "reader"]


def test_a_cell_of_the_histogram_sets_both_ranges_and_the_list(rollouts, store_root):
    rollouts.session_state["steps"], rollouts.session_state["reward_range"] = (7, 7), (1.0, 1.0)  # as a click does
    rollouts.run()
    table = stored(store_root)
    kept = table[(table["step"] == 7) & (table["reward"] == 1)]
    assert sorted(listed(rollouts)["rollout"]) == kept["rollout"].tolist()
    assert rollouts.slider(key="steps").value == (7, 7) and rollouts.slider(key="reward_range").value == (1.0, 1.0)


def test_every_example_in_sql_has_an_answer(rollouts):
    box = next(box for box in rollouts.selectbox if box.label == "Example")
    assert len(box.options) == 5
    for example in box.options:
        next(box for box in rollouts.selectbox if box.label == "Example").select(example).run()
        run_query(rollouts)
        assert not rollouts.exception and not rollouts.warning, example
        assert len(rollouts.dataframe[0].value) > 0, example
        assert re.search(r"[1-9][\d,]* rows", texts(rollouts)), example


def test_the_glossary_explains_every_column_that_a_run_has(rollouts, store_root):
    rollouts.session_state["tables"] = True  # drawn once it is asked for
    picked = rollouts.run().button_group(key="glossary")
    assert set(picked.options) == set(TABLES)
    for name in picked.options:
        rollouts.button_group(key="glossary").set_value(name).run()
        rows = rollouts.dataframe[-1].value
        assert rows["meaning"].str.len().min() > 5 and rows["column"].is_unique
        part = next((store_root / RUN / name).glob("*.parquet"), None)
        assert set(rows["column"]) == {column.name for column in TABLES[name]}
        assert part is None or set(pq.read_schema(part).names) <= set(rows["column"]), name


def test_which_baseline_is_asked_for_by_a_toggle_and_answered_in_the_sentences_of_every_door(store_root, monkeypatch):
    app, lines = open_page(store_root, "run", monkeypatch, run=RUN), RunAnswers(RunStore(store_root / RUN)).lines
    assert lines[0] not in texts(app)
    app.toggle(key="advise").set_value(True).run()
    assert "  \n".join(lines) in texts(app)
    assert "  \n".join(lines) in texts(open_page(store_root, "estimators", monkeypatch, run=RUN)).replace("**", "")


def test_a_run_without_measurements_says_what_makes_them(tmp_path, monkeypatch):
    RunWriter.create(tmp_path, "plain", {}).write_step(0, StepTables(steps={"reward_mean": 0.5, "grad_norm": 1.0}))
    assert "--measure.gradients.every 10" in texts(open_page(tmp_path, "run", monkeypatch, advise="true"))


def test_triage_paints_a_collapsed_run_red_and_a_calm_one_not_at_all(store_root, tmp_path, monkeypatch):
    shutil.copytree(store_root / RUN, tmp_path / RUN)
    writer = RunWriter.create(tmp_path, "dead", {"estimator": {"name": "rloo"}})
    for step in range(30):
        writer.write_step(step, StepTables(steps={"reward_mean": 0.75 * (step < 20), "grad_norm": float(step < 22)}))
    writer.finish()
    app = open_page(tmp_path, "triage", monkeypatch)
    table = app.dataframe[0]
    assert table.value["run"].tolist() == ["dead", RUN]
    css = table.proto.arrow_data.styler.styles
    painted = {color: cells for cells, color in re.findall(r"([^{}]+)\{ background-color: ([^{}]+) \}", css)}
    rows = {color: set(re.findall(r"_row(\d+)_", cells)) for color, cells in painted.items()}
    assert rows == {"rgba(193, 18, 31, 0.16)": {"0"}, "transparent": {"1"}}
    assert "■ collapsed" in table.value["state"].iloc[0] and "dead: reward 0.750 → 0, halfway down at step 20" in texts(
        app
    )


TO_TOKENS = "tokens", {"prompt": "1"}
CLICKED = {
    "triage": ({"smooth": "20"}, "_page", ("run", {}), "Run"),
    "run": ({"log": "true", "level": "prompts", "step": "20"}, "_page", TO_TOKENS, "Tokens"),
    "rollouts": (
        {"text": "12+7", "groups": "different rewards", "steps": ["5", "20"]},
        "_page",
        TO_TOKENS,
        "Tokens",
    ),
    "estimators": ({"part": "Proxy", "kind": "realized energy W"}, "_page", TO_TOKENS, "Tokens"),
}
"""Page → boxes that its address sets, what a click on a row or point leaves in the session, and where it leads."""


@pytest.mark.parametrize("page", CLICKED)
def test_a_click_leads_on_also_where_the_address_sets_boxes(page, store_root, monkeypatch):
    asked, name, value, title = CLICKED[page]
    app = open_page(store_root, page, monkeypatch, run=RUN, **asked)
    assert not app.exception
    app.session_state[name] = value
    app.run()
    assert not app.exception and app.title[0].value == title
    assert app.query_params["run"] in (RUN, [RUN]) and not set(app.query_params) & {"smooth", "kind", "text", "steps"}


@pytest.mark.parametrize("answers", [["", ""], [None, "x"], None])
def test_an_answer_without_text_is_read_and_rendered_as_empty(answers, tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "run", {})
    rows = {"group": [0, 0], "rollout": [0, 1], "reward": [0.0, 1.0], "length": [0, 1]}
    writer.write_step(0, StepTables(rollouts=rows | ({"completion": answers} if answers else {}), steps={"x": 1.0}))
    writer.finish()
    app = open_page(tmp_path, "rollouts", monkeypatch, rendered="true")
    assert not app.exception and len(listed(app)) == 2
    assert any("<i>empty</i>" in html.proto.body for html in app.get("html"))
    assert not [button for button in app.button if button.label.startswith("This prompt")]  # it is not known
