"""The page Tokens: prompts, colours, estimators, two places side by side, long and odd tokens."""

import json
import re
import shutil

import numpy as np
import pytest

from otb_analysis.store import RunStore, RunWriter, StepTables, step_attribution
from tests.app.test_pages import PAGES, open_page, raws, texts
from tests.app.token_runs import HEAD, PROMPTS, write_odd_run, write_token_run


@pytest.fixture(scope="module")
def token_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("token_runs")
    for seed, name in enumerate(("first", "second")):
        write_token_run(root, name, seed=seed)
    write_token_run(root, "long", steps=1, length=2000)
    write_odd_run(root)
    return root


def opened(root, monkeypatch, **query):
    app = open_page(root, "tokens", monkeypatch, **query)
    assert not app.exception
    return app


def box(app, label):
    return next(b for b in app.selectbox if b.label == label)


def payload(app):
    """What the component is given, pane by pane."""
    return json.loads(app.get("bidi_component")[0].proto.json)


def table_of(app, first):
    """The numbers of a table of formulas whose first line has this name."""
    found = next(t.value for t in app.table if t.value.iloc[0, 0].replace("\\", "") == first)
    return {row[0].replace("\\", ""): row[1].replace("\\", "") for row in found.to_numpy().tolist()}


def test_reference_answer_rewards_and_parts_stand_on_top(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="first", step="0", prompt="0")
    assert "**Reference answer** 19 · **Rewards** 2 × 1.00, 2 × 0 (means of parts: correct 0.500, form 0.375)" in texts(
        app
    )
    rows = payload(app)["panes"][0]["rows"]
    assert [row["warning"] for row in rows] == ["rewarded, but ends with 48, not 19", "", "", ""]
    assert rows[1]["parts"] == "correct 1.00, form 0.500"


def test_labels_of_prompts_say_what_differs_and_change_with_the_step(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="first", step="0")
    first, second = box(app, "Prompt").options
    assert first == "0 · reward 0.500 · …umber last. What is 12 + 7?"
    assert second == "1 · reward 1.00 · …umber last. How many eggs are in three dozen?"
    box(app, "Step").select(1).run()
    shown = box(app, "Prompt")
    assert shown.options[shown.index].endswith("How many eggs are in three dozen?") and "One?" in shown.options[1]
    assert [PROMPTS["eggs"].removeprefix(HEAD), HEAD] == raws(app)[:2]  # the head is folded


def test_a_group_with_equal_rewards_says_that_it_has_no_gradient(token_root, monkeypatch):
    equal = opened(token_root, monkeypatch, run="first", step="0", prompt="1")
    assert [info.value.replace("\\", "") for info in equal.info] == ["All 4 rewards are 1.00: no gradient here."]
    assert not opened(token_root, monkeypatch, run="first", step="0", prompt="0").info


def test_turns_tools_and_special_tokens_reach_the_browser(token_root, monkeypatch):
    data = payload(opened(token_root, monkeypatch, run="first", step="0", prompt="0"))
    second = data["panes"][0]["rows"][1]
    assert set(second["turns"]) == {0, 1} and second["kinds"].count("tool") == 2
    assert (second["texts"][-1], second["kinds"][-1]) == ("<|im_end|>", "special")
    assert [kind for kind, _ in data["marks"]] == ["tool", "special"]


COLORS = {
    "policy_minus_sampler": "policy − sampler (log π)", "advantage_difference": "advantage − another's",
    "exact_over_proxy": "exact ÷ calibrated proxy",
}  # fmt: skip
"""Differences, and how the box and the address call them."""


@pytest.mark.parametrize("color", COLORS)
def test_differences_are_coloured_on_a_diverging_scale(color, token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="first", step="0", prompt="0", color=COLORS[color])
    data = payload(app)
    assert data["column"] == color and len(data["colors"]) == 7
    low, high = (float(data[end].strip("≤≥ ").replace("−", "-")) for end in ("low", "high"))
    assert low * high == pytest.approx(1, rel=0.02) if color == "exact_over_proxy" else low == -high


