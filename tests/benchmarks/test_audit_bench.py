import json

import pytest

from benchmarks.audit import QUICK, largest_gap, ratios, write_rollouts
from benchmarks.config import AuditBenchConfig
from benchmarks.publish import run_bench
from otb_analysis.config import ScoreConfig
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore


def test_ratios_are_over_rloo_and_gaps_relative():
    rows = [("rloo", 2.0), ("otb", 1.0), ("none", 5.0), ("opo", None)]
    first = ratios({"estimators": [{"estimator": n, "energy_source": "none", "variance": v} for n, v in rows]})
    assert first == {("rloo", "none"): 1.0, ("otb", "none"): 0.5, ("none", "none"): 2.5}
    assert largest_gap(first, {("rloo", "none"): 1.0, ("otb", "none"): 0.45}) == pytest.approx(0.1)


def test_its_rollouts_are_records_that_the_model_could_have_written(tmp_path):
    facts = write_rollouts(tmp_path / "r.jsonl", "demo", QUICK.sample)
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert facts["rollouts"] == len(records) == 4
    assert facts["tokens"] == sum(len(record["ids"]) for record in records) == 4 * facts["length"]
    assert {record["group"] for record in records} == {0, 1} and {record["reward"] for record in records} <= {0.0, 1.0}
    run = score(ScoreConfig(rollouts=tmp_path / "r.jsonl", model="demo", root=tmp_path / "runs"))
    assert RunStore(run).steps_df()["n_tokens"].sum() == facts["tokens"]


@pytest.mark.slow
@pytest.mark.heavy
def test_audits_run_and_are_compared():
    exact, sketched = run_bench(AuditBenchConfig(models=("demo",), gram=("exact", "sketch"), quick=True)).rows
    assert (exact["method"], sketched["method"]) == ("exact", "sketched") and exact["gap"] is None
    assert exact["steps"] == 1 and exact["wall"] > 0 and exact["processor"] > 0 and exact["peak"] > 0.1
    assert exact["forecast"] is not None
