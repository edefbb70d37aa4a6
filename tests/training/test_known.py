"""What a run stores of estimators whose projection is proved."""

from typing import Any

import pytest

from otb_analysis.config import ObjectiveConfig
from otb_analysis.store import RunStore


def rows(path) -> dict[str, Any]:
    table = RunStore(path).gradients_df()
    return {name: part for name, part in table.groupby("estimator")}


def test_rows_of_a_plain_run_have_one_where_unbiased_and_say_so(otb_run):
    found = rows(otb_run)
    for name, c in (("rloo", 1.0), ("otb_loo", 1.0), ("value", 1.0), ("group_mean", 1 - 1 / 3)):
        assert found[name]["c_known"].all()
        assert (found[name]["projection"] == c).all()
        assert found[name]["relative_bias"].tolist() == pytest.approx([1 - c] * len(found[name]))
        assert found[name]["sf"].tolist() == pytest.approx((found[name]["variance"] / c**2).tolist())
    assert not found["otb"]["c_known"].any()
    assert (found["rloo"]["reference"] == "rloo").all()


def test_rows_of_a_run_on_old_rollouts_estimate_it(trained):
    stale = trained("stale", objective=ObjectiveConfig(staleness=1))
    assert not RunStore(stale).gradients_df()["c_known"].any()
