"""Shares of a profile."""

import pytest

from benchmarks.profile import SHOWN, run_profile
from otb_analysis.errors import InputError


def test_shares_add_up_and_products_of_matrices_are_among_the_largest():
    report = run_profile("fast", "S", 8)
    assert len(report.rows) == SHOWN + 1
    assert sum(row["share"] for row in report.rows) == pytest.approx(1.0)
    assert {"aten::mm", "aten::bmm"} & {row["operator"] for row in report.rows}


def test_row_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(InputError, match=r"row is 'fasst'.*fast"):
        run_profile("fasst", "S", 8)
