"""05_collapse: its arms, the step it calls a collapse, and what it makes of tables made by hand."""

import importlib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from otb_analysis.estimators import EstimatorInputs, estimate
from studies.lib import collapse
from studies.lib.record import load_study
from studies.lib.run import study_page

FOLDER = Path(__file__).parent.parent.parent / "studies" / "05_collapse"


@pytest.fixture(scope="module")
def parts():
    """The study and its files."""
    study = load_study(FOLDER)
    names = ("study", "derived")
    return {"STUDY": study} | {name: importlib.import_module(f"study_{FOLDER.name}.{name}") for name in names}


def run(arm, seed, collapse):
    return {
        "arm": arm, "seed": seed, "rate": 0.004, "steps": 80, "collapse": collapse, "best": 0.8, "last": 0.1,
        "clip_fraction": 1.0, "baseline": 0.5, "reward": 0.6,
    }  # fmt: skip


RUNS = [
    run("rloo-4", 0, 30), run("rloo-4", 1, 40), run("lowered-4", 0, 50), run("lowered-4", 1, 64),
    run("otb-4", 0, 60), run("otb-4", 1, None), run("raised-4", 0, 36), run("raised-4", 1, 44),
    run("calm", 0, None), run("calm", 1, None),
]  # fmt: skip


def test_arms_share_everything_but_baseline_staleness_and_ratio(parts):
    study = parts["study"]
    config = {name: study.config_of(0, study.FULL, False, arm) for name, arm in study.ARMS.items()}
    calm, staged, other = config["calm"], config["rloo-4"], config["lowered-8-ratio"]
    assert (calm.objective.staleness, calm.optimize.warmup_steps, calm.optimize.learning_rate) == (0, 0, 3e-4)
    assert (staged.objective.staleness, staged.optimize.warmup_steps, staged.optimize.learning_rate) == (4, 80, 4.8e-3)
    assert (other.objective.staleness, other.objective.ratio, other.optimize) == (8, "token", staged.optimize)
    shared = {repr((c.seed, c.sample, c.chain_sum, c.warm_start, c.small_model)) for c in config.values()}
    assert len(shared) == 1


def test_raised_has_no_ratios_and_only_two_arms_are_attributed(parts):
    study = parts["study"]
    # seven baselines at two stalenesses, all but one with ratios, and the calm arm
    assert len(study.ARMS) == 7 * 2 + 6 * 2 + 1 and "raised-4-ratio" not in study.ARMS
    assert [name for name, arm in study.ARMS.items() if arm.attributed] == ["rloo-4", "otb-4"]
    assert len(parts["STUDY"].cells) == 6 * len(study.ARMS)


def test_moved_baselines_have_the_mean_of_the_one_and_the_shape_of_the_other(parts):
    random = np.random.default_rng(0)
    mask = np.arange(5) < np.array([3, 5, 4, 2, 5, 1, 4, 4])[:, None]
    reward = np.where(np.cumsum(mask, axis=1) == mask.sum(axis=1, keepdims=True), random.random((8, 1)), 0) * mask
    inputs = EstimatorInputs(reward, mask, np.repeat([0, 1], 4), energy=random.random((8, 5)) * mask)
    rloo, otb = (estimate(name, inputs).advantage for name in ("rloo", "otb"))
    lowered, raised = (getattr(collapse, name)(inputs) for name in ("lowered", "raised"))
    # A = G − B: equal means of B are equal means of A
    assert lowered[mask].mean() == pytest.approx(otb[mask].mean())
    assert raised[mask].mean() == pytest.approx(rloo[mask].mean())
    assert np.ptp((lowered - rloo)[mask]) < 1e-12 < abs((lowered - rloo)[mask].mean())
    assert np.ptp((raised - otb)[mask]) < 1e-12
    assert not lowered[~mask].any() and not raised[~mask].any()


def test_collapse_is_the_first_step_of_a_lasting_loss_of_half(parts):
    # the trailing mean of 6 is 1 up to step 19, then 5/6, 4/6, 3/6 at step 22: half of the best
    reward = np.r_[np.ones(20), np.zeros(20)]
    assert parts["study"].collapse_step(reward) == 22
    # back after 8 steps: low from 22 to 29, when the mean is 2/6, and 3/6 again at 30, 4/6 at 31: lasting enough
    assert parts["study"].collapse_step(np.r_[np.ones(20), np.zeros(8), np.ones(12)]) == 22
    # back after 4 steps: never below 2/6, low at 22 to 26 only, five steps
    assert parts["study"].collapse_step(np.r_[np.ones(20), np.zeros(4), np.ones(16)]) is None


