"""The catalogue page says what the code and the enumeration say."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.estimators import ESTIMATORS
from otb_analysis.objectives.aggregation import AGGREGATIONS, TOKEN_WEIGHTS
from otb_analysis.objectives.ratios import RATIOS
from otb_analysis.objectives.shaping import SHAPINGS
from studies.lib.enumeration.catalogue import (
    ALONE,
    bias_table,
    catalogue,
    main,
    number,
    shift_table,
    spread,
    table,
    weight_table,
)
from studies.lib.enumeration.facts import GROUP, GROUP_SIZE
from studies.lib.enumeration.groups import group_gradients, multisets
from studies.lib.enumeration.off_policy import CASES
from studies.lib.enumeration.trees import random_tree

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "catalogue.md"


def published_tables():
    """The three enumerated tables of the page."""
    return [found.strip() for found in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(encoding="utf-8"), re.M)]


@pytest.mark.slow
def test_published_bias_is_that_of_the_code():
    assert published_tables()[0] == bias_table(), "run python -m studies.lib.enumeration.catalogue"


@pytest.mark.parametrize(("name", "other"), ALONE.items())
def test_what_stands_for_an_estimator_is_that_estimator_in_a_batch_of_one_prompt(name, other):
    tree = random_tree(GROUP, np.random.default_rng(0))
    members = multisets(tree, GROUP_SIZE)[0][::30]
    gradients = [group_gradients(one, tree, members) for one in (name, other)]
    assert gradients[1].any()
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-12)


def test_published_shifts_are_those_of_the_code():
    assert published_tables()[1] == shift_table(), "run python -m studies.lib.enumeration.catalogue"


@pytest.mark.slow
def test_published_token_weights_are_those_of_the_code():
    assert published_tables()[2] == weight_table(), "run python -m studies.lib.enumeration.catalogue"


def test_text_and_entries_of_the_page_are_not_stale():
    page = catalogue(*published_tables())
    assert PAGE.read_text(encoding="utf-8") == page, "run python -m studies.lib.enumeration.catalogue"


@pytest.mark.parametrize("registry", [RATIOS, AGGREGATIONS, TOKEN_WEIGHTS, SHAPINGS])
def test_every_formula_is_summed_up_and_its_options_have_defaults(registry):
    for name, row in registry.items():
        assert row.function.__name__ == name
        assert row.summary.endswith(".") and row.formula and row.source
        row.options()


def test_published_shifts_agree_with_the_metadata_and_cover_every_ratio():
    section = PAGE.read_text(encoding="utf-8").split("### How far a baseline moves the mean")[1].split("\n## ")[0]
    published = dict(re.findall(r"^\| (`.*?) \| ([\d.]+)", section, re.M))
    assert {label: shift == "0" for label, shift in published.items()} == {c: CASES[c].keeps_mean for c in CASES}
    assert {case.name for case in CASES.values()} == set(RATIOS)


def test_cells_show_median_and_quartiles():
    assert spread(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == "3.000 [2.000, 4.000]"
    assert spread(np.full(3, 1e-14)) == "0"
    assert (number(0.5), number(-1e-12)) == ("0.500", "0")
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_catalogue_names_every_estimator_with_its_formula_and_conditions():
    text = PAGE.read_text(encoding="utf-8")
    for name, entry in ESTIMATORS.items():
        section = text.split(f"## `{name}`\n")[1].split("\n## ")[0]
        for part in (entry.formula, entry.conditions, entry.source, f"[{entry.provenance}]", entry.shown_by):
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
    for name in ("bias_table", "shift_table", "weight_table"):
        monkeypatch.setattr(f"studies.lib.enumeration.catalogue.{name}", lambda: "| table |")
    main(tmp_path / "docs" / "catalogue.md")
    assert (tmp_path / "docs" / "catalogue.md").read_text().count("| table |") == 3
