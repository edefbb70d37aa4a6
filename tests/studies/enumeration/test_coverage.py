import re
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.statistics import moments as measures
from studies.lib.enumeration.coverage import (
    BY_SCALE,
    LAWS,
    LONG,
    NOMINAL_FLOOR,
    PROMPTS,
    QUANTITIES,
    ROWS,
    SCALED,
    WEAK,
    coverage_page,
    measure,
    row_text,
)

TABLE = Path(__file__).parents[3] / "docs" / "coverage.md"


def lines():
    """Lines of each table of docs/coverage.md below its head, as they are: the first, then one per `BY_SCALE`."""
    tables = [part for part in TABLE.read_text().split("\n\n") if part.startswith("|")]
    return [part.splitlines()[2:] for part in tables]


def published(table=0):
    """Coverage in percent by row, bold or not."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines()[table]]


def percent(cell):
    found = re.search(r"[\d.]+", cell)
    assert found is not None
    return float(found[0])


@pytest.mark.parametrize("name", LAWS)
def test_exact_moments_of_a_law_are_those_of_its_draws(name):
    law, rng = LAWS[name](), np.random.default_rng(0)
    g = law.draw(rng, 40_000)
    power = (g**2).sum(axis=2)
    stderr = power.std(axis=1) / np.sqrt(40_000)
    # Four standard errors, but the heaviest tails have none that could be trusted.
    loose = 0.1 * law.moments.power if name in ("student", "extreme") else 0
    assert (np.abs(power.mean(axis=1) - law.moments.power) < 4 * stderr + loose).all()
    mean = g.mean(axis=1)
    spread = np.sqrt(law.moments.power.max() / 40_000)
    assert np.abs(mean @ mean[0] - law.moments.along).max() < 8 * spread * np.linalg.norm(mean[0]) + spread**2


def test_coverage_is_nominal_for_normal_noise():
    found = measure(LAWS["normal"](), 1, 24, repetitions=200)
    for name in QUANTITIES:
        assert found[name].covered > 0.95 - 4 * np.sqrt(0.95 * 0.05 / 200)


def test_the_enumerated_estimator_is_biased_and_its_reference_is_not():
    law = LAWS["noisy"]()
    assert measures.relative_bias(law.moments)[0] == 0
    assert measures.projection(law.moments)[1] < 0.9
    assert law.noise_scale[0] == pytest.approx(15, abs=0.5)


def test_long_answers_have_the_gradient_of_their_process():
    law, rng = LAWS["long"](), np.random.default_rng(0)
    gradient = LONG.gradient.reshape(LONG.horizon, -1).sum(axis=0)  # exact, by dynamic programming
    rloo = law.draw(rng, 40_000)[0]
    stderr = np.sqrt(law.moments.power[0] / 4000)  # of the 4,000 drawn groups
    assert np.linalg.norm(rloo.mean(axis=0) - gradient) < 3 * stderr < np.linalg.norm(gradient)
    assert LONG.horizon == 512 and LONG.success == pytest.approx(0.5, abs=0.01)
    assert measures.projection(law.moments)[1] < 0.8


def falls_short(cell):
    return cell != "none" and percent(cell) < 100 * NOMINAL_FLOOR


def test_the_published_tables_are_complete_and_bold_where_they_fall_short():
    rows = published()
    assert len(rows) == len(ROWS)
    for row, (_, steps, prompts) in zip(rows, ROWS, strict=True):
        assert row[1] == (f"{prompts}" if steps == 1 else f"{steps} × {prompts}")
    for table in range(1, 1 + len(BY_SCALE)):
        named = [(row[0], row[1]) for row in published(table)]
        assert named == [(WEAK[name].name, f"{scale:,}") for name, scale in SCALED]
    for cell in (cell for table in range(1 + len(BY_SCALE)) for row in published(table) for cell in row[2:]):
        assert cell.startswith("**") == falls_short(cell)


def test_the_words_around_the_published_tables_are_those_of_the_template():
    first, *others = lines()
    assert TABLE.read_text() == coverage_page(first, others)


def test_an_efficiency_that_is_shown_and_a_noise_scale_cover_in_every_law():
    names = dict(zip(QUANTITIES, range(2, 2 + len(QUANTITIES)), strict=True))
    cells = [row[names[name]] for row in published() for name in ("efficiency", "noise scale")]
    cells += [cell for table in (1, 2) for row in published(table) for cell in row[2:]]
    assert not [cell for cell in cells if falls_short(cell)]


@pytest.mark.parametrize("name", WEAK)
def test_a_weaker_signal_has_the_noise_scale_it_is_made_with(name):
    for scale in (50, 1000):
        assert WEAK[name].law(scale).noise_scale[0] == pytest.approx(scale)
    assert len(PROMPTS) * 2 + 2 == len(published(1)[0])


def test_nine_in_ten_published_cells_from_24_prompts_up_reach_the_floor():
    enough = [row for row, (_, steps, prompts) in zip(published(), ROWS, strict=True) if steps * prompts >= 24]
    cells = {cell: percent(cell) for row in enough for cell in row[2:]}
    assert np.mean([percent(cell) >= 100 * NOMINAL_FLOOR for row in enough for cell in row[2:]]) > 0.9
    # An interval that is given in few repetitions only is one of lucky draws, as the page says of 24 long answers
    rare = {cell for cell in cells if (given := re.search(r"\((\d+)\)", cell)) and int(given[1]) < 50}
    assert min(x for cell, x in cells.items() if cell not in rare) > 85
    assert {cell for cell in rare if cells[cell] <= 85} == {"**78.9** (32)"}


def test_intervals_hold_on_long_answers_from_64_prompts_on():
    rows = [row for row in published() if row[0].startswith("answers of 512 tokens")]
    assert [row[1] for row in rows] == ["24", "64", "192"]
    assert not [cell for row in rows[1:] for cell in row[2:] if falls_short(cell)]


@pytest.mark.slow
@pytest.mark.parametrize("index", [2, 8])
def test_published_rows_are_what_the_code_measures(index):
    again = [cell.strip() for cell in row_text(index).strip("|").split("|")]
    assert again[:2] == published()[index][:2]
    # Rounding in another BLAS may move single repetitions across an interval's end.
    assert [percent(c) for c in again[2:]] == pytest.approx([percent(c) for c in published()[index][2:]], abs=0.3)
