"""Following a running run: what is written meanwhile is seen."""

import gc
import sys

import numpy as np
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from otb_analysis.statistics import gradient_statistics
from otb_analysis.store import RunStore, RunWriter, StepTables, gram_rows
from tests.app.conftest import GROUP_SIZE, PROMPTS, synthetic_gram
from tests.app.test_pages import open_page, texts


def write(writer: RunWriter, step: int) -> None:
    """Write a step; every tenth is measured."""
    random, n = np.random.default_rng(step), PROMPTS * GROUP_SIZE
    group, rewards = np.arange(n) // GROUP_SIZE, random.integers(0, 2, n).astype(float)
    due = step % 10 == 0
    exact = {"grad_norm_sq": random.lognormal(size=n)} if due else {}
    tokens = {
        "group": group, "rollout": np.arange(n), "turn": [0] * n, "t": [0] * n, "token": ["a"] * n, "mask": [True] * n,
        "reward": rewards, "logprob": -random.exponential(size=n), "energy_proxy": random.random(n),
        "measured_by": ["exact" if due else "none"] * n,
    }  # fmt: skip
    rollouts = {
        "group": group, "rollout": np.arange(n), "prompt_id": [f"p{g}" for g in group], "prompt": ["1+1="] * n,
        "completion": ["2"] * n, "reward": rewards, "length": [1] * n, "finish_reason": ["stop"] * n,
    }  # fmt: skip
    steps = {"reward_mean": rewards.mean(), "grad_norm": random.lognormal(), "n_measured_prompts": PROMPTS * due}
    gradients = grams = None
    if due:
        gram = synthetic_gram(random, PROMPTS)
        rows = [found.as_row() for found in gradient_statistics(gram.inner, gram.labels, gram.n_rollouts)]
        gradients, grams = {name: [row[name] for row in rows] for name in rows[0]}, gram_rows(step, gram)
    writer.write_step(step, StepTables(tokens | exact, rollouts, steps, gradients, grams))


def still(app: AppTest) -> bool:
    """Whether nothing fades while a page is drawn again."""
    return any("[data-stale=true] { opacity: 1" in one.proto.body for one in app.get("html"))


def test_a_step_that_is_written_while_a_page_is_drawn_is_not_missed(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "run", {"estimator": {"name": "rloo"}})
    write(writer, 0)
    app, new = open_page(tmp_path, "run", monkeypatch), iter([2])
    data = sys.modules["data"]

    def listed(folder, original=data.runs_df):
        table = original(folder)
        for step in new:  # once: the run grows after it was looked at
            write(writer, step)
        return table

    monkeypatch.setattr(data, "runs_df", listed)
    assert not still(app)
    write(writer, 1)
    assert "· 3 steps" in texts(app.run())  # it sees at its end that the run has grown, and is drawn again
    assert still(app)  # without fading what stands there
    assert not still(app.run())  # what a click changes does


@pytest.mark.parametrize(("page", "times"), [("run", 1), ("triage", 2)])
def test_a_page_of_one_run_is_not_drawn_again_when_another_run_grows(page, times, tmp_path, monkeypatch):
    one, other = (RunWriter.create(tmp_path, name, {"estimator": {"name": "rloo"}}) for name in ("one", "other"))
    write(one, 0)
    write(other, 0)
    app, new, drawn = open_page(tmp_path, page, monkeypatch, focus="one", run=["one", "other"]), iter([2]), []
    data = sys.modules["data"]

    def listed(folder, original=data.runs_df):
        table = original(folder)
        for step in new:  # once, while the page is drawn
            write(other, step)
        return table

    def configured(original=st.set_page_config, **options):
        drawn.append(page)
        original(**options)

    monkeypatch.setattr(data, "runs_df", listed)
    monkeypatch.setattr(st, "set_page_config", configured)
    write(other, 1)
    assert not app.run().exception and len(drawn) == times


def test_what_came_since_the_last_visit_stays_new_and_the_step_that_nobody_chose_moves_on(tmp_path, monkeypatch):
    writer = RunWriter.create(tmp_path, "run", {"estimator": {"name": "rloo"}})
    for step in range(3):
        write(writer, step)
    app = open_page(tmp_path, "run", monkeypatch)
    assert "Of step 2." in texts(app) and app.select_slider(key="step").value == 2
    app.switch_page("views/rollouts.py").run()
    for step in (3, 4):
        write(writer, step)
    app.switch_page("views/run.py").run()
    for last in (4, 5):
        assert f"Of steps 3 to {last}, new since you last looked." in texts(app)
        assert app.select_slider(key="step").value == last and "step" not in app.query_params
        write(writer, last + 1)
        app.run()
    app.select_slider(key="step").set_value(1).run()
    write(writer, 7)
    assert app.run().select_slider(key="step").value == 1


def test_a_reload_in_the_same_browser_tells_what_is_new(tmp_path, monkeypatch):
    def came_by(token: bytes, mask: bytes) -> str:
        """What the page says once two steps more were written, to a browser whose cookie is masked like this."""
        for _ in range(2):
            write(writer, len(RunStore(writer.path).complete_steps()))
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(token)).hex()
        cookies["_streamlit_xsrf"] = f"2|{mask.hex()}|{masked}|1796041540"
        return texts(open_page(tmp_path, "run", monkeypatch))

    writer, cookies = RunWriter.create(tmp_path, "run", {"estimator": {"name": "rloo"}}), {}
    monkeypatch.setattr(type(st.context), "cookies", cookies)
    one, two = bytes(range(16)), bytes(range(1, 17))
    assert "Of step 1." in came_by(one, b"abcd")
    assert "Of steps 2 to 3, new since you last looked." in came_by(one, b"wxyz")
    assert "Of step 5." in came_by(two, b"abcd")
    assert "Of steps 4 to 7, new since you last looked." in came_by(one, b"0123")
    cookies["_streamlit_xsrf"] = "none"
    assert "Of step 7." in texts(open_page(tmp_path, "run", monkeypatch))


def test_what_is_loaded_for_good_is_left_out_of_the_collection_after_every_run(store_root, monkeypatch):
    app, seen = open_page(store_root, "run", monkeypatch), []
    monkeypatch.setattr(gc, "freeze", lambda: seen.append(gc.get_freeze_count()))
    assert gc.get_freeze_count() > 50_000  # half of what Streamlit, pandas and Plotly are made of
    for _ in range(3):
        assert not app.run().exception
    assert len(seen) <= 1  # what the first run of the page loaded
