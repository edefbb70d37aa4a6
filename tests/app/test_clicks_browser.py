"""Figures in a browser: a click anywhere on a curve or a cell selects it, and a figure is saved as wide as chosen."""

import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.figures.timeline import LANE
from otb_analysis.store import RunWriter, StepTables
from tests.app.browsing import SECONDS, Watched, asked, choose, click_row, finished, served, visit, watched
from tests.app.token_runs import write_token_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.heavy]

STEPS, APART = 800, 3
SPOT = """([figure, x, axis, y]) => {
  const plot = document.querySelectorAll('.js-plotly-plot')[figure], layout = plot._fullLayout;
  plot.scrollIntoView({block: 'center'});
  const box = plot.getBoundingClientRect(), rows = layout[axis];
  return [box.left + layout.xaxis._offset + layout.xaxis.d2p(x),
          box.top + rows._offset + (y === null ? rows._length / 2 : rows.d2p(y)),
          layout.xaxis.d2p(1) - layout.xaxis.d2p(0)];
}"""


@pytest.fixture(scope="module")
def address(store_root, tmp_path_factory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("clicks")
    shutil.copytree(store_root / "chain-otb-s0", root / "chain")
    write_token_run(root, "words")
    random, writer = np.random.default_rng(0), RunWriter.create(root, "dense", {})
    for k in range(STEPS):  # every third step was recorded
        reward = 0.7 + 0.05 * random.normal() if k < 600 else 0.0
        row = {"reward_mean": reward, "grad_norm": random.lognormal(), "entropy_mean": 0.8 + 0.02 * random.normal()}
        writer.write_step(APART * k, StepTables(steps=row))
    writer.finish()
    with served(root) as url:
        yield url


@pytest.fixture
def tab(browser, address) -> Iterator[Watched]:
    with watched(browser, address) as opened:
        yield opened
        assert opened.clean


def spot(page, x, axis="yaxis", y=None, figure=0) -> tuple[float, float, float]:
    """Where a value of a figure is in the window, and how wide one unit of x is."""
    page.evaluate(SPOT, [figure, x, axis, y])
    page.wait_for_timeout(500)
    return page.evaluate(SPOT, [figure, x, axis, y])


def click(page, x: float, y: float, changes: str) -> str:
    """Click and wait until the address says something else; what it says."""
    before = asked(page, changes)
    page.mouse.move(x - 4, y)
    page.mouse.move(x, y)
    page.wait_for_timeout(300)
    page.mouse.click(x, y)
    known = "([name, old]) => new URL(location).searchParams.get(name) !== old"
    page.wait_for_function(known, arg=[changes, before], timeout=20 * SECONDS)
    finished(page)
    return asked(page, changes)


def test_a_run_is_ticked_and_pinned_by_a_click_in_the_table_and_back_undoes_it(tab, address):
    page = visit(tab, f"{address}/?run=chain&run=dense")
    table = page.locator("[data-testid=stDataFrame]").first

    def click_first_row(x: float) -> None:
        box = table.bounding_box()
        page.mouse.click(box["x"] + x, box["y"] + 52)

    def waits_for(search: str) -> None:
        page.wait_for_function(search, timeout=20 * SECONDS)
        finished(page)

    page.wait_for_timeout(1 * SECONDS)  # the table is drawn on a canvas
    click_first_row(20)
    waits_for("new URL(location).searchParams.getAll('run').length === 1")
    click_first_row(45)
    waits_for("new URL(location).searchParams.has('reference')")
    pinned, ticked = asked(page, "reference"), asked(page, "run")
    assert {pinned, ticked} == {"chain", "dense"}  # the first row is the one that is no longer ticked
    page.go_back()
    waits_for("!new URL(location).searchParams.has('reference')")
    page.go_back()
    waits_for("new URL(location).searchParams.getAll('run').length === 2")


def test_a_click_that_opens_a_page_is_one_entry_of_the_history_and_one_back_undoes_it(tab, address):
    page = visit(tab, f"{address}/?run=chain&run=words")

    def now(path: str) -> tuple[str, int]:
        page.wait_for_function(f"location.pathname === '{path}'", timeout=20 * SECONDS)
        finished(page)
        page.wait_for_selector("h1", timeout=20 * SECONDS)
        return page.url, page.evaluate("history.length")

    first, before = now("/")
    page.locator("[data-testid=stMain] button:has-text('Open ')").first.click()
    assert now("/run")[1] == before + 1
    page.go_back()
    assert now("/")[0] == first
    # Both pages have boxes of the run and the step, and neither stands at its first choice.
    page.goto(f"{address}/run?run=chain&run=words&focus=chain&step=20")
    page.wait_for_selector("[data-testid=stDataFrame]", timeout=60 * SECONDS)
    here, before = now("/run")
    click_row(page, page.locator("[data-testid=stDataFrame]").first, 1)
    there, after = now("/tokens")
    assert after == before + 1 and asked(page, "step") == "20" and asked(page, "token")
    page.go_back()
    assert now("/run") == (here, after)
    assert page.locator("text=Who holds the gradient of step 20").count() == 1
    page.go_forward()
    assert now("/tokens") == (there, after)


def _pick(option: str):
    return lambda page, label: choose(page, label, option)


def _type(page, label: str) -> None:
    page.locator(f"[data-testid=stTextInput]:has-text('{label}') input").first.fill("4")
    page.keyboard.press("Enter")


def _switch(page, label: str) -> None:
    page.locator(f"[data-testid=stCheckbox] label:has-text('{label}')").first.click()


def _press(page, label: str) -> None:
    page.locator(f"[data-testid=stButtonGroup] button:has-text('{label}')").first.click()


def _tick(page, label: str) -> None:
    page.locator(f"[data-testid=stMultiSelect]:has-text('{label}') input").first.click()
    page.locator("[role=option]").first.click()
    page.keyboard.press("Escape")


def _slide(page, label: str) -> None:
    page.locator(f"[data-testid=stSlider]:has-text('{label}') input[type=range]").first.press("ArrowRight")


def _click(page, selector: str) -> None:
    page.locator(selector).nth(2).click()


KINDS = {
    "sort": ("rollouts", "Order", _pick("longest first")), "rendered": ("rollouts", "Rendered", _switch),
    "text": ("rollouts", "Text", _type), "finish": ("rollouts", "Finish reason", _tick),
    "steps": ("rollouts", "Steps", _slide), "rollout": ("rollouts", ".list tbody", _click),
    "level": ("run", "prompts", _press), "log": ("run", "Log axes", _switch),
    "focus": ("run", "Run", _pick("chain")), "smooth": ("", "Running mean", _slide),
    "color": ("tokens", "Colour by", _pick("Entropy")), "token": ("tokens", ".tok", _click),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_box_is_one_entry_of_the_history_and_one_back_undoes_it(name, tab, address):
    path, label, act = KINDS[name]
    page = visit(tab, f"{address}/{path}?run=chain" + "&run=words" * (name == "focus"))
    finished(page)
    first, before = page.url, page.evaluate("history.length")
    act(page, label)
    page.wait_for_function("([name]) => new URL(location).searchParams.has(name)", arg=[name], timeout=20 * SECONDS)
    finished(page)
    assert page.evaluate("history.length") == before + 1
    page.go_back()
    page.wait_for_function("first => location.href === first", arg=first, timeout=20 * SECONDS)
    finished(page)
    page.wait_for_timeout(1 * SECONDS)
    assert page.url == first  # and nothing writes it anew


def test_ticking_another_run_does_not_choose_the_pinned_one(tab, address):
    page = visit(tab, f"{address}/?run=chain&run=words&reference=dense")
    page.wait_for_timeout(1 * SECONDS)  # the table is drawn on a canvas
    box = page.locator("[data-testid=stDataFrame]").first.bounding_box()
    page.mouse.click(box["x"] + 20, box["y"] + 52 + 35)  # the pinned run stands above it
    runs = "new URL(location).searchParams.getAll('run')"
    page.wait_for_function(f"String({runs}) !== 'chain,words'", timeout=20 * SECONDS)
    assert page.evaluate(runs) in (["chain"], ["words"])


def test_a_click_on_a_dense_curve_chooses_the_nearest_recorded_step(tab, address):
    page = visit(tab, f"{address}/run?run=dense&step=0")
    for at, axis in ((400, "yaxis2"), (1333, "yaxis3"), (2201, "yaxis4"), (1700.4, "yaxis2")):
        x, y, unit = spot(page, at, axis)
        step = int(click(page, round(x), y, "step"))
        assert step % APART == 0 and abs(step - at) <= APART / 2 + 1 / unit


def test_a_switch_of_a_figure_and_its_format_draw_the_figure_again_and_not_the_page(browser, store_root, tmp_path):
    shutil.copytree(store_root / "chain-otb-s0", tmp_path / "chain")
    with served(tmp_path) as url, watched(browser, url) as tab:
        page = visit(tab, f"{url}/run?run=chain")
        page.wait_for_selector("text=1 run in")
        shutil.copytree(store_root / "chain-otb-s0", tmp_path / "other")  # what a page that is drawn again would count
        page.locator("label:has-text('Log axes')").click()
        page.wait_for_function("document.body.innerText.includes('logarithmic')", timeout=20 * SECONDS)
        assert asked(page, "log") == "true"
        page.locator("button:has-text('Save')").last.click()
        page.locator("button:has-text('png')").click()
        options = "[...document.querySelectorAll('.js-plotly-plot')].at(-1)._context.toImageButtonOptions.format"
        page.wait_for_function(f"{options} === 'png'", timeout=20 * SECONDS)
        assert page.locator("text=1 run in").count() == 1
        page.keyboard.press("Escape")  # closes the popover
        page.locator("button:has-text('Reload runs')").first.click()
        page.wait_for_selector("text=2 runs in", timeout=20 * SECONDS)


def test_a_click_on_a_mark_chooses_its_step(tab, address):
    page = visit(tab, f"{address}/run?run=dense&step=0")
    marks = (
        "document.querySelector('.js-plotly-plot')._fullData.filter((t) => t.yaxis === 'y').flatMap((t) => [...t.x])"
    )
    for mark in sorted(page.evaluate(marks))[:2]:
        x, y, _ = spot(page, mark, "yaxis", LANE / 2)
        assert int(click(page, x + 1, y + 3, "step")) == mark


@pytest.mark.parametrize(("right", "down"), [(-0.4, 9), (0.4, -9), (0, 0)])
def test_a_click_anywhere_in_a_cell_of_the_rewards_lists_its_rollouts(right, down, tab, address):
    page = visit(tab, f"{address}/rollouts?run=chain")
    x, y, unit = spot(page, 20, "yaxis", 1)
    assert click(page, x + right * unit, y + down, "steps") == "20"
    assert "steps=20&steps=20" in page.url and "reward_range=1&reward_range=1" in page.url
    page.locator("button:has-text('All steps and rewards')").click()
    page.wait_for_function("!location.search.includes('steps')", timeout=20 * SECONDS)


def test_a_click_anywhere_in_a_cell_of_the_tokens_chooses_its_token(tab, address):
    page = visit(tab, f"{address}/tokens?run=words&step=0&prompt=0")
    x, y, unit = spot(page, 5, "yaxis", 2)
    assert click(page, x + 0.4 * unit, y + 8, "token") == "2.5"


def test_a_click_on_a_circle_opens_its_token(tab, address):
    page = visit(tab, f"{address}/estimators?run=chain&part=Proxy")
    circle = """() => { const gd = document.querySelector('.js-plotly-plot');
      const t = gd._fullData.find((t) => t.mode === 'markers'); return [t.x[0], t.y[0], [...t.customdata[0]]] }"""
    across, up, (step, group, rollout, t) = page.evaluate(circle)
    x, y, _ = spot(page, across, "yaxis", up)
    page.mouse.move(x - 2, y)
    page.mouse.click(x, y)
    page.wait_for_selector("h1:has-text('Tokens')", timeout=60 * SECONDS)
    page.wait_for_selector(".tok.chosen", timeout=60 * SECONDS)
    assert asked(page, "step") in (None, f"{step}")  # the step that the page begins with leaves the address
    assert [asked(page, name) for name in ("prompt", "token")] == [f"{group}", f"{rollout}.{t}"]


@pytest.mark.parametrize(("width", "inches"), [("one column", 3.25), ("two columns", 6.75)])
def test_a_figure_is_saved_as_wide_as_a_column_of_a_paper(width, inches, tab, address):
    page = visit(tab, f"{address}/run?run=chain")
    finished(page)
    page.locator("[data-testid=stPopover] button").first.click()
    page.locator("[data-testid=stPopoverBody] [data-testid=stSelectbox] input").click()
    page.locator(f"[role=option]:has-text('{width}')").click()
    finished(page)
    svg = saved(page, "svg").decode()
    size = re.search(r'<svg[^>]* width="([\d.]+)"', svg)
    assert float(size[1]) == pytest.approx(96 * inches, abs=0.01) and "viewBox" in svg
    page.locator("[data-testid=stPopover] button").first.click()  # saving closed it
    page.locator("[data-testid=stPopoverBody] button:has-text('png')").click()
    finished(page)
    assert struct.unpack(">I", saved(page, "png")[16:20])[0] == round(300 * inches)  # the width in a PNG's first chunk


def saved(page, kind: str) -> bytes:
    """What the camera of the first figure saves, once the figure is drawn with what was chosen."""
    options = "document.querySelector('.js-plotly-plot')._context?.toImageButtonOptions"
    page.wait_for_function(f"{options}?.format === '{kind}' && {options}.width > 0", timeout=60_000)
    page.locator(".js-plotly-plot").first.hover(position={"x": 300, "y": 120})
    with page.expect_download() as download:
        page.locator(".js-plotly-plot .modebar-btn[data-title*=ownload]").first.evaluate("(e) => e.click()")
    return Path(download.value.path()).read_bytes()
