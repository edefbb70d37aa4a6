"""A comparison for a paper: tables that say what may be claimed, and figures at the widths of a column and a page."""

import io
import shutil
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from otb_analysis.answers.measured import MeasuredSteps
from otb_analysis.errors import InputError
from otb_analysis.report.document import Document, Picture, Section
from otb_analysis.report.paper import COLUMNS, comparison_text, write_figures
from otb_analysis.statistics import REFERENCE
from otb_analysis.types import Gram, Proved

OTB = ("otb", "proxy")
KNOWN = Proved({REFERENCE: 1.0, ("none", "none"): 1.0}, frozenset((REFERENCE, ("none", "none"))))


@pytest.fixture
def steps():
    """Three estimators on 40 prompts: none is quieter than rloo, otb shorter."""
    noise = np.random.default_rng(0).normal(size=(40, 8))
    g = np.stack([2 * np.eye(8)[0] + noise, 2 * np.eye(8)[0] + 0.7 * noise, 1.5 * np.eye(8)[0] + 0.6 * noise])
    gram = Gram(np.einsum("mpd,nqd->mnpq", g, g), (REFERENCE, ("none", "none"), OTB), 160)
    return {"sums, groups of 4": MeasuredSteps("sums, groups of 4", (gram,), KNOWN, (REFERENCE,), {}, "")}


def test_csv_has_every_number_and_what_may_be_claimed(steps):
    table = pd.read_csv(io.StringIO(comparison_text(steps, "csv"))).set_index("estimator")
    (expected,) = (one.to_dataframe().set_index("estimator") for one in steps.values())
    assert table.loc["none", "told"] == "better" and table.loc["none", "together_high"] < 1
    assert table.loc["none", "sf_ratio"] == pytest.approx(expected.loc["none", "sf_ratio"])
    assert set(table["design"]) == {"sums, groups of 4"} and table["alarm"].isna().all()


def test_latex_is_a_table_that_compiles_as_ascii_with_the_sentences_in_comments(steps):
    text = comparison_text(steps, "latex")
    rows = [line for line in text.splitlines() if not line.startswith("%")]
    assert rows[0].startswith(r"\begin{tabular}") and rows[-1] == r"\end{tabular}"
    assert all(row.isascii() for row in rows) and "Train with no baseline" in text.splitlines()[1]
    assert {row.count("&") for row in rows if row.endswith(r"\\")} == {rows[2].count("&")}


def test_markdown_has_the_sentences_above_the_table(steps):
    lines = comparison_text(steps, "markdown").splitlines()
    assert lines[0].startswith("> Train with") and any(line.startswith("| none |") for line in lines)


def test_without_rloo_there_is_no_table_but_a_sentence(steps):
    ((name, one),) = steps.items()
    gram = one.grams[0]
    only = Gram(gram.inner[2:, 2:], (OTB,), 160)
    with pytest.raises(InputError, match="rloo"):
        comparison_text({name: MeasuredSteps(name, (only,), Proved(), (OTB,), {}, "")}, "csv")


@pytest.mark.browser
def test_figures_have_the_widths_of_a_column_and_a_page(tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("needs Chromium")
    figure = go.Figure(go.Scatter(y=[1, 2]), layout={"height": 300})
    document = Document("d", "c", "n", (Section("s", (Picture("curve", "", figure),)),))
    files = write_figures(document, tmp_path / "figures")
    assert {path.name for path in files} == {f"curve-{of}.{end}" for of in COLUMNS for end in ("pdf", "svg")}
    for of, inches in COLUMNS.items():
        width = float(ElementTree.parse(tmp_path / "figures" / f"curve-{of}.svg").getroot().get("width"))
        assert width == pytest.approx(inches * 96, abs=1)
        assert (tmp_path / "figures" / f"curve-{of}.pdf").read_bytes().startswith(b"%PDF")
