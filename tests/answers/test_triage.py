from dataclasses import asdict, replace

import numpy as np
import pandas as pd
import pytest

from otb_analysis.answers.triage import duration_words, headline, thinned, triage, triage_table, verdict, worst_first
from otb_analysis.diagnostics import diagnose
from otb_analysis.store import step_series


def steps(reward, norm=None):
    n = len(reward)
    return pd.DataFrame(
        {"step": np.arange(n), "reward_mean": reward, "grad_norm": np.ones(n) if norm is None else norm}
    )


def row(name, table, status="complete", age=None):
    return replace(triage(name, "rloo", status, (table, diagnose(step_series(table)), "")), age=age)


DEAD = row("dead", steps([0.75] * 20 + [0.0] * 10, [1.0] * 22 + [0.0] * 8))
CALM = row("calm", steps(np.linspace(0.3, 0.6, 30)))
SHORT = row("short", steps([0.5] * 3), "running", 4.0)


def test_headline_of_a_hand_worked_run():
    # 49 steps: a tenth is four of them. Gradient norm and clipping: the last 20.
    reward = [0.25] * 4 + [0.5] * 41 + [0.75] * 4
    steps = pd.DataFrame({"step": range(49), "reward_mean": reward, "grad_norm": [9.0] * 29 + [3.0] * 20})
    steps = steps.assign(clipped=[True] * 29 + [False] * 10 + [True] * 10, heldout_reward=[0.2] + [None] * 47 + [0.6])
    gain = pytest.approx(0.4)
    assert asdict(headline(steps)) == {"reward_first": 0.25, "reward": 0.75, "reward_gain": 0.5, "heldout": 0.6,
                               "heldout_gain": gain, "grad_norm": 3.0, "clipped": 0.5}  # fmt: skip


def test_headline_of_a_run_that_just_started_has_no_change():
    found = asdict(headline(pd.DataFrame({"step": [0], "reward_mean": [0.5]})))
    assert found == {"reward_first": 0.5, "reward": 0.5} | dict.fromkeys(
        ["reward_gain", "heldout", "heldout_gain", "grad_norm", "clipped"]
    )
    assert set(asdict(headline(pd.DataFrame())).values()) == {None}


def test_a_dead_run_is_one_sentence_in_the_order_of_events():
    # The median of three is 0 from the second step without reward on, step 21; no gradient from step 22 on.
    assert DEAD.state == "collapsed"
    assert DEAD.sentence == (
        "reward 0.750 → 0, halfway down at step 20; no gradient since step 22; "
        "a detector first spoke at step 21 (falling reward)"
    )
    assert (DEAD.reward_fell, DEAD.first_warning, DEAD.reward_first, DEAD.reward_last) == (20, 21, 0.75, 0.0)


def test_what_a_detector_says_without_a_fall_is_not_read_as_one():
    solved = row("solved", steps(np.linspace(0.3, 1.0, 30), [1.0] * 22 + [0.0] * 8))
    assert solved.state == "collapsed" and solved.reward_fell is None
    assert "no fall of the reward" in solved.sentence and solved.sentence.startswith("no gradient since step 22")


def test_a_run_whose_reward_came_back_has_not_collapsed():
    back = row("back", steps([0.75] * 20 + [0.0] * 5 + [0.75] * 20))
    assert back.state == "alarm" and back.sentence.startswith("reward 0.750 → 0, halfway down at step 20")


def test_calm_and_short_runs_say_so():
    assert (CALM.state, CALM.sentence) == ("calm", "nothing fired")
    assert (SHORT.state, SHORT.sentence) == ("too short", "too few steps to judge")


def test_a_run_that_failed_says_with_what_and_comes_before_alarms():
    table = steps(np.linspace(0.3, 0.6, 30))
    failed = triage("failed", "rloo", "failed", (table, diagnose(step_series(table)), ""), reason="the loss is NaN.")
    assert (failed.state, failed.sentence) == ("failed", "the loss is NaN")
    back = row("back", steps([0.75] * 20 + [0.0] * 5 + [0.75] * 20))
    assert [r.run for r in worst_first([CALM, back, failed, DEAD])] == ["dead", "failed", "back", "calm"]
    assert verdict([CALM, failed]) == "failed: the loss is NaN (1 failed of 2 runs)."
    unnamed = triage("failed", "rloo", "failed", (table, [], ""))
    assert unnamed.sentence == "it ended with an error that it did not name"
    table = steps([0.5] * 20, [1.0] * 19 + [np.inf])
    died = triage("died", "rloo", "failed", (table, diagnose(step_series(table)), ""))
    assert died.state == "collapsed" and died.sentence.startswith("NaN or infinite at step 19: grad_norm; a detector")


def test_the_worst_run_is_first_and_running_ones_before_others():
    running = row("running", steps(np.linspace(0.3, 0.6, 30)), "running", 4.0)
    broken = triage("broken", "", "broken", (pd.DataFrame(), [], ""), reason="its run.json is cut short.")
    rows = [CALM, broken, SHORT, running, DEAD]
    assert [r.run for r in worst_first(rows)] == ["dead", "running", "calm", "short", "broken"]
    assert triage_table(rows)["what happened"].iloc[-1] == "its run.json is cut short."
    assert verdict(rows) == f"dead: {DEAD.sentence} (1 collapsed of 5 runs). 1 of 5 runs cannot be read."
    assert verdict([CALM, SHORT]) == "No alarm. 1 of 2 runs is too short to judge."
    short = "No run has enough steps to judge; the first alarms need 5, others up to 40."
    assert verdict([SHORT]) == short
    assert verdict([CALM, broken, broken]) == "No alarm. 2 of 3 runs cannot be read."
    assert verdict([SHORT, broken]) == f"{short} 1 of 2 runs cannot be read."
    assert verdict([broken]) == verdict([broken, broken]) == "No run can be read."


def test_a_long_run_that_recorded_nothing_a_detector_over_time_needs_is_not_called_too_short():
    table = pd.DataFrame({"step": np.arange(200), "loss": np.ones(200)})
    silent = row("silent", table)
    assert (silent.state, silent.sentence) == ("not judged", "no detector could judge this run")
    assert triage("new", "", "running", (pd.DataFrame(), [], "")).state == "too short"
    assert [r.run for r in worst_first([silent, SHORT, CALM])] == ["calm", "short", "silent"]
    assert verdict([CALM, silent]) == "No alarm. No detector could judge 1 of 2 runs."
    assert verdict([silent]) == "No detector could judge a run."


def test_a_sparkline_keeps_the_mean_and_both_ends():
    values = np.arange(400.0)
    assert len(thinned(values, 40)) == 40 and thinned(values, 40).mean() == pytest.approx(values.mean())
    np.testing.assert_array_equal(thinned(np.array([1.0, 2.0]), 40), [1.0, 2.0])
    assert thinned(np.array([]), 40).size == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, "–"), (4.0, "4 s"), (70.0, "1 min"), (5400.0, "2 h"), (200_000.0, "2 days")]
)
def test_ages_are_short(seconds, words):
    assert duration_words(seconds) == words
