"""Sufficient statistics by run, bin of steps and prompt: those of a loop over the rows."""

import numpy as np
import pandas as pd
import pytest

from otb_analysis.commands.cli import main
from otb_analysis.store import RunStore
from otb_analysis.store.runs import aggregate, partitions


def test_rows_are_those_of_a_loop_over_the_tokens(runs):
    table = aggregate(partitions(runs, 2))
    assert table.columns.tolist() == [
        "run", "first_step", "last_step", "prompt", "tokens", "rollouts", "column", "n", "mean", "variance",
    ]  # fmt: skip
    tokens = RunStore(runs[0]).tokens_df(where="mask")
    assert set(table["column"]) == {"logprob", "energy_proxy", "grad_norm_sq", "reward"}
    rows = table[(table["run"] == "run-0") & (table["first_step"] == 2) & (table["prompt"] == "b")]
    some = tokens[(tokens["step"].isin([2, 3])) & (tokens["group"] == 0)]
    assert set(rows["tokens"]) == {len(some)} == {8} and set(rows["rollouts"]) == {4} and set(rows["last_step"]) == {3}
    for _, row in rows.iterrows():
        values = some[row["column"]].dropna().astype(float)
        assert row["n"] == len(values)
        np.testing.assert_allclose([row["mean"], row["variance"]], [values.mean(), values.var()], rtol=1e-9)
    unnamed = table.loc[table["run"] == "run-1", "prompt"]
    assert set(unnamed) == {f"{step}/{group}" for step in range(5) for group in range(2)}


def test_command_writes_csv_and_parquet(runs, tmp_path, capsys):
    words = ["aggregate", "--root", str(runs[0].parent), "--bin", "5", "--out"]
    for out in (tmp_path / "a.csv", tmp_path / "a.parquet"):
        assert main([*words, str(out)]) == 0
    assert f"{tmp_path / 'a.csv'} has 48 rows of 2 runs." in capsys.readouterr().out
    read = pd.read_csv(tmp_path / "a.csv"), pd.read_parquet(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(*read, check_dtype=False)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--bin", "0"], "--bin is 0; pass at least 1."),
        (["--out", "a.xlsx"], "--out is a.xlsx; pass a file that ends in .parquet or .csv."),
        (["--out", "nowhere/a.csv"], "cannot write nowhere/a.csv (No such file or directory); pass another --out."),
        (["no-run"], "there is no run 'no-run'"),
    ],
)
def test_bad_input_is_one_sentence(runs, words, sentence, capsys):
    assert main(["aggregate", *words, "--root", str(runs[0].parent)]) == 2
    assert sentence in capsys.readouterr().err
