"""05_collapse: its arms, the step it calls a collapse, and what it makes of tables made by hand."""

import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from otb_analysis.study.record import load_study
from otb_analysis.study.report import study_page

FOLDER = Path(__file__).parent.parent.parent / "studies" / "05_collapse"


@pytest.fixture(scope="module")
def parts():
    """The study and its files."""
    study = load_study(FOLDER)
    names = ("study", "runs", "forecast", "derived")
    return {"STUDY": study} | {name: importlib.import_module(f"study_{FOLDER.name}.{name}") for name in names}


def run(arm, seed, collapse, rate=0.004):
    return {
        "arm": arm, "seed": seed, "rate": rate, "steps": 100, "collapse": collapse,
        "best": 0.8, "last": 0.1, "clip_fraction": 1.0,
    }  # fmt: skip


RUNS = [
    run("rloo", 0, 40), run("rloo", 1, 60), run("scaled", 0, 44, 0.002), run("scaled", 1, 64, 0.002),
    run("otb", 0, 90), run("otb", 1, None), run("calm", 0, None, 3e-4), run("calm", 1, None, 3e-4),
]  # fmt: skip


def test_calm_arm_has_no_old_rollouts_and_a_constant_low_rate(parts):
    study = parts["study"]
    calm = study.config_of(0, study.FULL, False, study.ARMS["calm"])
    staged = study.config_of(0, study.FULL, False, study.ARMS["rloo"])
    assert (calm.objective.staleness, calm.optimize.warmup_steps, calm.optimize.learning_rate) == (0, 0, 3e-4)
    assert (staged.objective.staleness, staged.optimize.warmup_steps, staged.optimize.learning_rate) == (4, 100, 4e-3)
    assert (calm.seed, calm.sample, calm.chain_sum, calm.warm_start) == (
        staged.seed, staged.sample, staged.chain_sum, staged.warm_start,
    )  # fmt: skip
    long = study.config_of(0, study.FULL, False, study.ARMS["otb_long"])
    assert long.chain_sum.terms_min == 4
    assert long.optimize == staged.optimize


def test_long_arms_have_fewer_seeds(parts):
    names = [cell.name for cell in parts["STUDY"].cells]
    # the projection, six arms of ten seeds, two long arms of six
    assert len(names) == 1 + 6 * 10 + 2 * 6
    assert "otb_long-s5" in names and "otb_long-s6" not in names and "calm-s9" in names


def test_collapse_is_the_first_step_of_a_lasting_loss_of_half(parts):
    # the trailing mean of 6 is 1 up to step 19, then 5/6, 4/6, 3/6 at step 22: half of the best
    reward = np.r_[np.ones(20), np.zeros(20)]
    assert parts["runs"].collapse_step(reward) == 22
    # back after 8 steps: low from 22 to 29, when the mean is 2/6, and 3/6 again at 30, 4/6 at 31: lasting enough
    assert parts["runs"].collapse_step(np.r_[np.ones(20), np.zeros(8), np.ones(12)]) == 22
    # back after 4 steps: never below 2/6, low at 22 to 26 only, five steps
    assert parts["runs"].collapse_step(np.r_[np.ones(20), np.zeros(4), np.ones(16)]) is None


def test_signals_are_means_at_the_start_up_to_the_collapse_and_at_the_end(parts):
    steps = pd.DataFrame({name: np.arange(40.0) for name in ("entropy_mean", "grad_norm", "length_mean")})
    found = parts["runs"].signal_means(steps, 20)
    # 0…9, 11…20, 30…39
    assert (found["entropy_first"], found["entropy_before"], found["entropy_last"]) == (4.5, 15.5, 34.5)
    assert parts["runs"].signal_means(steps, None)["grad_norm_before"] is None


def test_control_window_is_as_long_as_the_fatal_one_and_before_it(parts):
    found = parts["runs"].windows(range(0, 100, 2), 61)
    assert found == {"fatal": [50, 52, 54, 56, 58, 60], "control": [20, 22, 24, 26, 28, 30]}
    # half of 22 is 11: 0, 2, … 10 are six, but the fatal ones begin at 12
    assert parts["runs"].windows(range(0, 100, 2), 22)["control"] == [0, 2, 4, 6, 8, 10]
    assert "control" not in parts["runs"].windows(range(0, 100, 2), 20)


def test_contrasts_are_paired_over_seeds_and_say_which_side_is_cut(parts):
    derived = parts["derived"]
    # otb − scaled: 90 − 44 = 46, 100 − 64 = 36; t of one degree of freedom is 12.706, s/√2 = 5
    found = derived.contrast(RUNS, "otb", "scaled")
    assert found.estimate == 41
    assert found.low == pytest.approx(41 - 12.706 * 5, abs=1e-2)
    sides = [derived.bound(RUNS, *pair) for pair in (("otb", "scaled"), ("scaled", "otb"), ("scaled", "rloo"))]
    assert sides == ["at least ", "at most ", ""]
    assert derived.bound(RUNS, "otb", "calm") == "both cut: "


def watched(detector, steps):
    """Rows of one detector for the runs in their order; one without steps was not measured."""
    level = "ok" if steps is not None else "not measured"
    steps = [None] * len(RUNS) if steps is None else steps
    return [
        {"arm": row["arm"], "seed": row["seed"], "detector": detector, "watch": at, "level": level}
        for row, at in zip(RUNS, steps, strict=True)
    ]


def all_detectors(parts, **steps):
    never = [None] * len(RUNS)
    return [row for name in parts["forecast"].DETECTORS for row in watched(name, steps.get(name, never))]