def test_signals_are_means_at_the_start_up_to_the_collapse_and_at_the_end(parts):
    steps = pd.DataFrame({name: np.arange(40.0) for name in ("entropy_mean", "grad_norm", "length_mean")})
    found = parts["study"].signal_means(steps, 20)
    # 0…9, 11…20, 30…39
    assert (found["entropy_first"], found["entropy_before"], found["entropy_last"]) == (4.5, 15.5, 34.5)
    assert parts["study"].signal_means(steps, None)["grad_norm_before"] is None


def test_control_window_is_as_long_as_the_fatal_one_and_before_it(parts):
    found = parts["study"].windows(range(0, 100, 2), 61)
    assert found == {"fatal": [50, 52, 54, 56, 58, 60], "control": [20, 22, 24, 26, 28, 30]}
    # half of 22 is 11: 0, 2, … 10 are six, but the fatal ones begin at 12
    assert parts["study"].windows(range(0, 100, 2), 22)["control"] == [0, 2, 4, 6, 8, 10]
    assert "control" not in parts["study"].windows(range(0, 100, 2), 20)


def test_contrasts_are_paired_over_seeds_and_say_which_side_is_cut(parts):
    derived = parts["derived"]
    # otb − raised: 60 − 36 = 24, 80 − 44 = 36; t of one degree of freedom is 12.706, s/√2 = 6
    found = derived.contrast(RUNS, "otb-4", "raised-4")
    assert found.estimate == 30
    assert found.low == pytest.approx(30 - 12.706 * 6, abs=1e-2)
    pairs = (("otb-4", "raised-4"), ("raised-4", "otb-4"), ("lowered-4", "rloo-4"))
    assert [derived.censored_words(RUNS, *pair) for pair in pairs] == ["at least ", "at most ", ""]
    assert derived.censored_words(RUNS, "otb-4", "calm") == "both cut: "


def test_effects_are_means_of_two_differences_seed_by_seed(parts):
    derived, study = parts["derived"], parts["study"]
    # level: (50 − 30 + 60 − 36)/2 = 22, (64 − 40 + 80 − 44)/2 = 30; shape: (10 + 6)/2 = 8, (16 + 4)/2 = 10
    assert derived.effect_by_seed(RUNS, study.LEVEL, "") == {0: 22, 1: 30}
    assert derived.effect_by_seed(RUNS, study.SHAPE, "") == {0: 8, 1: 10}
    # 26 ± 12.706 · 4 holds 0, and so does 17 ± 12.706 · 3 of their difference
    effects = derived.effects_of(RUNS, "")
    assert [effects[name].estimate for name in ("level", "shape", "level − shape")] == [26, 9, 17]
    assert derived.cause_of_lasting(effects) == "open"
    assert derived.effects_of(RUNS, "-ratio") == {"level": None, "shape": None, "level − shape": None}


def test_cause_is_named_only_where_one_effect_is_above_the_other(parts):
    high, low, none = ({"": x, "_low": x - 3, "_high": x + 3} for x in (10, -10, 0))
    cause = parts["derived"].cause_of_lasting
    assert cause({"level": high, "shape": none} | {"level − shape": high}) == "level"
    assert cause({"level": none, "shape": high} | {"level − shape": low}) == "shape"
    assert cause({"level": high, "shape": high} | {"level − shape": none}) == "both"
    assert cause({"level": high, "shape": none} | {"level − shape": none}) == "open"


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
    return [row for name in parts["derived"].DETECTORS for row in watched(name, steps.get(name, never))]


def test_a_call_after_the_collapse_is_no_forecast_but_not_blind(parts):
    derived = parts["derived"]
    # in time: rloo 0 at 20 of 30, otb 0 at 60 of 60; late: rloo 1; the run that lasted and calm 1 are called, too
    rows = all_detectors(parts, length_drift=[20, 70, None, None, 60, 50, None, None, None, 10])
    assert sorted(derived.leads_of(RUNS, rows, "length_drift")) == [0, 10]
    numbers = derived.forecast_numbers(RUNS, rows, [])
    told = numbers["told"]["length_drift"]
    assert (told["leads"], told["broken"], told["pending"], told["quiet"]) == ([0, 10], 3, 1, 1)
    assert [len(numbers[name]) for name in ("broken", "pending", "quiet")] == [7, 1, 2]
    # seed 0: 2 of 4 collapsed runs against no calm one; seed 1: 0 of 3 against the calm one
    assert derived.seed_differences(RUNS, rows, "length_drift") == pytest.approx([1 / 2, -1])
    assert numbers["blind"] == [
        "reward_fall",
        "vanished_gradient",
        "not_finite",
        "gradient_surge",
        "entropy_collapse",
        "entropy_rise",
        "zero_variance_groups",
        "tail_index",
        "clip_fraction",
    ]


