import pandas as pd
import pytest

from benchmarks.config import StoreConfig
from benchmarks.publish import run_bench
from benchmarks.store import VARIANCE, variance_in_pandas
from benchmarks.synthetic_run import Shape, synthetic_labels, write_synthetic_run
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore, runs_df

SHAPE = Shape(steps=6, measured=3, tokens=1_200, prompts=4, group_size=2, estimators=5)


def test_synthetic_run_has_its_shape_and_both_variances_agree(tmp_path):
    path = write_synthetic_run(tmp_path, "a", SHAPE).path
    store = RunStore(path)
    assert len(store.tokens_df()) == pytest.approx(1_200, rel=0.05)
    assert list(store.grams()) == [0, 2, 5] and len(store.gradients_df()) == 15
    assert set(store.sql("SELECT DISTINCT step FROM tokens WHERE grad_norm_sq IS NOT NULL")["step"]) == {0, 2, 5}
    pd.testing.assert_frame_equal(store.sql(VARIANCE), variance_in_pandas(path), check_dtype=False)
    assert len(set(synthetic_labels(38))) == 38 and synthetic_labels(38)[0] == ("rloo", "none")


def test_bench_times_every_page_of_all_runs_and_keeps_them_where_it_is_told(tmp_path):
    config = StoreConfig(
        runs=2, steps=4, measured=2, tokens=400, prompts=2, group_size=2, estimators=3, append=500, repeats=1,
        root=tmp_path,
    )  # fmt: skip
    report = run_bench(config)
    assert [row["what"] for row in report.rows][:3] == [
        "append a step of 500 tokens", "variance by step and position, DuckDB", "variance by step and position, pandas",
    ]  # fmt: skip
    assert len(report.cells) == 10 and all(row["seconds"] > 0 for row in report.rows)
    assert runs_df(tmp_path)["run"].tolist() == ["synthetic-0", "synthetic-1"]
    with pytest.raises(InputError, match="already exists"):
        run_bench(config)