def test_the_difference_of_two_estimators_is_that_of_their_advantages(token_root, monkeypatch):
    query = {"color": COLORS["advantage_difference"], "estimator": "token_optimal (proxy)", "against": "grpo"}
    data = payload(opened(token_root, monkeypatch, run="first", step="0", prompt="0", **query))
    run = RunStore(token_root / "first")
    from otb_analysis.estimators import estimate

    arrays = run.token_arrays(0, 0)
    inputs = arrays.estimator_inputs("proxy")
    ours = estimate("token_optimal", inputs).advantage - estimate("grpo", inputs).advantage
    for row, expected, mask in zip(data["panes"][0]["rows"], ours, arrays.mask, strict=True):
        shown = np.array(row["values"]["advantage_difference"], float)
        np.testing.assert_allclose(shown[mask[: len(shown)]], expected[mask], rtol=2e-3, atol=1e-9)
    assert "Advantage under token_optimal (proxy) minus that under grpo." in texts(
        opened(token_root, monkeypatch, run="first", step="0", prompt="0", **query)
    )


def test_a_chosen_token_opens_the_formula_of_the_chosen_estimator(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="first", step="0", prompt="0", token="2.1", estimator="rloo")
    assert "token 1 of rollout 2" in texts(app)
    lines = table_of(app, "formula")
    assert lines["formula"] == "B = mean_{j≠i} R_j"
    assert lines["with numbers"] == "B = 0.333·1.00 + 0.333·1.00 + 0.333·0 = 0.667"
    assert lines["advantage"] == "A = G − B = 0 − 0.667 = −0.667"
    terms = app.dataframe[0].value
    assert terms["rollout"].tolist() == ["0", "1", "this", "3"]
    box(app, "Estimator").select("otb_turn (exact)").run()
    assert not app.exception and table_of(app, "formula")["formula"].startswith("B = otb")
    assert {"w", "W"} <= set(app.dataframe[0].value)


def test_estimators_with_exact_norms_are_offered_where_all_tokens_have_one(token_root, monkeypatch):
    exact = box(opened(token_root, monkeypatch, run="first", step="0"), "Estimator").options
    proxy = box(opened(token_root, monkeypatch, run="first", step="1"), "Estimator").options
    assert exact[0] == proxy[0] == "group_mean"
    assert "otb_turn (exact)" in exact and "otb_turn (exact)" not in proxy
    assert {"rloo", "energy_across_loo (proxy)"} <= set(proxy)


def test_an_estimator_that_cannot_be_computed_here_is_a_sentence(store_root, monkeypatch):
    # rollouts with a tool in their middle, and an estimator that takes positions from columns
    app = opened(store_root, monkeypatch, run="chain-otb-s0", step="20", prompt="1", token="8.1")
    assert box(app, "Estimator").value == "otb (proxy)"
    assert "mask has gaps" in texts(app) and "use otb_turn" in texts(app)


def test_two_runs_stand_side_by_side_on_one_prompt_with_one_scale(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run=["first", "second"], focus="first", step="0", prompt="1", two="true")
    assert box(app, "Beside").value == "step 0 of second, prompt 1"  # the same step before others
    data = payload(app)
    assert [pane["title"] for pane in data["panes"]] == ["step 0 of first", "step 0 of second"]
    assert data["panes"][0]["rows"][0]["texts"] != data["panes"][1]["rows"][0]["texts"]
    assert len(app.get("plotly_chart")) == 2


def test_two_steps_stand_side_by_side_on_one_prompt(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="first", step="0", prompt="1", two="true", token="b1.0")
    assert box(app, "Beside").options == ["step 1 of first, prompt 0"]  # there the prompt is number 0
    assert [row["rollout"] for row in payload(app)["panes"][1]["rows"]] == [0, 1, 2, 3]
    assert "token 0 of rollout 1" in texts(app) and payload(app)["chosen"] == [1, 1, 0]


