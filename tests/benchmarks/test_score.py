import pytest

from benchmarks.config import ScoreBenchConfig
from benchmarks.publish import run_bench


@pytest.mark.slow
def test_every_way_scores_and_is_held_against_one_process_and_plain_ones():
    rows = run_bench(ScoreBenchConfig(rollouts=64, repeats=1)).rows
    one, plain = (row["wall"] for row in rows[:2])
    assert [row["by"] for row in rows[:2]] == ["one process", "2 processes"]
    assert [row["ratio"] for row in rows[:2]] == [1, plain / one] and rows[1]["plain"] == 1
    assert all(row["rollouts"] == 64 for row in rows)
