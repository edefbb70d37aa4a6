"""Rows of files: streamed, counted where a file was cut off, refused by number where they are broken."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from otb_analysis.errors import InputError
from otb_analysis.recorded.records import CUT, Tally, number_in, rows_of

ROWS = [{"a": i, "text": "x" * i} for i in range(200)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def read(path):
    tally = Tally()
    return [row for _, row in rows_of(path, tally)], tally


def test_all_ways_of_writing_rows_give_the_same_rows(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(LINES)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=30)
    torch.save({"rollout_id": 3, "samples": ROWS}, tmp_path / "a.pt")
    for path in sorted(tmp_path.iterdir()):
        rows, tally = read(path)
        assert [{key: row[key] for key in ("a", "text")} for row in rows] == ROWS, path.name
        assert not tally


def test_a_file_that_ends_within_a_record_keeps_all_before_it_and_counts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES[:-4])
    rows, tally = read(tmp_path / "a.jsonl")
    assert rows == ROWS[:-1]
    assert tally == {CUT: 1}


@pytest.mark.parametrize("ending", ["gz", "zst"])
def test_a_compressed_file_that_ends_early_keeps_the_lines_before(tmp_path, ending):
    whole = tmp_path / f"whole.jsonl.{ending}"
    with pa.CompressedOutputStream(str(whole), {"gz": "gzip", "zst": "zstd"}[ending]) as file:
        # Texts that do not compress, so that more than one block is left.
        noise = torch.randint(0, 10, (200, 2000), generator=torch.Generator().manual_seed(0)).tolist()
        file.write("".join(f"{json.dumps({'a': row})}\n" for row in noise).encode())
    (tmp_path / f"cut.jsonl.{ending}").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    rows, tally = read(tmp_path / f"cut.jsonl.{ending}")
    assert [row["a"] for row in rows] == noise[: len(rows)]
    assert tally == {CUT: 1}


def test_a_broken_line_in_the_middle_is_refused_by_its_number(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, record 2 is no JSON"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"[1]\n")
    with pytest.raises(InputError, match=r"record 1 is a int"):
        read(tmp_path / "b.jsonl")


def test_a_parquet_file_that_was_cut_off_is_refused_with_the_reason(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "whole.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-50])
    with pytest.raises(InputError, match=r"cut\.parquet cannot be read"):
        read(tmp_path / "cut.parquet")


class Harmful:
    def __reduce__(self):
        return print, ("code ran",)


def test_a_pickle_with_code_in_it_is_refused_and_nothing_runs(tmp_path, capsys):
    torch.save({"samples": [Harmful()]}, tmp_path / "a.pt")
    with pytest.raises(InputError, match="could run any code"):
        read(tmp_path / "a.pt")
    assert capsys.readouterr().out == ""


def test_columns_of_a_pytorch_file_become_rows(tmp_path):
    columns = {"tokens": [torch.tensor([1, 2]), torch.tensor([3])], "rewards": [0.5, 1.0], "other": 7}
    torch.save({"rollout_id": 4, "rank": 0, "rollout_data": columns}, tmp_path / "a.pt")
    rows, _ = read(tmp_path / "a.pt")
    assert [(row["tokens"].tolist(), row["rewards"], row["file_step"]) for row in rows] == [
        ([1, 2], 0.5, 4),
        ([3], 1.0, 4),
    ]


def test_files_that_cannot_be_read_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("a\n")
    for name in ("a.csv", "none.jsonl"):
        with pytest.raises(InputError, match=r"no file that can be read"):
            read(tmp_path / name)


def test_the_last_number_of_a_name_is_its_step(tmp_path):
    assert number_in(tmp_path / "train_data_step12.jsonl") == 12
    assert number_in(tmp_path / "0007.parquet") == 7
    assert number_in(tmp_path / "rollouts.jsonl.zst") is None


TEXTS = (
    "2e400", "18446744073709551616", "-9223372036854775809", "[0.1, 123456789012345678901]", '"\\ud800"', "-0.0",
    "0.00012345678901234567", "18446744073709551615", '"12345678901234567890"', "[1.5e-7, 0.1234567890123456789]",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_json_means_what_the_standard_library_reads(text, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(f'{{"a": {text}}}\n{{"a": [NaN, {text}]}}\n')
    rows = [row for _, row in rows_of(path, Tally())]
    assert repr(rows) == repr([json.loads(line) for line in path.read_text().splitlines()])
