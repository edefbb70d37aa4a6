import pytest

from benchmarks.config import ProcessesConfig
from benchmarks.publish import run_bench


@pytest.mark.slow
@pytest.mark.heavy
def test_every_number_of_processes_has_a_row_with_whole_weights_and_with_shards():
    levels = "exact", "gram", "attribution"
    report = run_bench(ProcessesConfig(model="S", levels=levels, tokens=4, prompts=2, group_size=2, repeats=1))
    for level in levels:
        rows = [row for row in report.rows if row["level"] == level]
        assert [(row["processes"], row["weights"]) for row in rows] == [(1, "whole"), (2, "whole"), (2, "FSDP2")]
        one, two, sharded = (row["seconds"] for row in rows)
        assert [row["ratio"] for row in rows] == [1, two / one, sharded / one]
        assert rows[-1]["sharded_ratio"] == sharded / two
