"""The pages on formats say what the readers do, and what the commands print."""

import re
import runpy
from pathlib import Path

import pytest

from otb_analysis.commands.cli import main
from otb_analysis.recorded.formats import FORMATS
from studies.lib.fields import EXAMPLES, page
from studies.lib.fields import main as write

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_fields_is_that_of_the_readers(tmp_path):
    assert (DOCS / "fields.md").read_text("utf-8") == page()
    write(tmp_path / "fields.md")
    assert (tmp_path / "fields.md").read_text("utf-8") == page()


def test_every_format_has_an_example_and_says_what_is_paid():
    assert set(EXAMPLES) == set(FORMATS) - {"miles_columns"}  # which is refused
    sections = page().split("\n## ")[1:]
    assert [part for part in sections if not re.search(r"\| yes \| reward", part)] == []


@pytest.mark.parametrize("folder", ["completions", "traces.jsonl"])
def test_what_ten_seconds_quotes_is_printed(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(DOCS / "examples" / "ten_seconds" / "write_folders.py"))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["audit", folder]) == 0
    said = " ".join(capsys.readouterr().out.split())
    text = (DOCS / "ten_seconds.md").read_text("utf-8").split(f"otb audit {folder}\n")[1]
    quoted = re.search(r"```text\n(.*?)```", text, re.S)
    assert quoted and [line for line in quoted[1].splitlines() if line not in said] == []
