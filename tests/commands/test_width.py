"""Every line that a command prints of a run fits 80 columns when COLUMNS says so."""

import re
import shutil
from contextlib import suppress

import pytest

from otb_analysis.commands.cli import main
from otb_analysis.commands.recorded import tell


@pytest.fixture
def root(otb_run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("first", "second"):
        shutil.copytree(otb_run, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "first", "second"],
        ["compare", "first", "--top", "0"],
        ["audit", "--run", "first"],
        ["diagnose", "first"],
        ["query", "first"],
        ["query", "first", "SELECT * FROM tokens LIMIT 4"],
        ["query", "first", "SELECT * FROM steps"],
        ["tokens", "first", "--rollout", "0", "--t", "0"],
    ],
    ids=" ".join,
)
def test_no_line_is_wider_than_80_and_none_ends_in_an_ellipsis(words, root, capsys):
    assert main([*words, "--root", str(root)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and not re.search(r"\d…", shown)


def test_last_table_of_a_training_fits_too(root, capsys):
    tell(root / "first")
    *table, look = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 80 and "is complete; look at it with: otb compare first" in look
    assert {"run", "steps", "clipped", "measure"} <= set(" ".join(table).split())


@pytest.mark.parametrize(
    "words", [["--help"], ["train", "--help"], ["audit", "--help"], ["demo", "--help"]], ids=" ".join
)
def test_no_line_of_a_help_is_wider_than_80(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with suppress(SystemExit):
        main(words)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
