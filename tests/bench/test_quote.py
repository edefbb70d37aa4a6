"""Quoted rows follow the result files; everything else in a document stays."""

from otb_analysis.bench.quote import quoted

TABLE = "# `otb bench engine`\n\n| model | T | what | seconds |\n|---|---|---|---|\n| S | 32 | generic | 0.200 |\n"


def test_a_quoted_row_takes_the_numbers_of_the_file(tmp_path):
    (tmp_path / "engine.md").write_text(TABLE)
    document = "Before\n\n| model | T | what | seconds |\n|---|---|---|---|\n| S | 32 | generic | 0.100 |\n\nAfter"
    assert quoted(document, tmp_path) == document.replace("0.100", "0.200")


def test_rows_that_no_file_holds_stay(tmp_path):
    document = "| S | 64 | generic | 0.100 |\n| a | b |\n"
    assert quoted(document, tmp_path) == document
    (tmp_path / "engine.md").write_text(TABLE)
    assert quoted(document, tmp_path) == document
