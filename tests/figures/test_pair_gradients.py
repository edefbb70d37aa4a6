from dataclasses import replace

import numpy as np
import pytest

from otb_analysis.answers.pairs import NOT_MEASURED, OTHER_PROMPTS, RunGrams, compare_noise, zero_note
from otb_analysis.figures.pairs import (
    compare_estimators,
    noise_display,
    noise_table,
    plot_pair,
)
from otb_analysis.figures.runs import pair_runs
from otb_analysis.statistics import NOTHING, paired_ratios
from otb_analysis.types import Gram

LABELS = (("rloo", "none"), ("otb", "proxy"))


def measured(seed: int, spread: float, prompts: int = 16, steps=(0, 10, 20), name="p", task="sum", estimator="rloo"):
    """A run whose rloo has noise of this spread, and otb half of that."""
    grams = {}
    for step in steps:
        random = np.random.default_rng([seed, step])
        truth, noise = np.eye(12)[0], random.normal(size=(prompts, 12)) * spread
        both = np.stack([truth + noise, truth + noise / 2])
        names = tuple(f"{name}{step}-{p}" for p in range(prompts))
        grams[step] = Gram(np.einsum("mpd,nqd->mnpq", both, both), LABELS, 8 * prompts, names)
    return RunGrams({"task": task, "estimator": {"name": estimator}}, grams, "all")


def noise_of(**runs: RunGrams):
    return compare_noise(pair_runs("a", "b"), runs, NOTHING)


def test_a_planted_ratio_of_noise_is_found():
    info = noise_of(a=measured(1, 0.6), b=measured(2, 0.3))
    (own,) = info.rows
    assert own.ratios[2].low < 0.25 < own.ratios[2].high  # variance goes with the square of the spread
    assert own.n_prompts == 48 and own.n_steps == 3
    assert own.decides == "efficiency" and own.judged == own.ratios[1]  # nothing is proved of these runs
    assert "not distinguishable" not in noise_display(info).iloc[0]["variance"]


def test_no_difference_is_not_distinguishable():
    info = noise_of(a=measured(1, 0.4), b=measured(2, 0.4))
    assert info.rows[0].judged.low < 1 < info.rows[0].judged.high
    assert noise_display(info).iloc[0]["variance at equal progress"].endswith("not distinguishable")


def test_unlike_estimators_are_compared_on_the_same_rollouts_too():
    a, b = measured(1, 0.4), measured(2, 0.4, estimator="otb")
    own, same = noise_of(a=a, b=b).rows
    (expected,) = [r for r in paired_ratios([*a.grams.values(), *b.grams.values()]) if r.estimator == "otb"]
    assert same.ratios[2].estimate == pytest.approx(0.25) == expected.variance.estimate
    assert same.n_steps == 6 and own.n_steps == 3


def test_only_shared_measured_steps_count():
    info = noise_of(a=measured(1, 0.4), b=measured(2, 0.4, steps=(10, 20, 30)))
    assert info.rows[0].n_steps == 2 and info.rows[0].n_prompts == 32


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"name": "q"}, OTHER_PROMPTS),
        ({"steps": (5, 15)}, NOT_MEASURED),
        ({"estimator": "someone's own"}, NOT_MEASURED),
        ({"task": "path"}, "differ in task"),
    ],
)
def test_what_does_not_compare_is_said(other, note):
    info = noise_of(a=measured(1, 0.4), b=measured(2, 0.4, **other))
    assert not info.rows and note in info.notes[0]


def test_runs_of_other_scopes_do_not_compare():
    info = noise_of(a=measured(1, 0.4), b=replace(measured(2, 0.4), scope="lm_head"))
    assert not info.rows and "differ in scope" in info.notes[0]


def test_below_sixteen_prompts_there_is_a_point_and_no_interval():
    info = noise_of(a=measured(1, 0.4, 4, (0,)), b=measured(2, 0.4, 4, (0,)))
    assert info.rows[0].judged is None or info.rows[0].judged.low is None


def test_two_estimators_of_a_run_are_compared_by_block_and_over_all():
    run = measured(1, 0.4)
    panels, info = compare_estimators(run.grams, *LABELS)
    variance = next(panel for panel in panels if panel.quantity.column == "variance")
    assert variance.ratio and variance.step.tolist() == [0, 10, 20]
    assert [block.estimate for block in variance.blocks] == pytest.approx([0.25] * 3)
    assert variance.b / variance.a == pytest.approx(np.full((1, 3), 0.25))
    assert noise_table(info).iloc[0]["variance"] == pytest.approx(0.25)
    assert compare_estimators({}, *LABELS, NOTHING)[0] == ()


def test_a_variance_of_0_has_no_place_on_a_logarithmic_axis_and_that_is_said():
    run = measured(1, 0.4, 16, range(8))
    dead = replace(run.grams[7], inner=np.zeros_like(run.grams[7].inner))
    panels, _ = compare_estimators(run.grams | {7: dead}, *LABELS)
    variance = [panel for panel in panels if panel.quantity.column == "variance"]
    assert variance[0].a[0, -1] == 0 and "batch variance at 1 of them" in zero_note(panels)
    lines = [trace.y for trace in plot_pair(variance, "A", "B").data if trace.name in ("A", "B")]
    assert all(np.isnan(line[-1]) and (line[:-1] > 0).all() for line in lines) and len(lines) == 2
    assert zero_note(compare_estimators(run.grams, *LABELS)[0]) == ""


def test_blocks_of_few_prompts_are_joined_until_they_have_an_interval():
    panels, _ = compare_estimators(measured(1, 0.4, 8, range(8)).grams, *LABELS)
    assert {len(panel.blocks) for panel in panels} == {4}
    assert all(block.low is not None for panel in panels for block in panel.blocks if block is not None)


def test_a_multiple_of_the_other_is_the_same_update():
    run = measured(1, 0.4)
    inner = np.tile(run.grams[0].inner[:1, :1], (2, 2, 1, 1)) * np.outer([1, 0.75], [1, 0.75])[..., None, None]
    labels = (LABELS[0], ("group_mean", "none"))
    gram = Gram(inner, labels, 128, run.grams[0].prompt)
    a, b = (RunGrams({"task": "sum", "estimator": {"name": name}}, {0: gram}, "all") for name, _ in labels)
    same = noise_of(a=a, b=b).rows[1]
    assert same.judged is not None and (same.judged.estimate, same.judged.high) == pytest.approx((1, 1))


def test_runs_own_updates_stay_open_along_a_gradient_that_noise_hides():
    def lost(seed):
        noise = np.random.default_rng(seed).normal(size=(2, 24, 12))
        noise -= noise.mean(axis=1, keepdims=True)
        gram = Gram(np.einsum("mpd,nqd->mnpq", noise, noise), LABELS, 192, tuple(map(str, range(24))))
        return RunGrams({"task": "sum", "estimator": {"name": "rloo"}}, {0: gram}, "all")

    (own,) = noise_of(a=lost(0), b=lost(1)).rows
    sf, efficiency, variance = own.ratios
    assert sf is efficiency is None and variance is not None
