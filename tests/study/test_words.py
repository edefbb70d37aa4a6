import pytest

from otb_analysis.study import markdown_table, share, with_interval
from otb_analysis.study.page import cost_words
from otb_analysis.study.words import forget_peak_memory, peak_memory_mib


def test_a_share_is_written_in_percent_with_its_interval():
    assert share(0.414) == "41 %"
    assert with_interval(0.4142, 0.3614, 0.4649) == "41.4 % (36.1–46.5)"


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_share_without_an_interval_stands_alone(missing):
    assert with_interval(0.4142, missing, missing, digits=0) == "41 %"


def test_a_table_has_its_words_left_and_its_numbers_right():
    assert markdown_table(["name", "n"], [["a", "1"]]) == "| name | n |\n| --- | ---: |\n| a | 1 |"


def test_cost_is_the_sum_of_minutes_and_the_largest_memory():
    cost = [{"minutes": 8.26, "peak_mib": 600, "machine": "M"}, {"minutes": 4.0, "peak_mib": 1200, "machine": "M"}]
    assert cost_words(cost) == "12 min in 2 cells, at most 1,200 MiB of memory, each on M."
    unknown = [{"minutes": 1.0, "peak_mib": None, "machine": m} for m in ("M", "K")]
    assert cost_words(unknown) == "2.0 min in 2 cells, each on M and K."


def test_peak_memory_is_that_since_it_was_forgotten():
    block = bytearray(200 * 2**20)
    high = peak_memory_mib()
    del block
    forget_peak_memory()
    low = peak_memory_mib()
    if high is None or low is None:
        pytest.skip("the system does not tell")
    assert high - low > 150
