"""The yardstick computes the same thing, and the vectorised form is not slower than it."""

import numpy as np
import pytest

from benchmarks.config import EstimatorsConfig
from benchmarks.estimators import LOOP, PASS, bench_inputs, torch_loop
from benchmarks.publish import run_bench
from otb_analysis.estimators import ESTIMATORS, estimate


def test_torch_loop_is_otb():
    inputs = bench_inputs(24, 50, 8)
    ours = estimate("otb", inputs)
    for got, expected in zip(torch_loop(inputs), (ours.baseline, ours.advantage, ours.fallback), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-13)
    assert ours.fallback.any()


def test_every_estimator_is_timed_beside_the_yardsticks():
    rows = run_bench(EstimatorsConfig(rows=16, tokens=32, group_size=4, repeats=1)).rows
    assert [row["name"] for row in rows] == [*ESTIMATORS, LOOP, PASS]
    by_name = {row["name"]: row for row in rows}
    assert by_name[LOOP]["to_loop"] == 1 and by_name[PASS]["to_pass"] == 1
    otb = by_name["otb"]
    assert otb["seconds"] > 0
    assert otb["to_loop"] == pytest.approx(otb["seconds"] / by_name[LOOP]["seconds"])
