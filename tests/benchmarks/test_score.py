import pytest

from benchmarks.config import ScoreBenchConfig
from benchmarks.publish import run_bench


@pytest.mark.slow
@pytest.mark.heavy
def test_every_way_scores_and_is_held_against_one_process_and_plain_ones():
    rows = run_bench(ScoreBenchConfig(rollouts=64, repeats=1)).rows
    for what in ("forward passes", "exact norms"):
        one, plain, *ray = [row for row in rows if row["what"] == what]
        assert (one["by"], plain["by"]) == ("one process", "2 processes") and len(ray) < 2
        assert (one["ratio"], plain["ratio"], plain["plain"]) == (1, plain["wall"] / one["wall"], 1)
        assert 0 < plain["last"] < plain["wall"] and one["processor"] < plain["processor"]
    assert all(row["rollouts"] == 64 for row in rows)


@pytest.mark.slow
@pytest.mark.heavy
def test_few_prompts_of_a_step_are_a_level_of_their_own():
    report = run_bench(ScoreBenchConfig(rollouts=32, repeats=1, few=True))
    assert {row["what"] for row in report.rows} == {"exact norms of 2 prompts of 16"}
    assert any("s by the clock for `--finish`" in note for note in report.notes)