def test_detector_that_was_not_measured_is_neither_blind_nor_tested(parts):
    derived = parts["derived"]
    rows = all_detectors(parts, tail_index=None)
    numbers = derived.forecast_numbers(RUNS, rows, [])
    assert "tail_index" not in {*numbers["blind"], *numbers["told"], *numbers["p_values"]}
    assert "tail_index" in numbers["all_detectors"]


def test_calm_run_that_collapses_is_no_false_alarm(parts):
    runs = [*RUNS[:-1], run("calm", 1, 70)]
    assert [row["seed"] for row in parts["derived"].still_calm(runs)] == [0]


def test_sign_flips_are_exact(parts):
    # all ten differences are 1: one of 2¹⁰ signs reaches the mean
    assert parts["derived"].p_value([1.0] * 10) == pytest.approx(1 / 1024)
    assert parts["derived"].p_value([0.0] * 10) == 1


def test_holm_multiplies_the_smallest_by_their_number(parts):
    # sorted .01 .02 .03 times 3 2 1 is .03 .04 .03, and no later one is smaller: .03 .04 .04
    assert parts["derived"].holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert parts["derived"].holm([0.9, 0.8]) == [1, 1]


def held(window, arm, seed, noise, norm=4.0):
    return {
        "window": window, "arm": arm, "seed": seed, "step": 30, "collapse": 40, "usual_norm": 2.0, "grad_norm": norm,
        "top_tokens": 0.5, "top_prompt": 0.5, "failed": 0.5, "failed_tokens": 0.25, "noise": noise,
    }  # fmt: skip


def test_fatal_and_control_steps_are_paired_by_run(parts):
    rows = [
        held("fatal", "rloo-4", 0, 0.9), held("control", "rloo-4", 0, 0.5), held("fatal", "otb-4", 0, 3.0),
        held("control", "otb-4", 0, 1.0), held("fatal", "rloo-4", 1, 0.6), held("control", "rloo-4", 1, 0.8),
        held("fatal", "otb-4", 1, 9.0),
    ]  # fmt: skip
    # seed 0: the median of .4 and 2 is 1.2; seed 1: −.2, since otb has no control; their mean is .5
    pairs = parts["derived"].window_pairs(rows)
    assert parts["derived"].against_control(pairs, "noise")["change"].estimate == pytest.approx(0.5)
    noise = parts["derived"].against_control(pairs, "noise")
    assert (noise["fatal"], noise["control"], noise["higher"]) == ([0.9, 3.0, 0.6], [0.5, 1.0, 0.8], 2)
    shares = parts["derived"].fatal_shares(rows, "otb-4")
    assert (shares["before"], shares["surge"], shares["noise"]) == ([10, 10], [2.0, 2.0], [3.0, 9.0])


def test_page_tells_lifetimes_and_the_effects_of_level_and_shape(parts):
    signals = [
        {"arm": row["arm"], "seed": row["seed"]}
        | {f"{name}_{where}": 1.0 for name in ("entropy", "grad_norm", "length") for where in ("first", "last")}
        | {f"{name}_before": 2.0 if row["collapse"] else None for name in ("entropy", "grad_norm", "length")}
        for row in RUNS
    ]
    tables = {
        "runs": RUNS, "signals": signals, "detectors": all_detectors(parts), "attribution": [],
        "curves": [{"arm": row["arm"], "seed": row["seed"], "step": 0, "reward": 0.5} for row in RUNS],
        "cost": [{"minutes": 1.0, "processor_minutes": 1.0, "peak_mib": 1, "machine": "M"}],
    }  # fmt: skip
    page = " ".join(study_page(FOLDER, parts["STUDY"], tables, quick=True)[0].split())
    assert "Collapsed: `rloo-4` 2 of 2, `lowered-4` 2 of 2, `otb-4` 1 of 2, `raised-4` 2 of 2." in page
    assert "level +26 (-25 to +77), shape +9 (" in page
    assert "| `otb` − `raised` | at least +30 (" in page
    assert "| `lowered` − `rloo` | +22 (" in page
    assert "entropy 1.00 → 2.00 → 1.00 nats, above the first in 7 and 0 of 7 runs" in page
