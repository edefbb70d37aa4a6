"""The page of enumerated figures says what the enumeration says."""

from pathlib import Path

import numpy as np
import pytest

from otb_analysis.enumeration import report as page
from otb_analysis.enumeration.figures import gap_figures, shift_figures
from otb_analysis.enumeration.groups import dispersion_ratio, group_moments
from otb_analysis.enumeration.tables import number, spread, table

PAGE = Path(__file__).parents[2] / "docs" / "enumeration.md"


@pytest.mark.slow
def test_enumeration_page_is_not_stale():
    assert PAGE.read_text(encoding="utf-8") == page.report(), "run python -m otb_analysis.enumeration.report"


def shifts():
    return {setting: {label: f.shift for label, f in rows.items()} for setting, rows in shift_figures().items()}


@pytest.mark.parametrize(("figures", "heading"), [(shifts, "Importance ratios"), (gap_figures, "How much")])
def test_published_medians_are_those_of_the_code(figures, heading):
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}")[1].split("\n## ")[0]
    settings = figures()
    for row in next(iter(settings.values())):
        cells = [spread(settings[setting][row]) for setting in settings]
        assert f"| {row} | {' | '.join(cells)} |" in section


def test_every_quoted_figure_stands_beside_one_of_ours():
    text = PAGE.read_text(encoding="utf-8")
    quoted = (
        page.GAPS_QUOTED
        | page.GROUPS_QUOTED
        | {label: case.quoted for label, case in page.CASES.items() if case.quoted}
    )
    rows = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in text.splitlines() if line[:1] == "|"}
    assert {name: rows[name] for name in quoted} == quoted


def test_rollouts_that_do_not_look_at_each_other_disperse_as_the_group_does(tree):
    assert abs(dispersion_ratio("none", tree, 2) - 1) < 1e-12
    assert abs(dispersion_ratio("position_optimal", tree, 2) - 1) < 1e-12


def test_dispersion_inside_rloo_groups_is_that_of_their_correlation(draw):
    # E within = Var(ĝ) − Cov and N·V = Var(ĝ) + (N−1)·Cov with Cov = ‖∇J‖²/(N−1)²
    tree, n = draw(2, horizon=2, shared=5), 3
    total = n * group_moments("rloo", tree, n).variance
    covariance = tree.gradient @ tree.gradient / (n - 1) ** 2
    assert abs(dispersion_ratio("rloo", tree, n) - (total - n * covariance) / total) < 1e-12


def test_cells_show_median_and_quartiles():
    assert spread(np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == "3.000 [2.000, 4.000]"
    assert spread(np.full(3, 1e-14)) == "0"
    assert (number(0.5), number(-1e-12)) == ("0.500", "0")
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_page_is_written_where_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "report", lambda: "page")
    page.main(tmp_path / "docs" / "enumeration.md")
    assert (tmp_path / "docs" / "enumeration.md").read_text() == "page"
