import pytest

from benchmarks.config import ScoreBenchConfig
from benchmarks.publish import run_bench


@pytest.mark.slow
def test_every_way_scores_and_is_held_against_one_process_and_plain_ones():
    rows = run_bench(ScoreBenchConfig(rollouts=64, repeats=1)).rows
    for what in ("forward passes", "exact norms"):
        one, plain, *ray = [row for row in rows if row["what"] == what]
        assert (one["by"], plain["by"]) == ("one process", "2 processes") and len(ray) < 2
        assert (one["ratio"], plain["ratio"], plain["plain"]) == (1, plain["wall"] / one["wall"], 1)
    assert all(row["rollouts"] == 64 for row in rows)