def test_another_run_stays_beside_at_the_same_step_or_the_nearest_and_says_so(tmp_path, monkeypatch):
    write_token_run(tmp_path, "first", steps=9)
    write_token_run(tmp_path, "short", steps=3, seed=1)
    RunWriter.create(tmp_path, "none", {}).write_step(0, StepTables(steps={"reward_mean": 1.0}))
    runs = {"run": ["first", "short", "none"], "focus": "first", "two": "true"}
    app = opened(tmp_path, monkeypatch, step="1", prompt="0", **runs)
    assert box(app, "Beside").value == "step 1 of short, prompt 0" and "No step of none has this prompt." in texts(app)
    box(app, "Step").set_value(2).run()
    assert box(app, "Beside").value == "step 2 of short, prompt 0" and "is shown." not in texts(app)
    box(app, "Step").set_value(5).run()  # its first prompt is that of step 2
    assert box(app, "Beside").value == "step 2 of short, prompt 0"
    assert "short has no tokens of this prompt at step 5; step 2 is shown." in texts(app)
    box(app, "Beside").set_value("step 2 of first, prompt 0").run()  # by hand: it stays
    box(app, "Step").set_value(8).run()
    assert box(app, "Beside").value == "step 2 of first, prompt 0"


def test_a_prompt_that_stands_nowhere_else_says_so(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="long", two="true")
    assert "No other step of the chosen runs has this prompt." in texts(app)
    assert len(payload(app)["panes"]) == 1


def test_rollouts_of_2000_tokens_are_shown_whole(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="long", token="1.1990", prompt="0")
    data = payload(app)
    assert data["wide"] and [len(row["texts"]) for row in data["panes"][0]["rows"]] == [2000, 1999, 1998, 2000]
    assert "Each cell holds 5 tokens" in texts(app)
    assert "token 1990 of rollout 1" in texts(app)
    assert table_of(app, "formula")["with numbers"].count("·") <= 8


def test_room_is_kept_for_the_tokens_so_that_what_stands_below_does_not_move(token_root, monkeypatch):
    kept = []
    for run in ("long", "first"):
        bodies = " ".join(one.proto.body for one in opened(token_root, monkeypatch, run=run).get("html"))
        kept += map(int, re.findall(r"st-key-token_view { min-height: (\d+)px", bodies))
    assert len(kept) == 2 and kept[1] < kept[0] <= 700  # no more than a window shows


def test_of_too_many_tokens_for_a_browser_some_rollouts_are_maps_alone_and_the_chosen_one_has_its_text(
    token_root, monkeypatch
):
    monkeypatch.setattr("token_view.MOST", 5000)
    app = opened(token_root, monkeypatch, run="long", prompt="0", token="3.0")
    *first, third, last = payload(app)["panes"][0]["rows"]
    assert ["texts" in row for row in (*first, third, last)] == [True, True, False, True]
    assert third["width"] == 5 and len(third["ts"]) == len(third["levels"]) == 400
    assert all(5 * cell <= t < 5 * cell + 5 for cell, t in enumerate(third["ts"]))
    assert "too many for one page: 1." in texts(app)


