"""The catalogue page says what the code and the enumeration say."""

import ast
import re
from pathlib import Path

import pytest

from otb_analysis.enumeration.catalogue import catalogue, entries, main
from otb_analysis.estimators import ESTIMATORS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "catalogue.md"


@pytest.mark.slow
def test_catalogue_page_is_not_stale():
    assert PAGE.read_text(encoding="utf-8") == catalogue(), "run python -m otb_analysis.enumeration.catalogue"


def test_catalogue_entries_are_not_stale():
    assert PAGE.read_text(encoding="utf-8").startswith(entries()), "run python -m otb_analysis.enumeration.catalogue"


def test_catalogue_names_every_estimator_with_its_formula_and_conditions():
    text = entries()
    for name, entry in ESTIMATORS.items():
        section = text.split(f"## `{name}`\n")[1].split("\n## ")[0]
        for part in (entry.formula, entry.conditions, entry.source, f"[{entry.standing}]", entry.shown_by):
            assert part in section


def test_tests_named_by_the_metadata_exist():
    for name in {entry.shown_by for entry in ESTIMATORS.values()}:
        path, function = name.split("::")
        tree = ast.parse((ROOT / path).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_published_bias_agrees_with_the_metadata():
    table = PAGE.read_text(encoding="utf-8").split("## Bias and noise")[1].split("\n## ")[0]
    published = dict(re.findall(r"\| `(\w+)` \| ([\d.]+)", table))
    assert {name: bias == "0" for name, bias in published.items()} == {n: e.unbiased for n, e in ESTIMATORS.items()}


def test_page_is_written_where_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("otb_analysis.enumeration.catalogue.catalogue", lambda: "page")
    main(tmp_path / "docs" / "catalogue.md")
    assert (tmp_path / "docs" / "catalogue.md").read_text() == "page"
