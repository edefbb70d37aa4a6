"""What was said at a step must not change when later steps come in."""

import numpy as np
import pytest

from benchmarks.alarms import AT, CASES, LENGTH, calm_series
from otb_analysis.diagnostics import DETECTORS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.change)
def test_first_firing_is_the_same_whatever_comes_later_and_unknown_before(case):
    detect = DETECTORS[case.detector]
    randoms = (np.random.default_rng(seed) for seed in range(3, 23))  # a small change is not found in every run
    runs = (case.apply(random, calm_series(random, LENGTH)) for random in randoms)
    run, whole = next((run, found) for run in runs if (found := detect(run)).fired)
    assert whole.watch_step >= AT
    assert detect(run.until(whole.watch_step)).watch_step == whole.watch_step
    assert not detect(run.until(whole.watch_step - 1)).fired


@pytest.mark.parametrize("name", DETECTORS)
def test_every_score_is_that_of_the_run_cut_there(name):
    run = calm_series(np.random.default_rng(5), 150)
    whole = {one.statistic + one.column: one for one in DETECTORS[name](run).evidence}
    for step in (60, 99, 148):
        for one in DETECTORS[name](run.until(step)).evidence:
            later = whole[one.statistic + one.column]
            np.testing.assert_allclose(one.score, later.score[: one.score.size], rtol=1e-12)
