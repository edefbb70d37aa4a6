import pytest

from benchmarks import dashboard
from benchmarks.config import DashboardBenchConfig
from benchmarks.publish import run_bench

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.heavy]


def test_pages_of_the_menu_are_opened_on_one_run_and_on_many(tmp_path, monkeypatch):
    monkeypatch.setattr(dashboard, "NEW", 1)
    monkeypatch.setattr(dashboard, "FOLLOWED", ("run",))
    sizes = {
        "steps": 30,
        "measured": (4,),
        "tokens": 8_000,
        "runs": 2,
        "many_steps": 10,
        "many_measured": 2,
        "long": 20,
    }
    config = DashboardBenchConfig(root=tmp_path, many_tokens=2_000, pages=("run",), followed=(12,), **sizes)
    one, many, long, bare, walk, *followed = run_bench(config).rows
    assert (one["runs"], many["runs"], one["page"]) == ("1 of 30 steps, 4 measured", "2 of 10 steps", "Run")
    assert long["runs"] == "1 of 64 answers a step, 20 tokens each" and long["first"] > 0
    assert one["first"] > 0 and one["again"] > 0 and one["controls"] and one["memory"] > 50
    assert bare["runs"] == "none" and bare["first"] > 0 and bare["again"] > 0
    assert walk["page"] == "all, one after the other" and walk["memory"] > 50
    assert [row["page"] for row in followed] == ["Run"]
    assert all(row["runs"] == "followed at 12 steps" and row["grown"] > 0 for row in followed)
    assert not (tmp_path / "followed-12").exists()
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == ["synthetic-0", "synthetic-1"]