@pytest.mark.parametrize("color", ["entropy", "exact_over_proxy"])
def test_the_grid_comes_with_the_python_that_draws_it(color, token_root, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    app = opened(token_root, monkeypatch, run="first", step="0", color=COLORS.get(color, color))
    exec(next(code.value for code in app.code if "plot_tokens" in code.value), {})
    assert "rollout 3" in (tmp_path / "tokens.html").read_text()
    other = opened(token_root, monkeypatch, run="first", step="0", color="advantage", estimator="grpo")
    assert not any("plot_tokens" in code.value for code in other.code)  # these are not stored


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_a_run_of_odd_texts(page, token_root, monkeypatch):
    assert not open_page(token_root, page, monkeypatch, run="odd").exception


def test_odd_tokens_are_text_and_short(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="odd", token="0.1")
    texts_shown = payload(app)["panes"][0]["rows"][0]["texts"]
    assert texts_shown[0] == "<script>alert(1)</script>" and texts_shown[2] == "⟨202E⟩right·to·left"
    assert texts_shown[3] == "⟨0000⟩⟨001B⟩[31m" and max(map(len, texts_shown)) < 300
    shown = raws(app)
    assert max(map(len, shown)) < 21_000 and shown[0].startswith("<img src=x onerror=alert(2)>yyy")
    assert "**Reference answer** \\<b\\>7\\<\\/b\\>" in " ".join(m.value for m in app.markdown)


def test_an_unknown_token_or_place_in_the_url_is_ignored(token_root, monkeypatch):
    query = {
        "step": "77",
        "prompt": "x",
        "token": "9.99",
        "estimator": "os:system",
        "color": "token",
        "beside": "a:b:c",
    }
    app = opened(token_root, monkeypatch, run="first", two="true", **query)
    assert "Rollout 9 has no token 99 here" in texts(app)
    assert box(app, "Estimator").value == "group_mean"


def test_somebody_elses_estimator_is_not_run(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "own", {"estimator": {"name": "os:getpid"}})
    tokens = {
        "group": [0, 0], "rollout": [0, 1], "turn": [0, 0], "t": [0, 0], "token": ["a", "b"], "mask": [True, True],
        "reward": [1.0, 0.0], "logprob": [-1.0, -1.0], "advantage": [0.5, -0.5], "baseline": [0.5, 0.5],
    }  # fmt: skip
    rollouts = {"group": [0, 0], "rollout": [0, 1], "prompt": ["p", "p"], "reward": [1.0, 0.0]}
    writer.write_step(0, StepTables(tokens, rollouts, {"reward_mean": 0.5}))
    app = opened(tmp_path, monkeypatch, token="0.0")
    assert box(app, "Estimator").value == "os:getpid"
    assert "os:getpid is no estimator of otb-analysis, so its formula cannot be shown." in texts(app)


@pytest.mark.parametrize("reward", [[1.0], [None]])
def test_tokens_without_log_probabilities_or_even_rewards_are_shown_or_explained(reward, tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "bare", {})
    tokens = {"group": [0], "rollout": [0], "turn": [0], "t": [0], "token": ["a"], "mask": [True]}
    tokens |= {"reward": np.ma.array([reward[0] or 0.0], mask=[reward[0] is None])}
    rollouts = {"group": [0], "rollout": [0], "prompt": ["p"], "reward": [1.0]}
    writer.write_step(0, StepTables(tokens, rollouts, {"reward_mean": 1.0}))
    app = opened(tmp_path, monkeypatch, token="0.0")
    if reward[0] is None:
        assert "No number was stored for any token of this prompt" in texts(app)
    else:
        assert payload(app)["column"] == "reward"


def test_a_colour_is_kept_where_a_step_did_not_measure_it(token_root, monkeypatch):
    app = opened(token_root, monkeypatch, run="first", step="0")
    box(app, "Step").select(1).run()
    assert box(app, "Colour by").value == "grad_norm_sq"
    assert "Not measured for this prompt at this step" in texts(app)
    assert set(payload(app)["panes"][0]["rows"][0]["levels"]) == {-1}
    box(app, "Step").select(2).run()
    assert payload(app)["column"] == "grad_norm_sq" and "Not measured for this prompt" not in texts(app)


@pytest.mark.parametrize("name", ["running", "broken"])
def test_half_written_and_broken_parts(name, token_root, tmp_path, monkeypatch):
    path = tmp_path / "run"
    shutil.copytree(token_root / "first", path)
    if name == "running":  # a step that is not in the catalogue yet
        (path / "tokens").mkdir()
        (path / "tokens" / "part-00000003-r0.parquet").write_bytes(b"PAR1 half")
        assert box(opened(tmp_path, monkeypatch), "Step").options == ["0", "1", "2"]
    else:
        (path / "tokens.parquet").write_bytes((path / "tokens.parquet").read_bytes()[:200])
        assert "tokens.parquet" in texts(opened(tmp_path, monkeypatch, step="2"))


def test_the_page_opens_at_the_prompt_with_the_largest_share_of_the_gradient(store_root, monkeypatch):
    for step in (10, 30):
        shares = step_attribution(RunStore(store_root / "chain-otb-s0"), step)
        assert shares is not None and shares.prompts.group[0] != 0
        app = open_page(store_root, "tokens", monkeypatch, run="chain-otb-s0", step=str(step))
        assert app.query_params["prompt"] in (str(shares.prompts.group[0]), [str(shares.prompts.group[0])])
    app = open_page(store_root, "tokens", monkeypatch, run="chain-otb-s0", step="30", prompt="2")
    assert app.query_params["prompt"] in ("2", ["2"])  # asked for
