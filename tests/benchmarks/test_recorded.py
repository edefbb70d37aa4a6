import json

from benchmarks.config import RecordedBenchConfig
from benchmarks.publish import run_bench
from benchmarks.recorded import records


def test_its_records_are_groups_of_eight_with_a_number_for_each_token():
    rows = list(records(256, 20))
    assert len(rows) == 256 and {row["step"] for row in rows} == {0, 1} and len({row["group"] for row in rows}) == 32
    assert all(len(row["ids"]) == len(row["logprobs"]) == len(row["advantages"]) for row in rows)
    assert all(16 <= len(row["ids"]) <= 24 and max(row["logprobs"]) < 0 for row in rows) and json.dumps(rows)


def test_both_commands_are_measured():
    audit, imported = run_bench(
        RecordedBenchConfig(audited=16, imported=16, tokens=10, audited_tokens=5, repeats=1)
    ).rows
    assert (audit["what"], imported["what"]) == ("otb audit", "otb import")
    assert all(row["processor"] > 0 and row["peak"] > 0 and row["against"] == 1 for row in (audit, imported))
