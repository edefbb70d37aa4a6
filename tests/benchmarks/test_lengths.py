import pytest

from benchmarks.config import LengthsConfig
from benchmarks.engine import STEP
from benchmarks.lengths import run
from benchmarks.publish import markdown


@pytest.mark.slow
@pytest.mark.heavy
def test_the_fast_engine_stays_within_three_forward_and_backward_passes():
    report = run(LengthsConfig(tokens=(512, 1024)))
    rows = {(row["tokens"], row["name"]): row for row in report.rows}
    assert set(rows) == {(t, name) for t in (512, 1024) for name in (STEP, "fast", "generic")}
    if rows[1024, STEP]["memory"] is None:
        pytest.skip("this system does not tell the peak of a process's memory")
    assert rows[1024, STEP]["ratio"] == 1 and rows[1024, "fast"]["ratio"] < 3
    assert rows[1024, "fast"]["memory"] < 2.3 * rows[512, "fast"]["memory"]  # not with T²
    assert "otb bench lengths --tokens 512 1024 --size S" in markdown(report)
