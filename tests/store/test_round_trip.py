"""What is written is what is read: values, dtypes, and the difference between null, NaN and 0."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from otb_analysis.errors import InputError
from otb_analysis.schema import TABLES
from otb_analysis.store import RunStore, StepTables


def test_tokens_come_back_as_written_in_step_order(writer, tables):
    for step in (1, 0, 2):
        writer.write_step(step, tables(step))
    frame = RunStore(writer.path).tokens_df()
    assert frame["step"].tolist() == [0] * 10 + [1] * 10 + [2] * 10
    for step in range(3):
        written, read = tables(step).tokens, frame[frame["step"] == step]
        assert read["token_id"].tolist() == written["token_id"].tolist()
        np.testing.assert_array_equal(read["logprob"], written["logprob"].astype(np.float32))


def test_frame_has_every_schema_column_in_order_with_its_dtype(writer, tables):
    writer.write_step(0, tables(0))
    frame = RunStore(writer.path).tokens_df()
    assert list(frame.columns) == [c.name for c in TABLES["tokens"]]
    assert frame["t"].dtype == np.int64
    assert frame["token_id"].dtype == np.int32
    assert frame["logprob"].dtype == np.float32
    assert frame["mask"].dtype == np.bool_


def test_unmeasured_reads_as_missing_never_as_zero(writer, tables):
    writer.write_step(0, tables(0))
    store = RunStore(writer.path)
    frame = store.tokens_df()
    assert frame["grad_norm_sq"].isna().tolist() == (frame["group"] == 1).tolist()
    assert frame["value"].isna().all()
    assert store.steps_df()["critic_loss"].isna().all()
    assert store.sql("SELECT count(grad_norm_sq) AS n FROM tokens")["n"].tolist() == [4]


def test_measured_nan_stays_nan_and_is_not_null(writer):
    writer.write_step(0, StepTables(steps={"loss": float("nan"), "grad_norm": None}))
    answer = RunStore(writer.path).sql("SELECT isnan(loss) AS nan, grad_norm IS NULL AS absent FROM steps")
    assert answer.to_dict("list") == {"nan": [True], "absent": [True]}


@pytest.mark.parametrize(
    "values",
    [
        [1.0, None, float("nan")],
        np.array([1.0, None, float("nan")], dtype=object),
        np.ma.array([1.0, 7.0, np.nan], mask=[False, True, False]),
        pd.array([1.0, None, None], dtype="Float64"),
    ],
    ids=["list", "object", "masked", "nullable"],
)
def test_every_way_to_say_null_is_null(writer, values):
    writer.write_step(0, StepTables(gradients=_gradients(variance=values)))
    nulls = RunStore(writer.path).sql("SELECT variance IS NULL AS absent FROM gradients")["absent"].tolist()
    assert nulls[:2] == [False, True]
    if not isinstance(values, pd.api.extensions.ExtensionArray):
        assert nulls[2] is False


def test_data_frame_is_taken_like_a_dict_and_keeps_its_nan(writer):
    frame = pd.DataFrame(_gradients(variance=[1.0, 2.0, np.nan], reference=["rloo", None, "rloo"]))
    writer.write_step(0, StepTables(gradients=frame))
    answer = RunStore(writer.path).sql("SELECT isnan(variance) AS nan, reference FROM gradients")
    assert answer["nan"].tolist() == [False, False, True]
    assert answer["reference"].isna().tolist() == [False, True, False]


def test_added_column_is_kept_and_null_in_steps_without_it(writer):
    writer.write_step(0, StepTables(steps={"loss": 1.0}))
    writer.write_step(1, StepTables(steps={"loss": 2.0, "reward_format": 0.25}))
    read = RunStore(writer.path).steps_df(columns=["step", "reward_format"])
    assert read["reward_format"].isna().tolist() == [True, False]
    assert read["reward_format"].tolist()[1] == 0.25


def test_floats_are_byte_stream_split_and_what_lasts_is_packed_tightly(writer, tables):
    writer.write_step(0, tables(0))
    for path, compression in (("tokens/part-00000000-r0.parquet", "SNAPPY"), ("tokens.parquet", "ZSTD")):
        group = pq.ParquetFile(writer.path / path).metadata.row_group(0)
        chunks = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
        assert "BYTE_STREAM_SPLIT" in chunks["logprob"].encodings
        assert "RLE_DICTIONARY" not in chunks["logprob"].encodings
        assert {chunk.compression for chunk in chunks.values()} == {compression}
        writer.finish()


def test_empty_run_gives_empty_frames_with_all_columns(writer):
    store = RunStore(writer.path)
    for table, schema in TABLES.items():
        frame = store.sql(f"SELECT * FROM {table}")
        assert frame.empty
        assert list(frame.columns) == [c.name for c in schema]
    assert store.tokens_df()["grad_norm_sq"].dtype == np.float32
    assert store.sql("SELECT count(*) AS n FROM tokens")["n"].tolist() == [0]


def test_missing_key_column_is_refused_before_anything_is_written(writer):
    with pytest.raises(InputError, match=r"step 0 has no key column 'rollout'"):
        writer.write_step(0, StepTables(rollouts={"group": [0, 1]}))
    assert RunStore(writer.path).complete_steps() == []


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"estimator": ["otb", None], "energy_source": ["proxy"] * 2}, "key column 'estimator' of gradients has nulls"),
        ({"estimator": ["otb"], "energy_source": ["proxy"] * 2}, "'estimator' of gradients has 1 rows but"),
        (
            {"estimator": ["otb"], "energy_source": ["proxy"], "n_prompts": [2.5]},
            "column 'n_prompts' of gradients cannot be stored as BIGINT",
        ),
        ({"estimator": [["otb"]], "energy_source": ["proxy"]}, "column 'estimator' of gradients cannot be stored as"),
        ({"step": [4], "estimator": ["otb"], "energy_source": ["proxy"]}, "holds 4 but step 0 is being written"),
    ],
)
def test_columns_that_do_not_fit_are_named(writer, columns, sentence):
    with pytest.raises(InputError, match=sentence):
        writer.write_step(0, StepTables(gradients=columns))


def _gradients(**columns):
    return {"estimator": ["none", "otb", "rloo"], "energy_source": ["none", "proxy", "none"]} | columns


def test_tables_that_were_encoded_are_encoded_again_without_a_python_object_a_value(tables, monkeypatch):
    once, array = tables(3).encoded(3), pa.array

    def fast(values, *args, **options):
        assert not isinstance(values, pa.ChunkedArray)  # pyarrow takes it apart, value by value
        return array(values, *args, **options)

    monkeypatch.setattr(pa, "array", fast)
    assert StepTables.decoded(once).encoded(3) == once
