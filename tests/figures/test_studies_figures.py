import pandas as pd

from otb_analysis.figures.svg import results_table


def test_ends_of_an_interval_become_one_column_behind_its_estimate():
    table = pd.DataFrame(
        {"arm": ["a", "b"], "sf": [1.5, None], "sf_low": [1.25, None], "sf_high": [-2.0, None], "low": [3, 4]}
    )
    shown = results_table(table)
    assert list(shown) == ["arm", "sf", "sf, interval", "low"]
    assert shown["sf, interval"].fillna("missing").tolist() == ["1.25 to −2.00", "missing"]
    assert shown["sf"].dtype == float


def test_bare_ends_belong_to_the_column_before_them():
    shown = results_table(pd.DataFrame({"step": [0], "success": [0.5], "low": [0.25], "high": [0.75]}))
    assert list(shown) == ["step", "success", "success, interval"]
    assert shown["success, interval"].tolist() == ["0.250 to 0.750"]


def test_table_without_intervals_stays_as_it_is():
    table = pd.DataFrame({"cell": ["a"], "minutes": [1.5], "lowest": [1], "highest": [2]})
    pd.testing.assert_frame_equal(results_table(table), table)


def test_names_are_shown_without_the_marks_of_code():
    shown = results_table(pd.DataFrame({"ratio": ["`tis`, cap 1.2", None], "touched `ppo`": [0.5, 0.25]}))
    assert list(shown) == ["ratio", "touched ppo"]
    assert shown["ratio"].iloc[0] == "tis, cap 1.2" and shown["ratio"].isna().tolist() == [False, True]
