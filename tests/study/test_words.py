import pytest

from otb_analysis.errors import InputError
from otb_analysis.statistics import Interval
from otb_analysis.study import markdown_table, share, with_interval
from otb_analysis.study.page import cost_words
from otb_analysis.study.words import (
    column_words,
    forget_peak_memory,
    interval_columns,
    number_words,
    peak_memory_mib,
    rounded,
    span_words,
)


def test_a_share_is_written_in_percent_with_its_interval():
    assert share(0.414) == "41 %"
    assert with_interval(0.4142, 0.3614, 0.4649) == "41.4 % (36.1–46.5)"


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_share_without_an_interval_stands_alone(missing):
    assert with_interval(0.4142, missing, missing, digits=0) == "41 %"


def test_an_interval_is_three_columns_and_comes_back_as_words():
    columns = interval_columns("gain", Interval(1.2345678, 1.1, 1.42, 32, "gain", "jackknife"))
    assert columns == {"gain": 1.2346, "gain_low": 1.1, "gain_high": 1.42}
    assert column_words(columns, "gain") == "1.23 (1.10–1.42)"
    few = interval_columns("gain", Interval(1.2, None, None, 4, "gain", "jackknife"))
    assert column_words(few, "gain", ".1f") == "1.2"
    assert column_words(interval_columns("gain", None), "gain") == column_words({}, "gain") == "–"


def test_numbers_in_words_say_no_more_than_is_known():
    assert [number_words(x) for x in (None, 0.5, 2e7, -2e7)] == ["–", "0.50", ">999", "<−999"]
    assert [rounded(x) for x in (None, float("nan"), float("inf"), 123456.7)] == [None, None, None, 123460.0]
    assert [span_words(x) for x in ([], [0.59, 0.35])] == ["–", "0.35–0.59"]
    assert span_words([-0.2, 0.1]) == "-0.20 to 0.10"


def test_a_table_has_its_words_left_and_its_numbers_right():
    assert markdown_table(["name", "n"], [["a", "1"]]) == "| name | n |\n| --- | ---: |\n| a | 1 |"


def test_a_row_of_another_length_is_one_sentence():
    with pytest.raises(InputError, match="a row has 1 cells but there are 2 headers; pass one cell for each"):
        markdown_table(["name", "n"], [["a"]])


def test_cost_is_the_sum_of_minutes_and_the_largest_memory():
    cost = [row(8.26, 600, "M"), row(4.0, 1200, "M")]
    wanted = "12 min of processor time (25 min by the clock) in 2 cells, at most 1,200 MiB of memory, each on M."
    assert cost_words(cost) == wanted  # 8.26 + 4 = 12.26, and twice that
    unknown = [row(1.0, None, "M"), row(1.0, None, "K")]
    assert cost_words(unknown) == "2.0 min of processor time (4.0 min by the clock) in 2 cells, each on M and K."


def test_where_processor_time_was_not_measured_only_the_clock_is_told():
    old = {"minutes": 60.0, "peak_mib": None, "machine": "M"}
    assert cost_words([old, old | {"processor_minutes": 3.0}]) == "120 min in 2 cells, each on M."


def row(minutes, peak, machine):
    return {"minutes": 2 * minutes, "processor_minutes": minutes, "peak_mib": peak, "machine": machine}


def test_peak_memory_is_that_since_it_was_forgotten():
    block = bytearray(200 * 2**20)
    high = peak_memory_mib()
    del block
    forget_peak_memory()
    low = peak_memory_mib()
    if high is None or low is None:
        pytest.skip("the system does not tell")
    assert high - low > 150