def test_a_call_after_the_collapse_is_no_forecast_but_not_blind(parts):
    forecast = parts["forecast"]
    # in time: rloo 0 at 30 of 40, otb 0 at 90 of 90; late: rloo 1; the run that lasted and calm 1 are called, too
    rows = all_detectors(parts, length_drift=[30, 70, None, None, 90, 50, None, 10])
    assert sorted(forecast.leads_of(RUNS, rows, "length_drift")) == [0, 10]
    numbers = forecast.numbers(RUNS, rows, [])
    told = numbers["told"]["length_drift"]
    assert (told["leads"], told["broken"], told["pending"], told["quiet"]) == ([0, 10], 3, 1, 1)
    assert [len(numbers[name]) for name in ("broken", "pending", "quiet")] == [5, 1, 2]
    # seed 0: 2 of 3 collapsed runs against no calm one; seed 1: 0 of 2 against the calm one
    assert forecast.seed_differences(RUNS, rows, "length_drift") == pytest.approx([2 / 3, -1])
    assert numbers["blind"] == [
        "reward_fall",
        "vanished_gradient",
        "gradient_surge",
        "entropy_collapse",
        "entropy_rise",
        "zero_variance_groups",
        "tail_index",
        "clip_fraction",
    ]


def test_detector_that_was_not_measured_is_neither_blind_nor_tested(parts):
    forecast = parts["forecast"]
    rows = all_detectors(parts, tail_index=None)
    numbers = forecast.numbers(RUNS, rows, [])
    assert "tail_index" not in {*numbers["blind"], *numbers["told"], *numbers["p_values"]}
    assert "tail_index" in numbers["all_detectors"]


def test_calm_run_that_collapses_is_no_false_alarm(parts):
    runs = [*RUNS[:-1], run("calm", 1, 80)]
    assert [row["seed"] for row in parts["forecast"].still_calm(runs)] == [0]


def test_sign_flips_are_exact(parts):
    # all ten differences are 1: one of 2¹⁰ signs reaches the mean
    assert parts["forecast"].p_value([1.0] * 10) == pytest.approx(1 / 1024)
    assert parts["forecast"].p_value([0.0] * 10) == 1


def test_holm_multiplies_the_smallest_by_their_number(parts):
    # sorted .01 .02 .03 times 3 2 1 is .03 .04 .03, and no later one is smaller: .03 .04 .04
    assert parts["forecast"].holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert parts["forecast"].holm([0.9, 0.8]) == [1, 1]


def held(window, arm, seed, noise, norm=4.0):
    return {
        "window": window, "arm": arm, "seed": seed, "step": 30, "collapse": 40, "usual_norm": 2.0, "grad_norm": norm,
        "top_tokens": 0.5, "top_prompt": 0.5, "failed": 0.5, "failed_tokens": 0.25, "noise": noise,
    }  # fmt: skip


def test_fatal_and_control_steps_are_paired_by_run(parts):
    rows = [
        held("fatal", "rloo", 0, 0.9), held("control", "rloo", 0, 0.5), held("fatal", "otb", 0, 3.0),
        held("control", "otb", 0, 1.0), held("fatal", "rloo", 1, 0.6), held("control", "rloo", 1, 0.8),
        held("fatal", "otb", 1, 9.0),
    ]  # fmt: skip
    # seed 0: the median of .4 and 2 is 1.2; seed 1: −.2, since otb has no control; their mean is .5
    pairs = parts["derived"].paired(rows)
    assert parts["derived"].paired_change(pairs, "noise").estimate == pytest.approx(0.5)
    noise = parts["derived"].against_control(pairs, "noise")
    assert (noise["fatal"], noise["control"], noise["higher"]) == ([0.9, 3.0, 0.6], [0.5, 1.0, 0.8], 2)
    shares = parts["derived"].fatal_shares(rows, "otb")
    assert (shares["before"], shares["surge"], shares["noise"]) == ([10, 10], [2.0, 2.0], [3.0, 9.0])


def test_page_tells_lifetimes_and_what_c_would_explain_them(parts):
    signals = [
        {"arm": row["arm"], "seed": row["seed"]}
        | {f"{name}_{where}": 1.0 for name in ("entropy", "grad_norm", "length") for where in ("first", "last")}
        | {f"{name}_before": 2.0 if row["collapse"] else None for name in ("entropy", "grad_norm", "length")}
        for row in RUNS
    ]
    tables = {
        "runs": RUNS, "signals": signals, "detectors": all_detectors(parts), "attribution": [],
        "projection": [{"estimator": "otb", "projection": 0.5, "projection_low": 0.4, "projection_high": 0.6}],
        "curves": [{"arm": row["arm"], "seed": row["seed"], "step": 0, "reward": 0.5} for row in RUNS],
        "cost": [{"minutes": 1.0, "processor_minutes": 1.0, "peak_mib": 1, "machine": "M"}],
    }  # fmt: skip
    page = " ".join(study_page(FOLDER, parts["STUDY"], tables, quick=True)[0].split())
    assert "Collapsed: `rloo` 2 of 2, `scaled` 2 of 2, `otb` 1 of 2." in page
    assert "`scaled` takes c = 0.50 (0.40–0.60) times the rate" in page
    assert "| `otb` − `scaled` | at least +41 (" in page
    # rloo 50, otb 95, so c = .526; at c = .5 scaled would last 100 steps, and lasted 54
    assert "would last 100 steps (it lasted 54)" in page and "at most c = 0.53. The interval" in page
    assert "The horizon was not varied" in page
    assert "entropy 1.00 → 2.00 → 1.00 nats, above the first in 5 and 0 of 5 runs" in page
